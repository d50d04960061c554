"""Requests with constraints that are being compiled hold no slot, return to their place, and pay for the compiling."""

from typing import Any

import pytest

from protocol.errors import FrameError
from protocol.messages import CancelJob, Generate, JobMessage, Report
from supervisor.requests.queue import QueueLimits
from supervisor.requests.request import Effect
from supervisor.requests.scheduler import Scheduler
from supervisor.requests.worker_events import LONGEST_MS, TOKENS_PER_MS
from tests.supervisor.test_scheduler import DOWN, FINISHED, GONE, NOW, deliver, frame, messages, sent_to


@pytest.fixture
def scheduler() -> Scheduler:
    """Return a scheduler with one model ``m``, and a worker of generation 1 that takes two jobs."""
    made = Scheduler(window=4)
    made.add_model("m", QueueLimits(20, 10_000))
    made.add_worker("m", "m", DOWN)
    made.accept_new("m")
    made.open("m", 1, 2, NOW)
    return made


def ask(scheduler: Scheduler, channel: int, request: int, **route: Any) -> list[Effect]:
    return scheduler.submit(channel, Generate(request, "m", route, b"body"), NOW)


def jobs(effects: list[Effect]) -> list[tuple[int, int]]:
    """Return the jobs that workers are given."""
    return [(m.channel, m.request) for _, m in messages(effects) if isinstance(m, JobMessage)]


def cancels(effects: list[Effect]) -> list[tuple[int | str, int]]:
    return [(worker, m.request) for worker, m in messages(effects) if isinstance(m, CancelJob)]


def test_a_parked_request_holds_no_slot(scheduler: Scheduler) -> None:
    for request in range(1, 9):
        ask(scheduler, 5, request)
    given = [(5, 1), (5, 2)]
    for key in given:  # the worker parks each job at once, and the next one is given out
        given += jobs(scheduler.parked("m", key, NOW))
    assert given == [(5, request) for request in range(1, 9)]
    assert scheduler.counts("m") == (0, 8)
    assert jobs(ask(scheduler, 6, 1)) == [(6, 1)]
    assert scheduler.counts("m") == (1, 8)


def test_a_request_comes_back_before_those_of_its_client_that_came_later(scheduler: Scheduler) -> None:
    ask(scheduler, 5, 1)
    scheduler.parked("m", (5, 1), NOW)
    for request in (2, 3, 4):
        ask(scheduler, 5, request)
    assert jobs(scheduler.compiled("m", (5, 1), 5, 3, NOW)) == [], "both slots are taken"
    assert scheduler.counts("m") == (2, 2)
    assert jobs(deliver(scheduler, frame(5, (2, 0, FINISHED)))) == [(5, 1)]
    assert jobs(deliver(scheduler, frame(5, (3, 0, FINISHED)))) == [(5, 4)]


