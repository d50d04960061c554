"""A serving gateway copes with reloads, newly installed packages, certificates, large logs, and hangs."""

import http.client
import json
import logging
import os
import shutil
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from protocol.process.worker_spec import GatewaySettings
from supervisor import gateway as gateway_child
from supervisor.config.server import Address, GatewayConfig
from supervisor.gateway import GatewayProcesses
from supervisor.helper import HelperWatch
from supervisor.logs.files import MAX_LOG_BYTES
from tests.deterministic_engine import answer
from tests.gateway.asking import ask, begin, described
from tests.hidden_packages import Hidden
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine, wait_until

TLS = Path(__file__).parent / "tls"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def serving(port: int) -> Iterator[Serving]:
    with Serving({"m": engine(context=100_000)}, gateway=section(port)) as serving:
        yield serving


def section(port: int, **keys: Any) -> dict[str, Any]:
    return {"listen": f"127.0.0.1:{port}", "auth": "none"} | keys


def reload(serving: Serving, gateway: dict[str, Any] | None) -> str:
    """Reload with another section ``gateway``. Return the output of the command."""
    serving.write_gateway(gateway)
    done = serving.modelctl("reload")
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
def test_a_reload_applies_the_section_and_breaks_no_stream(serving: Serving, port: int) -> None:
    body = {"model": "m", "prompt": "hello", "max_tokens": 2_500}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        stream = begin(connection, body)
        (before,) = described(serving)["pids"]
        assert reload(serving, section(port, allowed_hosts=["a.example"])) == "gateway.allowed_hosts: applied\n"
        assert ask(port, "/livez") == b"ok\n"
        wait_until(lambda: described(serving)["ready"])
        now = described(serving)
        assert (len(now["pids"]), now["restarts"], now["problem"]) == (1, 0, None)
        assert before not in now["pids"]
        lines = stream.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-2] if line.startswith("data: ")]
    text = "".join(choices[0]["text"] for choices in texts if choices)
    assert answer("hello", 2_500).endswith(text)
    wait_until(lambda: not psutil.pid_exists(before), what="the former process's end")
    assert reload(serving, section(port, allowed_hosts=["a.example"])) == "nothing has changed\n"
    assert described(serving)["pids"] == now["pids"]


@pytest.mark.long
def test_a_reload_changes_the_port_and_the_number_of_processes(serving: Serving, port: int) -> None:
    reload(serving, section(port, processes=3))
    wait_until(lambda: len(described(serving)["pids"]) == 3)
    reload(serving, section(port, processes=1))
    wait_until(lambda: len(described(serving)["pids"]) == 1)
    assert all(ask(port, "/livez") == b"ok\n" for _ in range(10)), "no connection waits in a socket that nobody reads"
    other = free_port()
    assert reload(serving, section(other)) == "gateway.listen: applied\n"
    wait_until(lambda: described(serving)["ready"])
    assert ask(other, "/livez") == b"ok\n"
    wait_until(lambda: not is_listening(port), what="the former port's end")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        serving.write_gateway(section(taken.getsockname()[1]))
        done = serving.modelctl("reload")
        assert done.returncode == 1
        assert "the gateway does not answer: cannot listen on 127.0.0.1:" in done.stderr
    reload(serving, None)
    assert described(serving) is None
    wait_until(lambda: not is_listening(other), what="the port's end")
    reload(serving, section(port))
    wait_until(lambda: described(serving)["ready"])
    assert ask(port, "/livez") == b"ok\n"
    assert serving.log().count("cannot listen") == 1, "the former processes are not in the way of the new ones"


