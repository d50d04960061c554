"""The request log: what a line holds, and a disk that is slower than the requests."""

import json
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.helper import HelperWatch
from supervisor.keys.rights import Identity
from supervisor.ports.sockets import Restarts
from supervisor.requests.stories import RequestEnd, RequestRecord, TimedStep
from supervisor.usage.request_log import RequestLog, line_of
from supervisor.usage.request_log_writer import RequestLogFile
from tests.serving import wait_until


def a_record(number: int, trace_ids: tuple[str, ...] = ("req_1",), **facts: Any) -> RequestRecord:
    steps = (
        TimedStep(10.0, "accepted", {"queue_position": 0, "ready": True}),
        TimedStep(11.0, "placed", {"worker": "m:2"}),
    )
    key = Identity("ann", "x" * 40)
    end = RequestEnd("stop", computed=True, cached_tokens=4, completion_tokens=7)
    record = RequestRecord(
        f"1-{number}", trace_ids, "m", key, "normal", 5, 6, 7, 0, 10.0, 11.0, 12.0, steps, end=end, ended=13.0
    )
    return replace(record, **facts)


WATCH = HelperWatch()


@pytest.fixture
def log() -> Iterator[RequestLog]:
    log = RequestLog(logging.getLogger("test"), WATCH)
    yield log
    log.close()


def lines(file: Path) -> list[dict[str, Any]]:
    WATCH.hear()
    whole = file.read_text().split("\n")[:-1] if file.exists() else []  # the last line may be half written
    return [json.loads(line) for line in whole]


def writer(log: RequestLog) -> int:
    assert log._helper.process is not None
    return log._helper.process.pid


def test_a_line_says_who_asked_what_it_took_and_how_it_ended() -> None:
    assert line_of(a_record(3), 1000.0) == {
        "time": 1013.0, "id": "1-3", "trace_ids": ["req_1"], "model": "m", "key": "ann", "priority": "normal",
        "finish_reason": "stop", "error": None, "error_message": None,
        "prompt_tokens": 5, "cached_tokens": 4, "tokens": 7, "resumes": 0,
        "accepted": 1010.0, "queue_ms": 1000.0, "first_token_ms": 2000.0, "total_ms": 3000.0,
        "tokens_per_s": 6.0, "worker": "m:2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "speed"),
    [
        ({}, 6.0),
        ({"tokens": 1}, None),
        ({"first_token": 0.0}, None),
        ({"ended": None}, None),
        ({"first_token": 13.0}, None),  # the answer came in one frame,
        ({"first_token": 12.9999}, None),  # or all its tokens, and the end at once after them
        ({"end": RequestEnd("stop", decode_ms=0.004)}, None),  # all tokens in one step, and the frames came late
        ({"end": RequestEnd("stop", decode_ms=2000.0)}, 3.0),
        ({"end": RequestEnd("stop", decode_ms=2000.0), "resumes": 1}, 6.0),  # it is the time of the last worker only
    ],
)
def test_the_speed_of_an_answer_is_told_if_there_was_time_to_measure_it(
    facts: dict[str, Any], speed: float | None
) -> None:
    assert line_of(a_record(3, **facts), 1000.0)["tokens_per_s"] == speed


def test_a_writer_that_hangs_costs_lines_and_no_time_and_the_log_says_how_many(log: RequestLog, tmp_path: Path) -> None:
    file = tmp_path / "new" / "requests.jsonl"
    log.adopt(file)
    log.add(a_record(0))
    wait_until(lambda: len(lines(file)) == 1)
    os.kill(writer(log), signal.SIGSTOP)
    added = 0
    while not log.lost:
        added += 1
        log.add(a_record(added))
    lost_first, log_pid = log.lost, writer(log)
    assert added > 100, "some wait"
    os.kill(log_pid, signal.SIGCONT)
    wait_until(lambda: len(lines(file)) == added)
    log.add(a_record(added + 1))
    wait_until(lambda: len(lines(file)) == added + 2)
    assert lines(file)[-2]["lost"] == lost_first
    assert lines(file)[-1]["id"] == f"1-{added + 1}"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_writer_that_dies_is_started_again(log: RequestLog, tmp_path: Path) -> None:
    log._helper._restarts = Restarts(0.0, 0.0)
    log.adopt(tmp_path / "log")
    first = writer(log)
    os.kill(first, signal.SIGKILL)

    def replaced() -> bool:
        WATCH.hear()
        log.check()
        return log._helper.process is not None and writer(log) != first

    wait_until(replaced)
    log.add(a_record(5))
    wait_until(lambda: [line.get("id") for line in lines(tmp_path / "log")][-1:] == ["1-5"])


def test_a_file_that_cannot_be_written_is_said(log: RequestLog, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    log.adopt(tmp_path / "fifo")

    def said() -> bool:
        log.add(a_record(1))
        WATCH.hear()
        return log.trouble is not None and "cannot be written" in log.trouble

    wait_until(said)
    told = log.describe()
    assert told is not None
    assert told["file"] == str(tmp_path / "fifo")
    log.adopt(None)
    assert log.describe() is None
    log.add(a_record(2))


def test_names_that_are_too_long_are_left_out(log: RequestLog, tmp_path: Path) -> None:
    log.adopt(tmp_path / "log")
    log.add(a_record(1, ("\U0001f600" * 128,) * 4))
    log.add(a_record(2))
    wait_until(lambda: len(lines(tmp_path / "log")) == 2)
    assert [(line["id"], line["trace_ids"]) for line in lines(tmp_path / "log")] == [("1-1", []), ("1-2", ["req_1"])]


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.usage.request_log_writer.MAX_BYTES", 1000)
    file = RequestLogFile(tmp_path / "log")
    for number in range(100):
        file.emit(logging.makeLogRecord({"msg": f'{{"id": "1-{number}", "percent": "%s"}}'}))
    file.close()
    assert {path.name for path in tmp_path.iterdir()} == {"log", "log.1"}
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert lines(tmp_path / "log")[-1] == {"id": "1-99", "percent": "%s"}
