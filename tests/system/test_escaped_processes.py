"""Whatever a worker has started ends with it, also in a session of its own and with a parent that has ended."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Serve
from tests.keyed import free_port
from tests.serving import Serving, describe, engine, is_alive, wait_until


def escaping(how: str) -> dict[str, object]:
    return engine() | {"engine": f"tests.orphan_engines:{how}"}


@pytest.fixture
def escaped() -> Iterator[Callable[[Serving, str, int], list[psutil.Process]]]:
    """Return a function that returns the processes that a model's log names, once there are so many."""
    found: list[psutil.Process] = []

    def find(serving: Serving, model: str, count: int) -> list[psutil.Process]:
        def named() -> list[psutil.Process] | None:
            pids = re.findall(r"(?:daemon|outer|inner) pid (\d+)\.", serving.log(model))[-count:]
            return [psutil.Process(int(pid)) for pid in pids] if len(pids) == count else None

        processes = wait_until(named, what=f"{count} processes in the log of {model}")
        found.extend(processes)
        assert all(map(is_alive, processes))
        return processes

    yield find
    for process in found:
        if is_alive(process):
            process.kill()


Find = Callable[[Serving, str, int], list[psutil.Process]]
HOWS = [("EscapesBySession", 3), ("EscapesByFork", 1), ("EscapesUnmarked", 1)]


def wait_gone(processes: list[psutil.Process]) -> None:
    wait_until(lambda: not any(map(is_alive, processes)), what=f"the end of {describe(processes)}")


@pytest.mark.parametrize(("how", "count"), HOWS)
def test_it_ends_with_a_worker_that_is_stopped(serve: Serve, escaped: Find, how: str, count: int) -> None:
    serving = serve({"a": escaping(how), "b": engine(autostart=False)})
    left = escaped(serving, "a", count)
    serving.order("stop", model="a")
    serving.wait_state("a", "stopped")
    wait_gone(left)


@pytest.mark.parametrize(("how", "count"), HOWS)
def test_it_ends_with_a_worker_that_is_killed(serve: Serve, escaped: Find, how: str, count: int) -> None:
    serving = serve({"a": escaping(how)})
    left = escaped(serving, "a", count)
    os.kill(serving.status("a")["pid"], signal.SIGKILL)
    wait_gone(left)
    serving.wait_state("a", "ready")
    escaped(serving, "a", count)


@pytest.mark.parametrize(("how", "count"), HOWS)
@pytest.mark.parametrize("now", [False, True])
def test_it_ends_with_the_supervisor_that_is_shut_down(
    serve: Serve, escaped: Find, how: str, count: int, now: bool
) -> None:
    serving = serve({"a": escaping(how)})
    left = escaped(serving, "a", count)
    serving.order("shutdown", now=now)
    serving.process.wait()
    assert not [process for process in left if is_alive(process)], "it has ended before the supervisor"


@pytest.mark.parametrize(("how", "count"), HOWS[:2])
def test_it_ends_with_the_supervisor_that_is_killed(serve: Serve, escaped: Find, how: str, count: int) -> None:
    """The guard finds it by the mark in its environment."""
    serving = serve({"a": escaping(how)})
    left = escaped(serving, "a", count)
    serving.kill()
    wait_gone(left)


def test_what_ended_with_its_worker_is_collected(serve: Serve) -> None:
    """The supervisor sees these children for the first time when they are zombies. They stayed for a minute."""
    serving = serve({"a": engine() | {"engine": "tests.orphan_engines:ForksFamily"}})
    worker = psutil.Process(serving.status("a")["pid"])
    family = wait_until(lambda: found if len(found := worker.children(recursive=True)) == 2 else None, what="a family")
    os.kill(serving.pid, signal.SIGSTOP)
    try:
        os.killpg(worker.pid, signal.SIGKILL)
        wait_until(lambda: all(p.status() == psutil.STATUS_ZOMBIE for p in family if p.is_running()), what="their end")
    finally:
        os.kill(serving.pid, signal.SIGCONT)
    wait_until(lambda: not any(psutil.pid_exists(p.pid) for p in family), what="the supervisor to collect them")


def test_it_lives_as_long_as_its_worker(serve: Serve, escaped: Find) -> None:
    """The end of another worker, with its own children, leaves it alone."""
    serving = serve({"a": escaping("EscapesBySession"), "b": escaping("EscapesBySession")})
    kept, left = escaped(serving, "a", 3), escaped(serving, "b", 3)
    serving.order("stop", model="b")
    wait_gone(left)
    serving.order("start", model="b")
    serving.wait_state("b", "ready")
    assert all(map(is_alive, kept))
    with serving.client() as client:
        assert client.complete("a", "x", max_tokens=3).token_ids
    adopted = next(process for process in kept if process.ppid() == serving.pid)
    adopted.kill()
    wait_until(lambda: not psutil.pid_exists(adopted.pid), what="the supervisor to collect it")


def test_an_unmarked_one_waits_for_all_workers_that_may_have_started_it(serve: Serve, escaped: Find) -> None:
    serving = serve({"a": escaping("EscapesUnmarked"), "b": engine()})
    (left,) = escaped(serving, "a", 1)
    serving.order("stop", model="a")
    wait_until(lambda: f"pid {left.pid} " in serving.log(), what="a line about it in the log")
    serving.wait_state("a", "stopped")
    assert is_alive(left)
    line = rf"pid {left.pid} \(.*\) was started by a worker, .* when the workers of (a, )?b have ended"
    assert re.search(line, serving.log())
    serving.order("stop", model="b")
    wait_gone([left])


HAD_A_CHILD = """
import runpy, subprocess
if __name__ == "__main__":
    child = subprocess.Popen(["sleep", "3600"], env={}, start_new_session=True)
    print(f"daemon pid {child.pid}.", flush=True)
    runpy.run_module("supervisor", run_name="__main__", alter_sys=True)
"""


def test_a_child_from_before_the_supervisor_is_left_alone(serve: Serve, tmp_path: Path) -> None:
    """A shell may start something in the background, and then become the supervisor (exec)."""
    script = tmp_path / "had_a_child.py"
    script.write_text(HAD_A_CHILD)
    serving = serve({"a": engine()}, script=script)
    child = psutil.Process(int(serving.stderr().partition("daemon pid ")[2].partition(".")[0]))
    try:
        assert child.ppid() == serving.pid
        serving.order("shutdown")
        serving.process.wait()
        assert is_alive(child)
    finally:
        child.kill()


def test_helpers_of_the_supervisor_are_left_alone(serve: Serve, escaped: Find) -> None:
    """The gateway and the writer of usage are children of the supervisor, too, and outlive every worker."""
    gateway = {"listen": f"127.0.0.1:{free_port()}", "auth": "none"}
    serving = serve({"a": escaping("EscapesUnmarked")}, gateway=gateway)
    worker = serving.status("a")["pid"]

    def helpers() -> set[int]:
        return {p.pid for p in psutil.Process(serving.pid).children() if is_alive(p) and p.pid != worker}

    (left,) = escaped(serving, "a", 1)
    wait_until(lambda: (serving.overview()["supervisor"]["gateway"] or {}).get("ready"), what="the gateway")
    before = helpers() - {left.pid}
    assert len(before) >= 4, "the guard, the gateway, the writer of usage, and the resource tracker of multiprocessing"
    serving.order("stop", model="a")
    wait_gone([left])
    assert helpers() == before
