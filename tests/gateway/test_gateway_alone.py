"""``modelctl gateway`` serves a supervisor on another machine, here over TCP."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from tests.deterministic_engine import answer
from tests.keyed import Keyed, free_port
from tests.serving import ROOT, WITHIN, engine, is_alive, wait_until

BODY = {"model": "m", "prompt": "hello", "max_tokens": 5}


@pytest.fixture(scope="module")
def keyed() -> Iterator[Keyed]:
    with Keyed({"m": engine()}, {"web": "gateway", "laptop": "infer"}) as keyed:
        yield keyed


def command(*options: object) -> list[str]:
    return [sys.executable, "-m", "supervisor", "gateway", *map(str, options)]


def to(keyed: Keyed, key: str = "web") -> tuple[object, ...]:
    return "--connect", keyed.endpoint, "--key-file", keyed.file(key)


@contextmanager
def gateway(*options: object, stderr: IO[bytes] | None = None) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a gateway inside the context. At the end none of its processes may be left."""
    with subprocess.Popen(command(*options), cwd=ROOT, stderr=stderr) as process:
        family: list[psutil.Process] = []
        try:
            # The port is open before the first process is started.
            wait_until(lambda: psutil.Process(process.pid).children(), what="its processes")
            family = psutil.Process(process.pid).children(recursive=True)
            yield process
        finally:
            process.terminate()
            assert process.wait(WITHIN) in (0, -signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, family)), what="the end of the gateway's processes")


def post(port: int, token: str | None) -> tuple[int, dict[str, Any]]:
    """Ask for an answer. Return the status and the JSON."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(BODY), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def failure(*options: object) -> tuple[int, str]:
    done = subprocess.run(command(*options), cwd=ROOT, capture_output=True, text=True, timeout=WITHIN)
    return done.returncode, done.stderr


def test_it_serves_a_supervisor_over_tcp_which_checks_the_tokens(keyed: Keyed) -> None:
    port, token = free_port(), keyed.new_http("web-user")
    with gateway("--listen", f"127.0.0.1:{port}", *to(keyed)):
        status, body = post(port, token)
        assert (status, body["choices"][0]["text"]) == (200, answer("hello", 5))
        assert post(port, None)[0] == 401
        assert post(port, "mctl_unknown")[0] == 401
        keyed.store.revoke("web-user")
        wait_until(lambda: post(port, token)[0] == 401, what="the end of a revoked token")


@pytest.mark.parametrize("how", ["revoked", "without the right"])
def test_a_gateway_whose_own_key_is_refused_does_not_blame_the_token(keyed: Keyed, tmp_path: Path, how: str) -> None:
    port, token, name = free_port(), keyed.new_http(f"user-{how[:3]}"), f"own-{how[:3]}"
    keyed.new(name, "gateway")
    log = tmp_path / "log"
    with log.open("wb") as stderr, gateway("--listen", port, *to(keyed, name), stderr=stderr):
        wait_until(lambda: post(port, token)[0] == 200, what="an answer")
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
            long = BODY | {"max_tokens": 3000, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(long), {"authorization": f"Bearer {token}"})
            response = connection.getresponse()
            assert response.readline().startswith(b"data: ")
            if how == "revoked":
                keyed.store.revoke(name)
                assert b"cannot reach the supervisor" in response.read()
            else:
                path = keyed.store.directory / "clients.json"
                entries = json.loads(path.read_text())
                for entry in entries["clients"]:
                    if entry["name"] == name:
                        entry["rights"] = ["infer"]
                path.with_name("new").write_text(json.dumps(entries))
                path.with_name("new").chmod(0o600)
                path.with_name("new").replace(path)
        wait_until(lambda: post(port, token)[0] != 200, what="the end of the gateway's key")
        for credential in (token, "mctl_unknown"):
            status, body = post(port, credential)
            assert (status, body["error"]["code"], body["error"]["param"]) == (503, "connection_lost", None)
            assert "the gateway cannot reach the supervisor" in body["error"]["message"]
            assert name not in body["error"]["message"]
    told = log.read_text()
    assert told.count("refuses this gateway's own key") == 1
    assert f"'{name}'" in told


def test_its_log_is_json_on_request_and_as_terse_as_wanted(keyed: Keyed, tmp_path: Path) -> None:
    port, token = free_port(), keyed.new_http("json-user")
    for level in ("info", "warning"):
        with (tmp_path / level).open("wb") as stderr:
            style = ("--log-format", "json", "--log-level", level)
            with gateway("--listen", port, *style, *to(keyed), stderr=stderr):
                wait_until(lambda: post(port, token)[0] == 200, what="an answer")
    lines = [json.loads(line) for line in (tmp_path / "info").read_text().splitlines()]
    assert any("127.0.0.1" in line["message"] for line in lines)
    assert {line["process"] for line in lines} == {"gateway"}
    levels = {json.loads(line)["level"] for line in (tmp_path / "warning").read_text().splitlines()}
    assert "info" not in levels


def test_it_waits_for_a_supervisor_and_answers_meanwhile() -> None:
    port, models = free_port(), {"m": engine()}
    with Keyed(models, {"web": "gateway"}) as keyed:
        token = keyed.new_http("web-user")
        keyed.serving.kill()
        with gateway("--listen", port, *to(keyed)):
            assert post(port, token)[0] == 503
            keyed.serving.start_again(models)
            wait_until(lambda: post(port, token)[0] == 200, what="an answer, once the supervisor is there")


def test_its_processes_end_with_it_when_it_is_killed(keyed: Keyed) -> None:
    with gateway("--listen", free_port(), "--processes", 2, *to(keyed)) as process:
        wait_until(lambda: len(psutil.Process(process.pid).children()) == 2)
        process.kill()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--auth", "none", "--listen", "0.0.0.0:8000"), "--auth: is none, and the gateway listens on 0.0.0.0:8000"),
        (("--listen", "example.org:80"), "--listen: is 'example.org:80': must be ADDRESS:PORT"),
        (("--allowed-host", "a b"), "--allowed-host: is 'a b': must be a host name"),
        (("--certificate", "a.pem"), "--certificate: needs private_key"),
        (("--processes", "0"), "--processes: is 0: must be a whole number from 1 to 64"),
    ],
)
def test_a_wrong_option_is_named_with_its_remedy(options: tuple[str, ...], says: str) -> None:
    code, text = failure(*options)
    assert code == 2
    assert says in text


def test_what_keeps_it_from_serving_ends_it_with_the_reason(keyed: Keyed, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, text = failure("--listen", f"127.0.0.1:{taken.getsockname()[1]}", *to(keyed))
    assert code == 78
    assert "cannot listen on 127.0.0.1:" in text
    code, text = failure("--connect", keyed.endpoint, "--key-file", tmp_path / "missing.key")
    assert code == 78
    assert str(tmp_path / "missing.key") in text
