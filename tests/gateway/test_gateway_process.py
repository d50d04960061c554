"""The supervisor starts the gateway's processes, watches them, starts them again, and ends them when it ends."""

import http.client
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from tests.deterministic_engine import answer
from tests.gateway.asking import ask, begin, described
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine, is_alive, wait_until


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def serving(port: int) -> Iterator[Serving]:
    gateway = {"listen": f"127.0.0.1:{port}", "auth": "none"}
    with Serving({"m": engine(context=100_000)}, gateway=gateway) as serving:
        yield serving


def test_a_killed_gateway_comes_back_and_its_requests_leave_the_engine(serving: Serving, port: int) -> None:
    body = {"model": "m", "prompt": "hello", "max_tokens": 5}
    assert ask(port, "/v1/completions", body)["choices"][0]["text"] == answer("hello", 5)
    with ExitStack() as stack:
        connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN) for _ in range(8)]
        for connection in connections:
            stack.callback(connection.close)
        streams = [begin(connection, body | {"max_tokens": 90_000}) for connection in connections]
        assert serving.status("m")["active"] == 8
        (pid,) = described(serving)["pids"]
        os.kill(pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                stream.read()
    serving.wait_idle("m")
    # The supervisor holds the listening socket, so no connection is refused meanwhile.
    assert ask(port, "/v1/completions", body)["choices"][0]["text"] == answer("hello", 5)
    now = described(serving)
    assert now["pids"] != [pid]
    assert (now["restarts"], now["problem"]) == (1, None)
    with serving.client(admin=True) as client:
        told = [event for event in client.call("events")["events"] if event["kind"] == "gateway"]
        assert [event["level"] for event in told[-2:]] == ["warning", "info"]
        assert f"process {pid} ended by SIGKILL" in told[-2]["message"]
        assert client.call("logs", model="gateway")["position"] != "0-0"
    assert "gateway: process" in serving.log()


def test_the_gateway_ends_with_a_supervisor_that_is_killed(serving: Serving, port: int) -> None:
    assert ask(port, "/livez")
    gateway = psutil.Process(described(serving)["pids"][0])
    serving.kill()
    wait_until(lambda: not is_alive(gateway), what="the gateway's end")


def test_several_processes_share_the_port(port: int) -> None:
    gateway = {"listen": port, "auth": "none", "processes": 2}
    with Serving({"m": engine()}, gateway=gateway) as serving:
        pids = described(serving)["pids"]
        assert len(set(pids)) == 2
        assert all(ask(port, "/livez") for _ in range(20))


def test_a_port_that_is_taken_is_named_and_opened_when_it_is_free(port: int) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # a program that would share the port also counts
        other.bind(("127.0.0.1", port))
        other.listen()
        with Serving({"m": engine()}, gateway={"listen": port, "auth": "none"}) as serving:
            problem = described(serving)["problem"]
            assert f"127.0.0.1:{port}" in problem
            assert "gateway.listen" in problem
            other.close()
            wait_until(lambda: described(serving)["problem"] is None)
            assert ask(port, "/livez")


def test_probes_need_no_key_and_tell_nothing_but_the_state(port: int) -> None:
    gateway = {"listen": port, "auth": "keys"}
    with Serving({"m": engine(), "n": engine("SlowLoad", load_s=1e4)}, gateway=gateway, wait=False) as serving:
        serving.wait_state("m", "ready")
        serving.wait_state("n", "loading")
        assert ask(port, "/livez") == b"ok\n"
        assert ask(port, "/readyz") == b"ok\n"
        for name in ("m", "n", "x"):
            with pytest.raises(AssertionError, match="no token"):
                ask(port, f"/readyz?model={name}")
        with pytest.raises(AssertionError, match="not ready"):
            ask(port, "/health")
        serving.order("stop", model="n", now=True)
        wait_until(lambda: serving.status("n")["state"] == "stopped")
        assert ask(port, "/health") == b"ok\n"


def test_probes_count_a_model_that_a_request_loads_and_none_that_is_stopped_or_has_failed(port: int) -> None:
    models = {"lazy": engine(lazy=True), "stopped": engine(autostart=False), "failed": engine("CannotLoad")}
    gateway = {"listen": port, "auth": "none"}
    with Serving(models, gateway=gateway, wait=False) as serving:
        serving.wait_state("failed", "failed")
        wait_until(lambda: described(serving)["ready"])
        for path in ("/readyz", "/readyz?model=lazy", "/health"):
            assert ask(port, path) == b"ok\n"
        for name in ("stopped", "failed"):
            with pytest.raises(AssertionError, match="not ready"):
                ask(port, f"/readyz?model={name}")
        serving.order("stop", model="lazy")
        serving.wait_state("lazy", "stopped")
        for path in ("/readyz", "/health"):
            with pytest.raises(AssertionError, match="not ready"):
                ask(port, path)
