"""The supervisor asks its NVML process at the right times, checks its answers, and replaces it if needed."""

import json
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from supervisor.placement import gpus as circuit_breaker
from supervisor.placement.gpu_reader import GpuReader
from supervisor.placement.gpus import (
    MAX_ANSWER,
    BadAnswer,
    BreakerState,
    CircuitBreaker,
    FixedFacts,
    Gpu,
    GpusAbsent,
    GpusLate,
    GpusUnknown,
    Sensors,
    encode_question,
    read_answer,
    read_greeting,
)
from supervisor.ports.sockets import Restarts
from tests.nvml_box import GIB, Box
from tests.serving import ROOT, is_alive, is_helper, wait_until

# --- times of questions ----------------------------------------------------------------------------------------------


def test_nobody_waits_a_second_time_until_the_driver_is_quick_again() -> None:
    asked = CircuitBreaker(0.5)
    assert asked.next(0.0) is BreakerState.CLOSED
    asked.asked(BreakerState.CLOSED)
    asked.gave_up()
    assert {asked.next(at) for at in (0.5, 1.0, 1000.0)} == {BreakerState.OPEN}, "it has not answered yet"
    asked.answered(1000.0, 1000.0)
    assert asked.next(1001.9) is BreakerState.OPEN
    assert asked.next(1002.0) is BreakerState.HALF_OPEN
    asked.asked(BreakerState.HALF_OPEN)
    assert asked.next(1002.0) is BreakerState.OPEN
    asked.answered(0.3, 1002.5)  # only just within the time
    assert [asked.next(at) for at in (1004.4, 1004.5)] == [BreakerState.OPEN, BreakerState.HALF_OPEN]
    asked.asked(BreakerState.HALF_OPEN)
    asked.answered(0.02, 1005.0)
    assert asked.next(1005.0) is BreakerState.CLOSED


def test_an_answer_in_time_changes_nothing_however_long_it_took() -> None:
    asked = CircuitBreaker(0.5)
    asked.asked(BreakerState.CLOSED)
    assert asked.is_out
    asked.answered(0.49, 0.49)
    assert (asked.is_out, asked.next(0.5)) == (False, BreakerState.CLOSED)


def test_a_question_dies_with_its_process() -> None:
    asked = CircuitBreaker(0.5)
    asked.asked(BreakerState.CLOSED)
    asked.gave_up()
    asked.forget()
    assert (asked.is_out, asked.next(1.0)) == (False, BreakerState.CLOSED)


def test_a_process_is_started_again_at_once_and_then_not_too_often() -> None:
    restarts = Restarts()
    tried = 7.0, 7.1, 11.9, 12.0, 21.9, 22.0, 41.9, 42.0
    assert [at for at in tried if restarts.next(at)] == [7.0, 12.0, 22.0, 42.0], "5, 10 and 20 s apart"
    assert [at for at in range(43, 3000) if restarts.next(at)] == [82, 162, 322, *range(622, 3000, 300)]
    assert [at for at in (5000, 5004, 5005) if restarts.next(at)] == [5000, 5005]


# --- checks of answers -----------------------------------------------------------------------------------------------

FIXED = (FixedFacts("GPU-0", frozenset({0, 64}), frozenset()), FixedFacts("GPU-1", frozenset(), frozenset()))


def reading(**other: Any) -> dict[str, Any]:
    return {"index": 1, "total": 80, "used": 30, "free": 50, "processes": [[7, 30], [8, None]], "mig": False} | other


def answer(*gpus: Any, **other: Any) -> bytes:
    return json.dumps({"number": 3, "took_s": 0.01, "gpus": list(gpus)} | other).encode()


def test_an_answer_becomes_gpus() -> None:
    reported = read_answer(answer(reading()), 3, [1, 9], FIXED)
    assert (reported.took_s, reported.error) == (0.01, None)
    assert reported.gpus == [Gpu(1, "GPU-1", 80, 30, 50, {7: 30, 8: None})]
    warm = reading(utilization=87, temperature=71, power=412_250, power_limit=None)
    assert read_answer(answer(warm), 3, [1], FIXED).gpus[0].sensors == Sensors(87, 71, 412.25, None)
    broken = reading(utilization=101, temperature=201, power=(1 << 32) - 1, power_limit=700_000)
    assert read_answer(answer(broken), 3, [1], FIXED).gpus[0].sensors == Sensors(None, None, None, 700.0)
    failed = json.dumps({"number": 3, "took_s": 0.0, "error": "GPU\nis \x1b[1mlost" + "!" * 999}).encode()
    error = read_answer(failed, 3, None, FIXED).error
    assert error is not None
    assert (error[:17], len(error)) == ("GPU is  [1mlost!!", 200)
    assert json.loads(encode_question(3, {1, 0})) == {"number": 3, "only": [0, 1]}


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff\x00",
        b"[" * 100_000,
        b"9" * 10_000,
        b"[]",
        b'{"number": 3}',
        b" " * MAX_ANSWER + b"{}",
        answer(reading(), number=2),
        answer(reading(), number=True),
        answer(reading(), took_s=-1.0),
        answer(reading(), took_s=float("nan")),
        answer(reading(), took_s="1"),
        answer(reading(), error=5),
        answer(),
        answer(reading(index=0)),
        answer(reading(), reading()),
        answer(reading(index=2)),
        answer(reading(index=-1)),
        answer(7),
        answer(reading(free=81)),
        answer(reading(used=81)),
        answer(reading(total=1 << 64)),
        answer(reading(total=80.0)),
        answer(reading(free=None)),
        answer(reading(mig=0)),
        answer(reading(power="412")),
        answer(reading(temperature=-1)),
        answer(reading(processes=None)),
        answer(reading(processes=[[7]])),
        answer(reading(processes=[[7, -1]])),
        answer(reading(processes=[["7", 1]])),
        answer(reading(processes=[[1 << 32, 1]])),
    ],
)
def test_what_cannot_be_is_refused(frame: bytes) -> None:
    with pytest.raises(BadAnswer):
        read_answer(frame, 3, [1], FIXED)


