"""A real supervisor tells a service manager how it is: ready, fed, reloading, stopping. It never waits for one."""

import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from protocol.verbs import Right
from supervisor.keys.store import KeyStore
from tests.serving import WITHIN, Serving, engine, marked_processes, wait_until

MODELS = {"m": engine()}


class Manager:
    """The socket of a service manager, with all lines that came. ``address`` is the value of $NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        self.socket.settimeout(WITHIN)
        self.lines: list[str] = []

    def wait_for(self, start: str) -> str:
        """Read until a new line begins with ``start``, and return it. TimeoutError after WITHIN seconds of silence."""
        while True:
            fresh = self.socket.recv(4096).decode().splitlines()
            self.lines += fresh
            if found := [line for line in fresh if line.startswith(start)]:
                return found[0]

    def drain(self) -> None:
        """Take out everything that waits."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(4096):
                pass
        except BlockingIOError:
            pass


def fill(sender: socket.socket, address: str) -> None:
    """Send to a socket until its queue is full."""
    try:
        while sender.sendto(b"X=1", address):
            pass
    except BlockingIOError:
        pass


@contextmanager
def managed(
    manager: Manager,
    models: dict[str, dict[str, Any]],
    gateway: dict[str, Any] | None = None,
    listen: str | None = None,
    keys: Path | None = None,
    **variables: str,
) -> Iterator[Serving]:
    """Start a supervisor below a service manager."""
    with closing(manager.socket):
        serving = Serving(models, gateway=gateway, listen=listen, keys=keys, begin=False, wait=False)
        serving.environment |= {"NOTIFY_SOCKET": manager.address, **variables}
        serving.start_again(models)
        with serving:
            yield serving


def addresses(directory: Path) -> list[str]:
    return [str(directory / "notify"), f"@modelctl-test-{uuid4().hex}"]


@pytest.mark.parametrize("kind", [0, 1], ids=["path", "abstract"])
def test_from_ready_over_a_reload_to_the_end(tmp_path: Path, kind: int) -> None:
    manager = Manager(addresses(tmp_path)[kind])
    with managed(manager, MODELS) as serving:
        manager.wait_for("READY=1")
        assert "STATUS=1 of 1 workers ready; ready: m" in manager.lines
        assert not any(line.startswith("WATCHDOG") for line in manager.lines)
        variables = [process.environ() for process in psutil.Process(serving.pid).children(recursive=True)]
        assert variables
        assert not any("NOTIFY_SOCKET" in names for names in variables)

        serving.write_models(MODELS | {"n": engine()})
        serving.process.send_signal(signal.SIGHUP)
        manager.wait_for("RELOADING=1")
        assert manager.lines[-1].startswith("MONOTONIC_USEC=")
        manager.wait_for("READY=1")
        assert serving.status("n")["state"] == "ready"

        serving.config.write_text("models: 7")  # a refused reload is over at once, and said to be
        serving.process.send_signal(signal.SIGHUP)
        manager.wait_for("RELOADING=1")
        manager.wait_for("READY=1")

        serving.process.send_signal(signal.SIGTERM)
        manager.wait_for("STOPPING=1")
        assert any(line.startswith("STATUS=shutting down") for line in manager.lines)
        assert serving.process.wait(WITHIN) == 0


def test_it_is_ready_when_a_model_has_failed_for_good(tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    models = {"m": engine(), "bad": {"model_dir": ".", "engine": "tests.deterministic_engine:CannotLoad"}}
    with managed(manager, models) as serving:
        manager.wait_for("READY=1")
        assert serving.status("bad")["state"] == "failed"
        assert "STATUS=1 of 2 workers ready; ready: m; failed: bad" in manager.lines


def test_it_is_ready_when_the_gateway_serves_or_has_said_why_not(tmp_path: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        gateway = {"listen": f"127.0.0.1:{taken.getsockname()[1]}", "auth": "none"}
        manager = Manager(str(tmp_path / "notify"))
        with managed(manager, MODELS, gateway) as serving:
            manager.wait_for("READY=1")
            (status,) = [line for line in manager.lines if "ready: m" in line]
            assert "; no gateway: cannot listen on 127.0.0.1" in status
            taken.close()
            wait_until(lambda: manager.wait_for("STATUS=").endswith("ready: m"), what="the status without a problem")
            wait_until(lambda: serving.overview()["supervisor"]["gateway"]["ready"], what="the gateway that serves")


def test_it_is_ready_without_the_port_over_tcp_and_says_so(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys")
    keys.add("a", frozenset({Right.INFER}), tmp_path / "a.key")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        manager = Manager(str(tmp_path / "notify"))
        with managed(manager, MODELS, listen=endpoint, keys=keys.directory):
            manager.wait_for("READY=1")
            statuses = [line for line in manager.lines if line.startswith("STATUS=1 of 1")]
            assert f"; cannot listen on {endpoint} (supervisor.listen): " in statuses[-1]
            taken.close()
            wait_until(lambda: "cannot listen" not in manager.wait_for("STATUS="), what="the status without a problem")


def test_only_the_loop_feeds_the_watchdog(tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    with managed(manager, MODELS, WATCHDOG_USEC="400000") as serving:
        manager.wait_for("READY=1")
        manager.wait_for("WATCHDOG=1")
        manager.wait_for("WATCHDOG=1")
        serving.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(serving.pid).status() == psutil.STATUS_STOPPED, what="the stop")
        manager.drain()  # what was sent before the stop
        manager.socket.settimeout(1.5)
        with pytest.raises(TimeoutError):
            manager.wait_for("WATCHDOG=1")
        manager.socket.settimeout(WITHIN)
        serving.process.send_signal(signal.SIGCONT)
        manager.wait_for("WATCHDOG=1")


@pytest.mark.long
def test_a_manager_that_does_not_read_holds_nothing_up_and_learns_it_later(tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as other:
        other.setblocking(False)
        fill(other, manager.address)
    with managed(manager, MODELS) as serving:
        serving.wait_state("m", "ready")
        assert serving.modelctl("run", "m", "hello").returncode == 0
        manager.wait_for("READY=1")


def test_a_manager_that_is_gone_is_named_in_the_log_and_is_no_reason_to_end(tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    manager.socket.close()
    with managed(manager, MODELS) as serving:
        serving.wait_state("m", "ready")
        wait_until(lambda: "the service manager cannot be told" in serving.log(), what="the line in the log")


def test_a_watchdog_that_ends_a_stuck_supervisor_gets_its_stack(tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    with managed(manager, MODELS, WATCHDOG_USEC="60000000") as serving:
        manager.wait_for("READY=1")
        serving.kill(signal.SIGABRT)
        assert serving.process.returncode == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in serving.stderr()
        assert "reactor.py" in serving.stderr()
        wait_until(lambda: not marked_processes("NOTIFY_SOCKET", manager.address), what="the end of all processes")
