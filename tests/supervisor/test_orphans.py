"""A supervisor finds the processes that a former supervisor left behind, and no other processes."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from supervisor.workers import orphans
from supervisor.workers.orphans import (
    FILE,
    MARK,
    Living,
    Orphans,
    Recorded,
    WorkersRecord,
    boot_id,
    command_of,
    left_behind,
    lineage,
    processes_with,
    start_of,
)
from tests.serving import is_alive

LOG = logging.getLogger("test")
WORKER = Living(100, 1, 100, 5_000, 1000, None, "worker")
RECORD = WorkersRecord("boot", ("our mark",), (Recorded(100, 5_000, "letters"),))


def found(*seen: Living, boot: str = "boot", spare: tuple[int, ...] = ()) -> list[tuple[int, bool]]:
    return [(left.pid, left.ours) for left in left_behind(RECORD, boot, seen, 1000, spare)]


def changed(pid: int, **fields: object) -> Living:
    return dataclasses.replace(WORKER, pid=pid, **fields)  # type: ignore[arg-type]


def test_a_worker_and_its_session_are_ours() -> None:
    assert found(WORKER, changed(101, started=5_001)) == [(100, True), (101, True)]
    assert found(changed(100, session=7)) == [(100, True)], "it had not left its supervisor's session yet"


def test_the_mark_is_enough() -> None:
    assert found(changed(300, session=300, mark="our mark")) == [(300, True)]
    assert found(changed(300, session=300, mark="another's")) == []


def test_nobody_elses() -> None:
    assert found(changed(100, uid=0), changed(300, session=300, uid=0, mark="our mark")) == []
    assert found(WORKER, boot="a later one") == []
    assert found(changed(300, session=300)) == []
    assert found(WORKER, spare=(100,)) == []


def test_a_number_that_was_given_to_another() -> None:
    later = changed(100, started=9_000)
    assert found(later, changed(101, started=9_001)) == []
    assert found(dataclasses.replace(later, uid=0), changed(101, started=9_001)) == [], "whosever it is"


def test_the_session_of_a_worker_that_is_gone_proves_nothing() -> None:
    assert found(changed(101, started=5_001)) == [(101, False)]
    assert found(changed(101, started=4_999)) == [], "older than the worker"
    assert found(changed(101, started=5_001, mark="our mark")) == [(101, True)]


def test_a_successor_does_not_end_itself_nor_who_started_it() -> None:
    seen = [changed(1, parent=0), changed(2, parent=1), changed(3, parent=2), changed(4, parent=2)]
    assert lineage(3, seen) == {3, 2, 1}


def test_processes_are_seen_as_they_are() -> None:
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "a (b) c\n"],
        env={**os.environ, "SOME_MARK": "x y"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (seen,) = [each for each in processes_with("SOME_MARK") if each.pid == process.pid]
        assert (seen.parent, seen.session, seen.uid, seen.mark) == (os.getpid(), process.pid, os.getuid(), "x y")
        assert seen.started == start_of(process.pid)
        assert seen.command.endswith("a (b) c")
        process.kill()
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            pass
        assert process.pid not in {each.pid for each in processes_with("SOME_MARK")}, "a zombie holds nothing"
    assert start_of(process.pid) is None
    assert command_of(process.pid) == "?"


@pytest.fixture
def sleeper(monkeypatch: pytest.MonkeyPatch) -> Iterator["subprocess.Popen[bytes]"]:
    monkeypatch.delenv(MARK, raising=False)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_recorded_worker_is_ended_by_the_next(
    tmp_path: Path,
    sleeper: "subprocess.Popen[bytes]",
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(orphans, "DYING_S", 0.0)
    former = Orphans(tmp_path, LOG)
    former.sweep({})
    former.record(sleeper.pid, "letters")
    (left,) = Orphans(tmp_path, LOG).sweep({sleeper.pid: "3.1 GiB of GPU 1"})
    assert (left.pid, left.model, left.ours) == (sleeper.pid, "letters", True)
    assert sleeper.wait(60) == -9
    (reported,) = [record.getMessage() for record in caplog.records]
    assert reported.startswith(f"letters: a former supervisor left pid {sleeper.pid} (")
    assert reported.endswith("), which holds 3.1 GiB of GPU 1 behind: killing it")
    assert json.loads((tmp_path / FILE).read_text())["workers"] == []
    assert Orphans(tmp_path, LOG).sweep({}) == []


def test_a_stranger_is_named_and_left_alone(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]", caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    former = Orphans(tmp_path, LOG)
    former.record(sleeper.pid, "letters")
    file = tmp_path / FILE
    file.write_text(file.read_text().replace(f'"started": {start_of(sleeper.pid)}', '"started": 1'))
    assert Orphans(tmp_path, LOG).sweep({sleeper.pid: "3.1 GiB of GPU 1"}) == []
    assert is_alive(psutil.Process(sleeper.pid))
    (reported,) = [record.getMessage() for record in caplog.records]
    assert reported.startswith(f"pid {sleeper.pid} (")
    assert reported.endswith("holds 3.1 GiB of GPU 1, and is none of ours: left alone")


def test_a_worker_that_was_reaped_is_not_looked_for(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    former = Orphans(tmp_path, LOG)
    former.record(sleeper.pid, "letters")
    former.record(os.getpid(), "stories")
    former.forget(sleeper.pid)
    former.forget(99)
    report = json.loads((tmp_path / FILE).read_text())
    assert [(w["pid"], w["model"]) for w in report["workers"]] == [(os.getpid(), "stories")]
    assert report["boot"] == boot_id()
    assert Orphans(tmp_path, LOG).sweep({}) == [], "and nobody ends himself"
    assert is_alive(psutil.Process(sleeper.pid))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"boot": "", "marks": [], "workers": [{"pid": "x"}]}', "\xff"])
def test_a_record_that_cannot_be_read_is_said_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    assert Orphans(tmp_path, LOG).sweep({}) == []
    assert "cannot be read" in caplog.text
    assert json.loads((tmp_path / FILE).read_text())["workers"] == []


def test_a_full_disk_costs_the_record_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / f"{FILE}.new").symlink_to("/dev/full")
    record = Orphans(tmp_path, LOG)
    for _ in range(3):
        record.sweep({})
        record.record(os.getpid(), "letters")
        record.forget(os.getpid())
    assert not (tmp_path / FILE).exists()
    assert [r.getMessage() for r in caplog.records] == [f"{tmp_path / FILE} cannot be written: No space left on device"]
