"""Without a subreaper, what a worker has left is found among all processes of the machine, by its mark alone."""

import logging
import os
import subprocess
import time
from collections.abc import Iterator
from itertools import cycle, islice
from uuid import uuid4

import psutil
import pytest

from supervisor.workers import orphans
from supervisor.workers.guard import WORKER_MARK
from supervisor.workers.orphans import SLICE, Descendants, all_processes, is_subreaper
from tests.serving import is_alive, wait_until

LOG = logging.getLogger("test")
MARK = uuid4().hex


@pytest.fixture
def left() -> Iterator[list[psutil.Process]]:
    """Processes in sessions of their own: of worker 1, of worker 2, of another supervisor, of nobody."""
    marks = [f"{MARK}-1", f"{MARK}-2", f"{uuid4().hex}-1", ""]
    started = [
        subprocess.Popen(["sleep", "3600"], start_new_session=True, env={**os.environ, WORKER_MARK: mark})
        for mark in marks
    ]
    yield [psutil.Process(process.pid) for process in started]
    for process in started:
        process.kill()
        process.wait()


def look_until_done(those: Descendants) -> int:
    """Look until nothing is left to do. Return the number of calls."""
    calls, pause = 0, 0.0

    def done() -> bool:
        nonlocal calls, pause
        calls += 1
        pause = those.look(time.monotonic())  # type: ignore[assignment]
        return pause is None

    wait_until(done, what="a look that finds nothing")
    return calls


def test_only_what_has_the_mark_of_an_ended_worker_is_killed(
    left: list[psutil.Process], caplog: pytest.LogCaptureFixture
) -> None:
    assert not is_subreaper(), "the tests' process"
    those = Descendants(MARK, LOG)
    for name in ("letters", "stories"):
        those.began(those.new_mark(), 1, name)
    look_until_done(those)
    assert all(map(is_alive, left)), "both workers live"
    those.ended(f"{MARK}-1")
    look_until_done(those)
    assert [is_alive(process) for process in left] == [False, True, True, True]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"letters: killing what has outlived its worker: pid {left[0].pid} (sleep 3600)"
    those.end_all()
    assert [is_alive(process) for process in left] == [False, False, True, True]


def test_one_call_looks_at_a_few_processes_only(left: list[psutil.Process], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop waits for each call. A machine may have many thousands of processes."""
    others = cycle(pid for pid in all_processes() if pid != left[0].pid)
    many = [*islice(others, 5 * SLICE - 1), left[0].pid]
    monkeypatch.setattr(orphans, "all_processes", lambda: many)
    those = Descendants(MARK, LOG)
    for _ in range(5):
        assert is_alive(left[0])
        assert those.look(time.monotonic()) == orphans.NEXT_S
    wait_until(lambda: not is_alive(left[0]))
