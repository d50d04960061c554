"""Requests of one key through several connections have one turn in the queue, one share and one end."""

import pytest

from protocol.codec import decode, split_events, unpack_event
from protocol.errors import ErrorCode, WireError
from protocol.messages import SUPERVISOR_TO_CLIENT, Events, Generate
from supervisor.requests.credit import SendBufferLimits
from supervisor.requests.queue import QueueLimits
from supervisor.requests.request import MOST, MOST_OF_PARTY, Asker, Effect, PendingQueries, ToClient, ToWorker
from supervisor.requests.scheduler import Scheduler
from tests.supervisor.test_scheduler import FINISHED, NOW, deliver, frame, messages, sent_to

KEY, OTHER_KEY = 1001, 1002
DOWN = WireError(ErrorCode.MODEL_NOT_RUNNING, "down")
REVOKED = WireError(ErrorCode.UNAUTHORIZED, "revoked")


@pytest.fixture
def scheduler() -> Scheduler:
    """Return a scheduler with one model, whose worker takes one request at a time."""
    made = Scheduler()
    made.add_model("m", QueueLimits(1000, 1_000_000))
    made.add_worker("m", "m", DOWN)
    made.accept_new("m")
    made.open("m", 1, 1, NOW)
    return made


def ask(scheduler: Scheduler, channel: int, request: int, party: int | None = None) -> list[Effect]:
    return scheduler.submit(channel, Generate(request, "m", {}, b"body"), NOW, party)


def ends(effects: list[Effect]) -> list[tuple[int, int, str]]:
    """Return (channel, request, name of the error) of every error event."""
    found = []
    for effect in effects:
        if isinstance(effect, ToClient) and isinstance(message := decode(effect.frame, SUPERVISOR_TO_CLIENT), Events):
            for entry, event in split_events(message):
                found.append((effect.channel, entry.request, unpack_event(entry, event)[1]["error"]["name"]))
    return found


def served(scheduler: Scheduler, running: tuple[int, int], tokens: int = 50) -> tuple[int, int] | None:
    """End a running request after ``tokens`` tokens. Return the request that the worker is given next."""
    channel, request = running
    for seq in range(tokens - 1):
        deliver(scheduler, frame(channel, (request, seq, 0)))
    effects = deliver(scheduler, frame(channel, (request, tokens - 1, FINISHED)))
    jobs = [message for target, message in messages([e for e in effects if isinstance(e, ToWorker)]) if target == "m"]
    return (jobs[0].channel, jobs[0].request) if jobs else None  # type: ignore[union-attr]


def test_a_key_with_many_connections_has_one_share(scheduler: Scheduler) -> None:
    """Regression: each connection had a share, so four connections of one key got four fifths."""
    ask(scheduler, 1, 1, KEY)
    for number in range(2, 12):
        for channel in (1, 2, 3, 4):
            ask(scheduler, channel, number, KEY)
        ask(scheduler, 5, number, OTHER_KEY)
    running: tuple[int, int] | None = (1, 1)
    order = []
    for _ in range(20):
        assert running is not None
        running = served(scheduler, running)
        assert running is not None
        order.append(running[0])
    assert 9 <= order.count(5) <= 10


def test_a_key_keeps_its_place_when_one_of_its_connections_ends(scheduler: Scheduler) -> None:
    ask(scheduler, 1, 1, KEY)
    ask(scheduler, 2, 2, KEY)
    ask(scheduler, 5, 1, OTHER_KEY)
    scheduler.gone(1, NOW)
    assert scheduler.counts("m") == (1, 2), "the worker has yet to let go; the other connection's request still waits"
    assert scheduler.unfinished.count_by_party() == {KEY: 1, OTHER_KEY: 1}