def test_whoever_causes_a_compilation_pays_for_it(scheduler: Scheduler) -> None:
    """A client with a second of compiling is served after the other client for a thousand tokens."""
    ask(scheduler, 5, 1)
    scheduler.parked("m", (5, 1), NOW)
    for client in (6, 7):
        ask(scheduler, client, 1)  # this takes the last slot
    for request in range(2, 5):
        ask(scheduler, 5, request)
        ask(scheduler, 6, request)
    scheduler.compiled("m", (5, 1), 5, 1000 // TOKENS_PER_MS, NOW)
    order = []
    for client, request in ((6, 1), (7, 1)):
        order += jobs(deliver(scheduler, frame(client, (request, 0, FINISHED))))
    while len(order) < 7:
        client, request = order[-2]
        order += jobs(deliver(scheduler, frame(client, (request, 0, FINISHED))))
    assert order == [(6, 2), (6, 3), (6, 4), (5, 1), (5, 2), (5, 3), (5, 4)]


def test_what_a_compilation_cost_is_charged_also_for_a_request_that_is_gone(scheduler: Scheduler) -> None:
    ask(scheduler, 5, 1)
    account = scheduler._table.queues["m"].fair_queue.account(5, "normal")
    scheduler.parked("m", (5, 1), NOW)
    scheduler.cancel(5, 1, NOW)
    before = account.served
    assert scheduler.compiled("m", (5, 1), 5, 700, NOW) == []
    assert account.served - before == 700 * TOKENS_PER_MS
    scheduler.gone(5, NOW)
    assert scheduler.compiled("m", (5, 1), 5, 700, NOW) == [], "and nobody is charged whose connection has ended"


def test_a_cancelled_request_is_forgotten_by_the_worker_that_compiles_for_it(scheduler: Scheduler) -> None:
    for request in (1, 2):
        ask(scheduler, 5, request)
        scheduler.parked("m", (5, request), NOW)
    effects = scheduler.cancel(5, 1, NOW)
    assert cancels(effects) == [("m", 1)]
    assert [(event[0], event[3]["finish_reason"]) for event in sent_to(effects, 5)] == [(1, "cancelled")]
    ask(scheduler, 6, 1)
    ask(scheduler, 6, 2)
    scheduler.compiled("m", (5, 2), 5, 3, NOW)
    assert cancels(scheduler.gone(5, NOW)) == [("m", 2)], "also one that waits for a slot"
    assert scheduler.counts("m") == (2, 0)


def test_a_cancel_that_crosses_the_job_on_its_way_back_ends_the_request(scheduler: Scheduler) -> None:
    ask(scheduler, 5, 1)
    assert cancels(scheduler.cancel(5, 1, NOW)) == [("m", 1)]
    effects = scheduler.parked("m", (5, 1), NOW)
    assert [event[3]["finish_reason"] for event in sent_to(effects, 5)] == ["cancelled"]
    assert scheduler.counts("m") == (0, 0)


def test_a_deadline_ends_a_parked_request(scheduler: Scheduler) -> None:
    ask(scheduler, 5, 1, queue_ms=500)
    assert scheduler.expire(NOW + 0.6) == [], "a worker has it"
    scheduler.parked("m", (5, 1), NOW + 0.7)
    effects = scheduler.expire(NOW + 0.7)
    assert [event[3]["error"]["name"] for event in sent_to(effects, 5)] == ["queue_timeout"]
    assert cancels(effects) == [("m", 1)]
    assert scheduler.counts("m") == (0, 0)


def test_a_death_of_the_worker_puts_parked_requests_back(scheduler: Scheduler) -> None:
    ask(scheduler, 5, 1)
    scheduler.parked("m", (5, 1), NOW)
    scheduler.worker_gone("m", GONE, NOW)
    assert scheduler.compiled("m", (5, 1), 5, 3, NOW) == [], "last words"
    effects = scheduler.open("m", 2, 2, NOW)
    assert jobs(effects) == [(5, 1)]
    assert scheduler.totals("m")["resumed"] == 0, "it was not being computed"
    assert cancels(scheduler.parked("m", (5, 1), NOW)) == []
    assert jobs(scheduler.compiled("m", (5, 1), 5, 3, NOW)) == [(5, 1)]


def test_a_request_goes_back_to_the_worker_that_has_compiled_for_it() -> None:
    made = Scheduler(window=4)
    made.add_model("m", QueueLimits(20, 10_000))
    for worker in ("m:1", "m:2"):
        made.add_worker("m", worker, DOWN)
        made.accept_new(worker)
        made.open(worker, 1, 2, NOW)
    ((first, _),) = [(w, m) for w, m in messages(ask(made, 5, 1)) if isinstance(m, JobMessage)]
    assert isinstance(first, str)
    made.parked(first, (5, 1), NOW)
    ((again, job),) = messages(made.compiled(first, (5, 1), 5, 3, NOW))
    assert (again, isinstance(job, JobMessage)) == (first, True)
    # if that worker is full, the other worker compiles the constraint again and then keeps the job
    made.parked(first, (5, 1), NOW)
    busy = 0
    while len(made._table.queues["m"].worker_slots[first].running) < 2:
        busy += 1
        ask(made, 6, busy)
    effects = messages(made.compiled(first, (5, 1), 5, 3, NOW))
    other = "m:2" if first == "m:1" else "m:1"
    assert [(worker, type(message)) for worker, message in effects] == [(first, CancelJob), (other, JobMessage)]
    (job,) = [message for _, message in effects if isinstance(message, JobMessage)]
    assert job.carry["stay"] is True


def test_a_client_that_asks_is_told_that_its_constraint_is_compiled(scheduler: Scheduler) -> None:
    ask(scheduler, 5, 1, progress=True)
    effects = messages(scheduler.parked("m", (5, 1), NOW))
    assert [type(message) for _, message in effects] == [Report]
    assert scheduler.report_positions() == []


def test_connections_of_a_key_are_one_party_for_the_worker(scheduler: Scheduler) -> None:
    effects = messages(scheduler.submit(5, Generate(1, "m", {}, b"body"), NOW, 77))
    (job,) = [message for _, message in effects if isinstance(message, JobMessage)]
    assert job.carry["party"] == 77


def test_what_cannot_be_is_refused(scheduler: Scheduler) -> None:
    with pytest.raises(FrameError, match="ms of processor time"):
        scheduler.compiled("m", (5, 1), 5, LONGEST_MS + 1, NOW)
    assert scheduler.parked("m", (5, 1), NOW) == [], "a job that it has not"
    assert scheduler.compiled("m", (5, 1), 5, 1, NOW) == []
