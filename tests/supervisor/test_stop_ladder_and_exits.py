"""The plan of a stop, and what an exit meant."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_worker.exit_codes import EXIT_ASKED, EXIT_CONFIG, EXIT_ENGINE_FAULT, LOAD_ERROR_PREFIX
from supervisor.exits import classify, not_spawned
from supervisor.stop_ladder import IMPATIENT, PATIENT, LadderTimes, Rung, plan
from supervisor.timers import Timers


def test_the_rungs_in_order() -> None:
    assert plan(100.0, LadderTimes(shutdown_s=5, sigterm_s=2), reads_messages=True) == [
        (100.0, Rung.SHUTDOWN),
        (105.0, Rung.SIGTERM),
        (107.0, Rung.SIGKILL),
    ]


def test_a_loading_worker_reads_nothing() -> None:
    assert plan(100.0, LadderTimes(shutdown_s=5, sigterm_s=2), reads_messages=False) == [
        (100.0, Rung.SIGTERM),
        (102.0, Rung.SIGKILL),
    ]


@given(st.floats(0, 1e6), st.floats(0, 100), st.floats(0, 100), st.booleans())
def test_it_begins_at_once_and_ends_with_what_is_certain(now: float, a: float, b: float, reads: bool) -> None:
    rungs = plan(now, LadderTimes(a, b), reads_messages=reads)
    assert rungs[0][0] == now
    assert rungs[-1][1] is Rung.SIGKILL
    assert [at for at, _ in rungs] == sorted(at for at, _ in rungs)
    assert rungs[-1][0] <= now + a + b + 1e-6


def test_impatience_is_about_a_second() -> None:
    assert IMPATIENT.shutdown_s + IMPATIENT.sigterm_s <= 1.0 < PATIENT.shutdown_s


@pytest.mark.parametrize(
    ("code", "reason", "retry", "says"),
    [
        (EXIT_CONFIG, "config", False, "cannot load"),
        (EXIT_ENGINE_FAULT, "engine fault", True, "ValueError: the engine broke"),
        (-signal.SIGKILL, "killed", True, "out of memory?"),
        (-signal.SIGSEGV, "signal", True, "SIGSEGV"),
        (-signal.SIGTERM, "signal", True, "SIGTERM"),
        (EXIT_ASKED, "exit", True, "without being asked"),
        (1, "exit", True, "exit code 1: ValueError: the engine broke"),
    ],
)
def test_unasked_exits(code: int, reason: str, retry: bool, says: str) -> None:
    report = classify(code, asked=False, log_tail=["Traceback", "ValueError: the engine broke", "", "  "])
    assert (report.code, report.reason, report.retry) == (code, reason, retry)
    assert says in report.message
    assert "\n" not in report.message


@pytest.mark.parametrize("code", [0, 70, 78, -9, -15, 1])
def test_an_exit_asked_for_is_no_failure(code: int) -> None:
    assert classify(code, asked=True, log_tail=["anything"]).reason == "asked"


def test_the_load_error_is_quoted_not_what_was_printed_after_it() -> None:
    tail = [LOAD_ERROR_PREFIX + "an older one", LOAD_ERROR_PREFIX + "no config.json", "a library says goodbye"]
    assert classify(EXIT_CONFIG, asked=False, log_tail=tail).message == LOAD_ERROR_PREFIX + "no config.json"


def test_an_unknown_signal_number_is_reported_too() -> None:
    """Real-time signals have no name in the signal module."""
    assert "42" in classify(-42, asked=False, log_tail=[]).message


def test_an_empty_log_is_no_obstacle() -> None:
    assert classify(EXIT_ENGINE_FAULT, asked=False, log_tail=[]).message
    assert classify(3, asked=False, log_tail=[]).message == "exit code 3"
    assert not_spawned(OSError(11, "Resource temporarily unavailable")).retry


def test_timers_run_in_order_and_once() -> None:
    timers, ran = Timers(), []
    for name, at in (("late", 3.0), ("first", 1.0), ("same", 1.0), ("middle", 2.0)):
        timers.at(at, lambda name=name: ran.append(name))  # type: ignore[misc]
    assert timers.wait_s(0.5) == 0.5
    assert timers.due(0.9) == []
    for timer in timers.due(2.0):
        timer.callback()
    assert ran == ["first", "same", "middle"]
    assert timers.wait_s(2.0) == 1.0
    assert timers.wait_s(7.0) == 0.0
    assert len(timers.due(7.0)) == 1
    assert timers.wait_s(7.0) is None


def test_cancelled_timers_are_not_waited_for() -> None:
    timers = Timers()
    early, late = timers.at(1.0, lambda: None), timers.at(5.0, lambda: None)
    early.cancel()
    early.cancel()
    assert timers.wait_s(0.0) == 5.0
    due = timers.due(9.0)
    late.cancel()  # between becoming due and being run
    assert [timer.cancelled for timer in due] == [True]


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=50), st.floats(0, 100))
def test_due_takes_out_exactly_what_is_due(entries: list[tuple[float, bool]], now: float) -> None:
    timers = Timers()
    made = [timers.at(at, lambda: None) for at, _ in entries]
    for timer, (_, cancelled) in zip(made, entries, strict=True):
        if cancelled:
            timer.cancel()
    wanted = {id(t) for t in made if t.at <= now and not t.cancelled}
    assert {id(t) for t in timers.due(now) if not t.cancelled} == wanted
    assert {id(t) for t in timers.due(now)} == set()