def test_all_requests_of_a_key_end_wherever_they_are(scheduler: Scheduler) -> None:
    ask(scheduler, 1, 1, KEY)  # runs
    ask(scheduler, 1, 2, OTHER_KEY)
    ask(scheduler, 2, 1, KEY)
    ask(scheduler, 3, 7)  # this request has no key
    assert sorted(ends(scheduler.reject_party(KEY, REVOKED, NOW))) == [(1, 1, "unauthorized"), (2, 1, "unauthorized")]
    assert scheduler.unfinished.count_by_party() == {OTHER_KEY: 1, 3: 1}
    assert ends(scheduler.reject_party(KEY, REVOKED, NOW)) == [], "one end each"
    queue = scheduler._table.queues["m"].fair_queue
    assert [party for band in queue._bands.values() for party in band.accounts] == [OTHER_KEY, 3]


def test_a_compiled_constraint_is_charged_to_the_key(scheduler: Scheduler) -> None:
    ask(scheduler, 1, 1, KEY)
    ask(scheduler, 2, 1, KEY)
    ask(scheduler, 5, 1, OTHER_KEY)
    scheduler.parked("m", (1, 1), NOW)
    scheduler.gone(1, NOW)
    scheduler.compiled("m", (1, 1), KEY, 5000, NOW)
    account = scheduler._table.queues["m"].fair_queue.account(KEY, "normal")
    assert account.served >= 5000, "also if the connection that asked has ended"


def test_tokens_of_a_request_are_counted_before_and_after_its_account_has_paid(scheduler: Scheduler) -> None:
    ask(scheduler, 1, 1, KEY)
    request = scheduler.find(1, 1)
    assert request is not None
    for seq in range(6):
        deliver(scheduler, frame(1, (1, seq, 0)))
        if seq == 2:
            request.settle()
        assert request.tokens == seq + 1
    deliver(scheduler, frame(1, (1, 6, FINISHED)))
    assert request.tokens == 7
    assert scheduler.find(1, 1) is None


def test_questions_of_one_key_leave_room_for_those_of_another_on_the_same_connection() -> None:
    queries = PendingQueries()
    for call in range(MOST_OF_PARTY):
        queries.begin("m", Asker(1 + call % 2, call, KEY))
    for channel in (1, 2, 3):
        with pytest.raises(WireError, match="32 of this client"):
            queries.begin("m", Asker(channel, 99, KEY))
    for call in range(MOST - MOST_OF_PARTY):
        queries.begin("m", Asker(1, 100 + call, 2000 + call))
    with pytest.raises(WireError, match="at most 256"):
        queries.begin("m", Asker(9, 1, 9))


def test_held_events_of_one_key_cost_no_stream_of_another_key() -> None:
    """Streams of many keys share a gateway's connection. Regression: its limit ended any stream with a held event."""
    window = 4
    scheduler = Scheduler(window=window, holds=SendBufferLimits(of_stream=300, of_party=1000, of_all=2000))
    scheduler.add_model("m", QueueLimits(1000, 1_000_000))
    scheduler.add_worker("m", "m", DOWN)
    scheduler.accept_new("m")
    scheduler.open("m", 1, 200, NOW)
    stalled, good = dict.fromkeys(range(1, 101), 0), 200
    for request in stalled:
        ask(scheduler, 7, request, KEY)
    ask(scheduler, 7, good, OTHER_KEY)
    cut: list[tuple[int, str]] = []

    def deliver_next(request: int, seq: int) -> None:
        effects = deliver(scheduler, frame(7, (request, seq, 0)))
        cut.extend((event[0], event[3]["error"]["name"]) for event in sent_to(effects, 7) if "error" in event[3])

    for turn in range(50):
        for request, seq in stalled.items():
            if request not in dict(cut):
                deliver_next(request, seq)
                stalled[request] += 1
        for event in range(window + 1):  # one event more than the credit, so one is held for a moment
            deliver_next(good, turn * (window + 1) + event)
        for events in (window, 1):
            scheduler.credit(7, good, events, NOW)
    assert good not in dict(cut)
    assert len(cut) > 50, "the limit was reached again and again"
    assert {name for _, name in cut} == {"slow_consumer"}
