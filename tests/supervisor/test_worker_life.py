"""The desired state decides whether a worker is started again and whether requests wait."""

import itertools

import pytest

from supervisor.workers.exits import ExitReport, not_spawned
from supervisor.workers.life import Desired, Event, LifecycleAction, RestartPolicy, Transition, WorkerLife, WorkerState

ASKED = ExitReport(0, "asked", "stopped", retry=False)
CRASH = ExitReport(-11, "signal", "ended by SIGSEGV", retry=True)
AWAY = ExitReport(74, "away", "cannot load: model_dir /mnt/m is no directory", retry=True)
FINAL = ExitReport(-1, "config", "no such directory", retry=False)


def life(*, ready: bool = False) -> WorkerLife:
    worker = WorkerLife("m", 100.0, RestartPolicy())
    if ready:
        worker.start(101.0, "start ordered")
        worker.apply(Event.HELLO, 102.0)
        worker.apply(Event.LOADED, 103.0)
    return worker


def ended(worker: WorkerLife, report: ExitReport, *, blames_request: bool = False) -> str:
    return worker.ended(report, 110.0, blames_request=blames_request, chance=0.0).what_next


def test_a_worker_that_was_never_started_is_stopped_since_it_was_made() -> None:
    """With a start time of 0, the worker would count as stopped since the machine was switched on."""
    assert (life().since, life().state, life().desired) == (100.0, WorkerState.STOPPED, Desired.DOWN)


def order(worker: WorkerLife, name: str) -> Transition | None:
    return {
        "start": lambda: worker.start(105.0, "x"),
        "restart": lambda: worker.restart(105.0, "x"),
        "stop": lambda: worker.stop(105.0, "x"),
        "stop now": lambda: worker.stop(105.0, "x", at_once=True),
    }[name]()


@pytest.mark.parametrize(
    "orders", list(itertools.product(("start", "restart", "stop", "stop now"), repeat=3)), ids=" ".join
)
def test_the_last_order_decides_what_follows_when_the_process_has_ended(orders: tuple[str, ...]) -> None:
    worker = life(ready=True)
    worker.stop(104.0, "x")
    for name in orders:
        order(worker, name)
    up = orders[-1] in ("start", "restart")
    assert worker.desired is (Desired.UP if up else Desired.DOWN)
    ended(worker, ASKED)
    assert worker.state is WorkerState.STOPPED
    transition = worker.settle(111.0)
    assert (transition is not None, worker.state is WorkerState.STARTING) == (up, up)


def test_requests_wait_for_a_worker_that_is_restarted_and_not_for_one_that_is_stopped() -> None:
    for restart, expected in (True, LifecycleAction.HOLD_NEW), (False, LifecycleAction.REFUSE_NEW):
        worker = life(ready=True)
        transition = order(worker, "restart" if restart else "stop")
        assert transition is not None
        assert transition.actions[0] is expected
        assert worker.comes_again is restart


def test_an_unloaded_worker_keeps_the_cause_until_the_next_order() -> None:
    worker = life(ready=True)
    worker.unload(104.0, "idle for 5 s")
    ended(worker, ASKED)
    transition = worker.settle(111.0)
    assert transition is not None
    assert (transition.after, transition.cause) == (WorkerState.UNLOADED, "idle for 5 s")
    assert (worker.desired, worker.unload_cause) == (Desired.ON_DEMAND, "idle for 5 s")
    worker.stop(112.0, "stop ordered")
    assert (worker.desired, worker.unload_cause, worker.state) == (Desired.DOWN, None, WorkerState.STOPPED)
    worker.rest(113.0, "lazy")
    assert (worker.desired, worker.unload_cause, worker.state) == (Desired.ON_DEMAND, None, WorkerState.UNLOADED)


def test_a_second_order_to_stop_at_once_does_not_begin_the_ladder_anew() -> None:
    worker = life(ready=True)
    assert order(worker, "stop") is not None
    hurried = order(worker, "stop now")
    assert hurried is not None
    assert LifecycleAction.CLIMB in hurried.actions
    assert order(worker, "stop now") is None
    order(worker, "start")
    assert order(worker, "stop now") is None
    assert worker.desired is Desired.DOWN


def test_an_end_that_nobody_asked_for_is_tried_again_unless_another_try_cannot_help() -> None:
    worker = life(ready=True)
    assert ended(worker, CRASH) == "next try in 0.0 s"
    assert worker.state is WorkerState.BACKOFF
    worker.apply(Event.BACKOFF_OVER, 111.0)
    assert ended(worker, not_spawned(OSError("no processes"))) == "next try in 0.5 s"
    assert worker.pause_s == 0.5
    worker.apply(Event.BACKOFF_OVER, 112.0)
    assert ended(worker, FINAL) == "not tried again"
    assert (worker.state, worker.desired, worker.comes_again) == (WorkerState.FAILED, Desired.UP, False)
    assert worker.settle(113.0) is None


def test_a_model_whose_files_are_away_never_fails_and_begins_anew_when_it_was_loaded() -> None:
    worker = life()
    for pause in (5, 10, 20, 40, 80, 160, 300, 300):
        worker.start(104.0, "start ordered") if worker.state is WorkerState.STOPPED else None
        assert ended(worker, AWAY) == f"next try in {pause}.0 s"
        assert worker.state is WorkerState.BACKOFF
        worker.apply(Event.BACKOFF_OVER, 120.0)
    worker.apply(Event.HELLO, 121.0)
    worker.apply(Event.LOADED, 122.0)
    assert ended(worker, AWAY) == "next try in 5.0 s"


def test_ends_that_a_request_is_to_blame_for_do_not_count() -> None:
    worker = life(ready=True)
    for _ in range(20):
        assert ended(worker, CRASH, blames_request=True) == "next try in 0.0 s, a request is to blame"
        worker.apply(Event.BACKOFF_OVER, 111.0)
    assert worker.history.recent == 0


def test_the_verdict_about_a_worker_that_crashed_while_it_was_stopped() -> None:
    worker = life(ready=True)
    worker.stop(104.0, "x")
    assert ended(worker, CRASH) == "it was being stopped"
    assert (worker.state, worker.settle(111.0)) == (WorkerState.STOPPED, None)