@pytest.mark.parametrize(
    "gpus",
    [
        None,
        [1],
        [{"uuid": "", "cpus": [], "numa_nodes": []}],
        [{"uuid": "GPU-é", "cpus": [], "numa_nodes": []}],
        [{"uuid": "GPU-0", "cpus": [-1], "numa_nodes": []}],
        [{"uuid": "GPU-0", "cpus": [1] * 65, "numa_nodes": []}],
        [{"uuid": "GPU-0", "cpus": []}],
        [{"uuid": "GPU-0", "cpus": [], "numa_nodes": []}] * 257,
    ],
)
def test_a_greeting_that_cannot_be_is_refused(gpus: object) -> None:
    with pytest.raises(BadAnswer):
        read_greeting(json.dumps({"gpus": gpus}).encode())


# --- the process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    path = tmp_path / "box.json"
    monkeypatch.setenv("MODELCTL_TEST_BOX", str(path))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "stand_in_nvml"))
    return Box(path, [80, 48])


@pytest.fixture
def reader(box: Box) -> Iterator[GpuReader]:
    """Make a reader that waits for an answer as long as a busy machine may take."""
    reader = GpuReader(logging.getLogger("reader"), timeout_s=60.0, start_s=60.0)
    yield reader
    reader.close()
    assert not processes()


def processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if is_helper(p, "NVML reader", "nvml_child")]


def comes(reader: GpuReader) -> list[Gpu]:
    """Wait for a reading and return it."""

    def now() -> list[Gpu] | None:
        try:
            return reader.read()
        except GpusLate:
            return None

    return wait_until(now, what="a reading")


def test_it_reads_what_is_asked_for(reader: GpuReader, box: Box) -> None:
    box.becomes(
        [80, 48], mig=[False, True], cpus=[[0, 1, 65], None], nodes=[[0], None],
        utilization=[87, None], temperature=[71, 0], power=[412_250, None], power_limit=[700_000, None],
    )  # fmt: skip
    box.holds(1, 7, 3 * GIB)
    box.holds(1, 8, None)
    first, second = reader.read()
    assert (first.uuid, first.total, first.free) == ("GPU-0a2b3c4d-0000", 80 * GIB, 80 * GIB)
    assert (first.cpus, first.numa_nodes, first.mig) == ({0, 1, 65}, {0}, False)
    assert (second.free, second.processes, second.mig, second.cpus) == (45 * GIB, {7: 3 * GIB, 8: None}, True, set())
    assert (first.sensors, second.sensors) == (Sensors(87, 71, 412.25, 700.0), Sensors(temperature=0))
    assert [(gpu.index, gpu.sensors) for gpu in reader.read([1, 5])] == [(1, Sensors())]
    box.fails("GPU is lost")
    with pytest.raises(GpusUnknown, match="GPU is lost"):
        reader.read()
    box.fails(None)
    assert len(reader.read()) == 2
    (process,) = processes()
    assert os.getsid(process.pid) == process.pid, "no signal of our terminal's"
    assert process.num_fds() == 3, "its link, and twice nothing"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    assert len(reader.read()) == 2


def ahead(reader: GpuReader) -> list[Gpu]:
    """Wait for the reading that was asked for ahead, and return it."""
    begun = time.monotonic()
    asked, gpus = wait_until(reader.read_ahead, what="an answer")
    assert asked < time.monotonic()
    assert asked > begun - 60
    return gpus


def test_a_question_ahead_waits_for_nothing(reader: GpuReader, box: Box) -> None:
    reader.read()
    assert reader.read_ahead() is None, "it has only been asked"
    assert len(ahead(reader)) == 2
    box.driver(hangs=True)
    begun = time.monotonic()
    for _ in range(1000):
        assert reader.read_ahead() is None
    assert time.monotonic() - begun < 30, "each would have waited for 60 s"
    box.driver(hangs=None)
    assert len(ahead(reader)) == 2