@pytest.mark.long
def test_a_missing_extra_is_named_and_the_models_are_served(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = Hidden(tmp_path, "uvicorn", "starlette")
    monkeypatch.setenv("PYTHONPATH", hidden.python_path)
    with Serving({"m": engine()}, gateway=section(port)) as serving:
        now = described(serving)
        assert (now["pids"], now["ready"]) == ([], False)
        assert "the packages starlette, uvicorn: run " in now["problem"]
        assert "modelctl[gateway]" in now["problem"]
        assert now["problem"] in serving.log()
        assert "modelctl[gateway]" in serving.modelctl("status").stdout
        assert "modelctl[gateway]" in serving.modelctl("ps").stderr
        with serving.client() as client:
            assert client.complete("m", "hello", max_tokens=5).text == answer("hello", 5)
        hidden.install()
        wait_until(lambda: described(serving)["ready"], what="the gateway, once its packages are installed")
        assert ask(port, "/livez") == b"ok\n"


def test_tls(port: int, tmp_path: Path) -> None:
    for name in ("certificate.pem", "key.pem"):
        (tmp_path / name).write_bytes((TLS / name).read_bytes())
    for name in ("certificate.pem", "key.pem"):
        os.utime(tmp_path / name, ns=(0, 1_000_000_000))  # as all files of a Nix store
    files = {"certificate": str(tmp_path / "certificate.pem"), "private_key": str(tmp_path / "key.pem")}
    with Serving({"m": engine()}, gateway=section(port, **files)) as serving:
        assert described(serving)["tls"] is True
        context = ssl.create_default_context(cafile=TLS / "certificate.pem")
        with closing(http.client.HTTPSConnection("127.0.0.1", port, timeout=WITHIN, context=context)) as connection:
            stream = begin(connection, {"model": "m", "prompt": "hello", "max_tokens": 5})
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert f"listening on https://127.0.0.1:{port}" in serving.log()
        pids = described(serving)["pids"]
        assert serving.modelctl("reload").stdout == "nothing has changed\n"
        assert described(serving)["pids"] == pids
        shutil.copy2(tmp_path / "certificate.pem", tmp_path / "renewed.pem")
        (tmp_path / "renewed.pem").replace(tmp_path / "certificate.pem")
        assert serving.modelctl("reload").stdout == "gateway.certificate: applied\n"
        assert described(serving)["pids"] != pids


def test_a_certificate_that_cannot_be_used_is_named(port: int, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_bytes((TLS / "certificate.pem").read_bytes())
    key.write_text("no key")
    gateway = section(port, certificate=str(certificate), private_key=str(key))
    with Serving({"m": engine()}, gateway=gateway) as serving:
        wait_until(lambda: described(serving)["problem"])
        problem = described(serving)["problem"]
        assert f"the certificate {certificate} with the private key {key} cannot be used: " in problem
        assert described(serving)["ready"] is False
        key.write_bytes((TLS / "key.pem").read_bytes())
        wait_until(lambda: described(serving)["ready"], what="the gateway, once its key is right")
        assert described(serving)["problem"] is None


def test_the_log_is_kept_small(serving: Serving, port: int) -> None:
    assert ask(port, "/livez") == b"ok\n"
    log = Path(described(serving)["log"])
    os.truncate(log, MAX_LOG_BYTES + 1)
    wait_until(lambda: log.with_name("gateway.log.1").exists() and log.exists(), what="another log")
    assert log.stat().st_size <= MAX_LOG_BYTES


@pytest.mark.long
def test_a_process_that_hangs_is_replaced(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's process starts, watches and ends the processes of a second gateway."""
    monkeypatch.setattr(gateway_child, "HANG_S", 2.0)
    config = GatewayConfig(listen=Address("127.0.0.1", free_port()), auth="none")
    settings = GatewaySettings(runtime_dir=str(serving.runtime_dir), auth="none", parent=os.getpid())
    watch = HelperWatch()
    gateway = GatewayProcesses(config, settings, logging.getLogger("test"), watch)

    def described() -> dict[str, Any]:
        gateway.check()
        watch.hear()
        found = gateway.describe()
        assert found is not None
        return found

    try:
        wait_until(lambda: described()["ready"], what="the gateway")
        (pid,) = described()["pids"]
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: described()["restarts"] == 1 and described()["ready"], what="another process")
        assert described()["pids"] != [pid]
        assert ask(config.listen.port, "/livez") == b"ok\n"
    finally:
        gateway.close()