def test_a_reading_is_newer_than_a_question_ahead_of_it(reader: GpuReader, box: Box) -> None:
    reader.read()
    for number in range(20):
        assert reader.read_ahead() is None
        box.holds(0, number, GIB)
        assert reader.read()[0].processes.keys() == {*range(number + 1)}
    assert reader.read_ahead() is None
    assert [gpu.index for gpu in reader.read([1])] == [1]
    box.fails("GPU is lost")
    assert reader.read_ahead() is None
    with pytest.raises(GpusUnknown, match="GPU is lost"):
        wait_until(reader.read_ahead, what="an answer")


def test_a_reading_behind_a_question_ahead_waits_once_for_a_driver_that_hangs(box: Box) -> None:
    reader = GpuReader(logging.getLogger("reader"), start_s=60.0)
    comes(reader)
    box.driver(hangs=True)
    assert reader.read_ahead() is None
    begun = time.monotonic()
    for _ in range(200):
        with pytest.raises(GpusLate, match=r"has not answered within 0\.5 s"):
            reader.read()
    assert time.monotonic() - begun < 20 * circuit_breaker.TIMEOUT_S, "of 200 that would each have taken so long"
    box.driver(hangs=None)
    assert len(comes(reader)) == 2
    reader.close()
    wait_until(lambda: not processes(), what="its end")


def test_a_driver_that_hangs_is_waited_for_once(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "QUIET_S", 0.2)
    reader = GpuReader(logging.getLogger("reader"), start_s=60.0)
    comes(reader)
    box.driver(hangs=True)
    begun = time.monotonic()
    with pytest.raises(GpusLate, match=r"has not answered within 0\.5 s"):
        reader.read()
    assert time.monotonic() - begun >= circuit_breaker.TIMEOUT_S
    begun = time.monotonic()
    for _ in range(200):
        with pytest.raises(GpusLate):
            reader.read()
    assert time.monotonic() - begun < 20 * circuit_breaker.TIMEOUT_S, "of 200 that would each have taken so long"
    # the late answer is outdated when it comes, so it is not used
    box.driver(hangs=None)
    child = reader._child
    assert child is not None
    wait_until(lambda: select.select([child.descriptor], [], [], 0)[0], what="the answer to the first question")
    box.holds(0, 7, GIB)
    assert comes(reader)[0].processes == {7: GIB}
    (process,) = processes()
    box.driver(hangs=True)
    with pytest.raises(GpusLate):
        reader.read()
    begun = time.monotonic()
    reader.close()
    assert time.monotonic() - begun < 30
    assert not is_alive(process), "it is not waited for until the driver lets it go"


def test_another_process_takes_the_place_of_one_that_ended(
    reader: GpuReader, box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    reader.read()
    (process,) = processes()
    process.kill()
    with pytest.raises(GpusLate):
        reader.read()
    assert [record.getMessage() for record in caplog.records] == [
        "the process that asks NVML ended (signal 9): it is started again"
    ]
    assert len(comes(reader)) == 2
    assert processes() != [process]


@pytest.mark.parametrize(
    ("misbehave", "said"),
    [
        (lambda box: box.driver(says="nonsense"), "said what cannot be (it is no JSON): killed"),
        (lambda box: box.driver(says="{" * (MAX_ANSWER + 1)), f"(it is longer than {MAX_ANSWER} bytes): killed"),
        (lambda box: box.becomes([80, 48], free=[81 * GIB, GIB]), "(free is no whole number from 0 to"),
        (lambda box: box.driver(ends=3), "ended (exit code 3): it is started again"),
    ],
    ids=["garbage", "too much", "more free than there is", "ends"],
)
def test_nothing_is_read_of_a_process_that_misbehaves(
    misbehave: Callable[[Box], None], said: str, reader: GpuReader, box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    reader.read()
    misbehave(box)
    for _ in range(3):
        with pytest.raises(GpusLate):
            reader.read()
    assert said in caplog.records[0].getMessage()
    assert len(caplog.records) <= 2, "it is not started again and again"


def test_without_a_driver_there_are_no_gpus_and_no_process(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.fails("Driver Not Loaded", at_init=True)
    reader = GpuReader(logging.getLogger("reader"), start_s=60.0)
    with pytest.raises(GpusAbsent, match="Driver Not Loaded"):
        reader.read()
    assert not processes()
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(GpusAbsent, match="nvidia-ml-py is not installed"):
        GpuReader(logging.getLogger("reader")).read()


@pytest.mark.long
def test_a_driver_that_is_loaded_anew_is_tried_again(reader: GpuReader, box: Box) -> None:
    reader.read()
    box.fails("Driver/library version mismatch", at_init=True)
    processes()[0].kill()

    def why() -> str:
        try:
            return str(reader.read())
        except GpusUnknown as e:
            return str(e)

    wait_until(lambda: why() == "Driver/library version mismatch")
    box.fails(None, at_init=True)

    def again() -> bool:
        reported = why()
        assert reported == "Driver/library version mismatch" or reported.startswith("[Gpu"), reported
        return reported.startswith("[Gpu")

    wait_until(again)
