"""The scheduler follows each of its rules. test_scheduler_machine tests them all together."""

from typing import Any

import pytest

from protocol.codec import decode, encode, pack_event, split_events, unpack_body, unpack_event
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.messages import (
    ROUTE_KEYS,
    SUPERVISOR_TO_CLIENT,
    SUPERVISOR_TO_WORKER,
    Accepted,
    CancelJob,
    Error,
    EventEntry,
    EventFlag,
    Events,
    Generate,
    JobMessage,
    Message,
    Ping,
    Report,
)
from supervisor.requests.credit import MOST_UNREAD, SendBufferLimits
from supervisor.requests.queue import QueueLimits
from supervisor.requests.request import PROBATION, Effect, LoadForRequests, ToClient, ToWorker, read_route
from supervisor.requests.scheduler import Scheduler

DOWN = WireError(ErrorCode.MODEL_NOT_RUNNING, "down")
GONE = WireError(ErrorCode.WORKER_DIED, "gone")
WINDOW = 4
NOW = 1000.0
FINISHED, ERROR = EventFlag.FINISHED, EventFlag.ERROR


@pytest.fixture
def scheduler() -> Scheduler:
    """Return a scheduler with model ``m``, a queue of three, and a worker of generation 1 that takes two jobs."""
    return make(Scheduler(window=WINDOW))


def make(scheduler: Scheduler, *, tokens: int = 1000) -> Scheduler:
    scheduler.add_model("m", QueueLimits(3, tokens))
    scheduler.add_worker("m", "m", DOWN)
    scheduler.accept_new("m")
    scheduler.open("m", 1, 2, NOW)
    return scheduler


def messages(effects: list[Effect]) -> list[tuple[int | str, Message]]:
    """Return (channel or model, message) of each effect."""
    sent_to: list[tuple[int | str, Message]] = []
    for effect in effects:
        if isinstance(effect, ToClient):
            sent_to.append((effect.channel, decode(effect.frame, SUPERVISOR_TO_CLIENT)))
        else:
            sent_to.append((effect.worker, decode(effect.frame, SUPERVISOR_TO_WORKER)))
    return sent_to


def submit(scheduler: Scheduler, channel: int, *requests: int) -> None:
    for request in requests:
        scheduler.submit(channel, Generate(request, "m", {}, b"body"), NOW)


def frame(channel: int, *events: tuple[int, int, int], generation: int = 1) -> bytes:
    """Return an EVENTS frame with (request, seq, flags) of each event, and one token in each."""
    packed = [pack_event([7], {"text": "x"}) for _ in events]
    index = [EventEntry(r, seq, int(flags), 1, len(p)) for (r, seq, flags), p in zip(events, packed, strict=True)]
    return encode(Events(channel, generation, index, b"".join(packed)))


def decoded(raw: bytes) -> Events:
    message = decode(raw, frozenset({Events.kind}))
    assert isinstance(message, Events)
    return message


def deliver(scheduler: Scheduler, raw: bytes) -> list[Effect]:
    return scheduler.events("m", raw, decoded(raw), NOW)


def sent_to(effects: list[Effect], channel: int) -> list[tuple[int, int, int, dict[str, Any]]]:
    """Return (request, seq, flags, map) of every event for a client."""
    return [
        (entry.request, entry.seq, entry.flags, unpack_event(entry, event)[1])
        for target, message in messages(effects)
        if target == channel and isinstance(message, Events)
        for entry, event in split_events(message)
    ]


def test_accepted_goes_before_the_job(scheduler: Scheduler) -> None:
    effects = messages(scheduler.submit(5, Generate(1, "m", {}, b"body"), NOW))
    assert [type(message) for _, message in effects] == [Accepted, JobMessage]
    assert effects[1] == ("m", JobMessage(5, 1, {"queue_ms": 0.0}, b"body"))


def test_a_frame_is_passed_on_as_it_is_while_there_is_credit(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2)
    raw = frame(5, (1, 0, 0), (2, 0, 0))
    assert deliver(scheduler, raw) == [ToClient(5, raw)]


def test_only_the_stream_without_credit_is_held_back(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2)
    for seq in range(WINDOW):
        deliver(scheduler, frame(5, (1, seq, 0)))
    effects = deliver(scheduler, frame(5, (1, WINDOW, 0), (2, 0, 0), (1, WINDOW + 1, FINISHED)))
    assert [event[:3] for event in sent_to(effects, 5)] == [(2, 0, 0)]
    assert scheduler.counts("m") == (1, 0), "the worker has finished the held one: its place is free"
    effects = scheduler.credit(5, 1, 1, NOW)
    assert [event[:3] for event in sent_to(effects, 5)] == [(1, WINDOW, 0), (1, WINDOW + 1, FINISHED)]
    assert scheduler.totals("m")["finished"] == 1


def pings(effects: list[Effect]) -> list[int]:
    return [message.nonce for _, message in messages(effects) if isinstance(message, Ping)]


@pytest.mark.parametrize("streams", [1, 2])
def test_credit_granted_in_advance_is_used_by_a_client_that_reads(scheduler: Scheduler, streams: int) -> None:
    """The client reads as fast as the worker sends, so no event is held."""
    submit(scheduler, 5, *range(1, streams + 1))
    windows = 5 * MOST_UNREAD
    for request in range(1, streams + 1):
        for _ in range(windows):
            scheduler.credit(5, request, WINDOW, NOW)
    for seq in range(WINDOW * (windows + 1)):
        effects = deliver(scheduler, frame(5, *((request, seq, 0) for request in range(1, streams + 1))))
        assert len(sent_to(effects, 5)) == streams
        while asked := pings(effects):
            effects = scheduler.pong(5, asked[0], NOW)
            assert not sent_to(effects, 5)
    assert not scheduler.held_bytes
    assert not sent_to(deliver(scheduler, frame(5, (1, seq + 1, 0))), 5), "it has used all that was granted"


def test_credit_granted_in_advance_is_used_up_to_a_bound_by_a_client_that_does_not_read(scheduler: Scheduler) -> None:
    """Events beyond the bound would pile up in libzmq: 92,000 events for 30 streams with 12 windows of credit each."""
    submit(scheduler, 5, 1, 2)
    windows = 2 * MOST_UNREAD
    for request in (1, 2):
        for _ in range(windows):
            scheduler.credit(5, request, WINDOW, NOW)
    sent, asked = [], []
    for seq in range(WINDOW * (windows + 1)):
        effects = deliver(scheduler, frame(5, (1, seq, 0), (2, seq, 0)))
        sent += sent_to(effects, 5)
        asked += pings(effects)
    assert len(sent) == (2 + MOST_UNREAD) * WINDOW
    assert len(asked) == 1, "one PING at a time"
    # each complete answer shows that the client reads, and everything comes in order
    assert not sent_to(scheduler.pong(5, asked[0] + 1, NOW), 5), "to a PING that was not sent"
    while asked:
        effects = scheduler.pong(5, asked.pop(), NOW)
        sent += sent_to(effects, 5)
        asked += pings(effects)
    assert len(sent) == 2 * WINDOW * (windows + 1)
    for request in (1, 2):
        assert [seq for r, seq, *_ in sent if r == request] == list(range(WINDOW * (windows + 1)))
    assert not scheduler.held_bytes


def test_who_has_left_is_not_waited_for(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2)
    for _ in range(2 * MOST_UNREAD):
        scheduler.credit(5, 1, WINDOW, NOW)
    asked = []
    for seq in range(WINDOW * (2 + MOST_UNREAD)):
        asked += pings(deliver(scheduler, frame(5, (1, seq, 0))))
    assert scheduler.held_bytes
    scheduler.gone(5, NOW)
    assert not scheduler.held_bytes
    assert scheduler.pong(5, asked[0], NOW) == []


def test_a_terminal_event_needs_no_credit(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1)
    for seq in range(WINDOW):
        deliver(scheduler, frame(5, (1, seq, 0)))
    effects = deliver(scheduler, frame(5, (1, WINDOW, FINISHED)))
    assert [event[:3] for event in sent_to(effects, 5)] == [(1, WINDOW, FINISHED)]


def test_an_ended_job_makes_room_for_the_next(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2, 3)
    effects = deliver(scheduler, frame(5, (1, 0, FINISHED)))
    assert messages(effects)[-1] == ("m", JobMessage(5, 3, {"queue_ms": 0.0}, b"body"))


def test_what_a_dead_worker_held_goes_on_first_in_the_next(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2, 3)
    deliver(scheduler, frame(5, (1, 0, 0), (1, 1, 0)))
    assert scheduler.worker_gone("m", GONE, NOW, struck=False) == []
    assert scheduler.counts("m") == (0, 3)
    ids = (7).to_bytes(4, "little") * 2
    assert messages(scheduler.open("m", 2, 2, NOW)) == [
        ("m", JobMessage(5, 1, {"queue_ms": 0.0, "seq": 2, "token_ids": ids, "resumes": 1}, b"body")),
        ("m", JobMessage(5, 2, {"queue_ms": 0.0, "resumes": 1}, b"body")),
    ]
    effects = deliver(scheduler, frame(5, (1, 2, FINISHED), generation=2))
    assert [event[:3] for event in sent_to(effects, 5)] == [(1, 2, FINISHED)]


def test_without_resuming_a_dead_worker_ends_what_it_held(scheduler: Scheduler) -> None:
    for request in (1, 2, 3):
        scheduler.submit(5, Generate(request, "m", {"resume": False}, b"body"), NOW)
    deliver(scheduler, frame(5, (1, 0, 0), (1, 1, 0)))
    effects = sent_to(scheduler.worker_gone("m", GONE, NOW), 5)
    assert [event[:3] for event in effects] == [(1, 2, ERROR), (2, 0, ERROR)]
    assert [event[3]["delivered_tokens"] for event in effects] == [2, 0]
    assert effects[0][3]["error"]["name"] == "worker_died"
    assert scheduler.counts("m") == (0, 1)
    assert messages(scheduler.open("m", 2, 2, NOW)) == [("m", JobMessage(5, 3, {"queue_ms": 0.0}, b"body"))]


def test_words_of_a_former_generation_are_dropped(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1)
    scheduler.worker_gone("m", GONE, NOW, struck=False)
    scheduler.open("m", 2, 2, NOW)
    assert deliver(scheduler, frame(5, (1, 0, FINISHED), generation=1)) == []
    assert scheduler.dropped_frames == 1
    assert sent_to(deliver(scheduler, frame(5, (1, 0, FINISHED), generation=2)), 5)


def test_a_finished_answer_survives_the_death_of_its_worker(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1)
    for seq in range(WINDOW + 2):
        deliver(scheduler, frame(5, (1, seq, 0)))
    deliver(scheduler, frame(5, (1, WINDOW + 2, FINISHED)))
    assert scheduler.worker_gone("m", GONE, NOW) == []
    assert [event[1] for event in sent_to(scheduler.credit(5, 1, WINDOW, NOW), 5)] == [4, 5, 6]


def test_a_client_that_leaves_has_its_jobs_cancelled_and_hears_no_more(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2, 3)
    submit(scheduler, 6, 1)
    assert messages(scheduler.gone(5, NOW)) == [("m", CancelJob(5, 1)), ("m", CancelJob(5, 2))]
    assert scheduler.counts("m") == (2, 1), "a place is free when the worker has let go, not before"
    effects = deliver(scheduler, frame(5, (1, 0, 0), (2, 0, FINISHED)))
    assert messages(effects) == [("m", JobMessage(6, 1, {"queue_ms": 0.0}, b"body"))]
    assert scheduler.gone(5, NOW) == []


def test_cancelling_in_each_phase(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2, 3)
    ((_, _, flags, told_map),) = sent_to(scheduler.cancel(5, 3, NOW), 5)
    assert (flags, told_map["finish_reason"]) == (FINISHED, "cancelled")
    assert messages(scheduler.cancel(5, 1, NOW)) == [("m", CancelJob(5, 1))]
    assert sent_to(deliver(scheduler, frame(5, (1, 0, FINISHED))), 5)
    assert scheduler.cancel(5, 1, NOW) == scheduler.cancel(5, 3, NOW) == scheduler.cancel(9, 9, NOW) == []
    for seq in range(WINDOW + 3):
        deliver(scheduler, frame(5, (2, seq, 0)))
    held_first = messages(scheduler.cancel(5, 2, NOW))
    assert [type(message) for _, message in held_first] == [Events, CancelJob]
    assert sent_to(deliver(scheduler, frame(5, (2, WINDOW + 3, 0), (2, WINDOW + 4, FINISHED))), 5)


def test_slow_consumers_are_cut_off_by_memory_of_stream_and_of_connection() -> None:
    scheduler = make(Scheduler(window=WINDOW, holds=SendBufferLimits(of_stream=300, of_party=400)))

    def until_cut(channel: int, request: int, cut: int) -> int:
        """Deliver events of a request until request ``cut`` is ended. Return how many were delivered before."""
        for seq in range(100):
            effects = deliver(scheduler, frame(channel, (request, seq, 0)))
            if errors := [event for event in sent_to(effects, channel) if event[2] & ERROR]:
                assert [(event[0], event[3]["error"]["name"]) for event in errors] == [(cut, "slow_consumer")]
                if cut == request:
                    assert isinstance(effects[0], ToWorker), "the worker is told to let go"
                deliver(scheduler, frame(channel, (request, seq + 1, FINISHED)))
                return seq
        raise AssertionError("never cut off")

    submit(scheduler, 5, 1)
    alone = until_cut(5, 1, cut=1)
    submit(scheduler, 5, 2)
    for seq in range(alone - 1):
        deliver(scheduler, frame(5, (2, seq, 0)))
    deliver(scheduler, frame(5, (2, alone - 1, FINISHED)))  # finished, with all events held
    submit(scheduler, 5, 3)
    assert until_cut(5, 3, cut=2) < alone, "of the streams of a connection the one that holds most is ended"
    submit(scheduler, 6, 1)
    assert until_cut(6, 1, cut=1) == alone, "another connection has a bound of its own"
    scheduler.gone(5, NOW)
    submit(scheduler, 5, 4)
    assert until_cut(5, 4, cut=4) == alone, "what a connection held is forgotten with it"


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        (Generate(1, "nosuch", {}, b""), ErrorCode.MODEL_NOT_FOUND, "model"),
        (Generate(0, "m", {}, b""), ErrorCode.INVALID_REQUEST, "request"),
        (Generate(1, "m", {"priority": "urgent"}, b""), ErrorCode.INVALID_REQUEST, "route.priority"),
        (Generate(1, "m", {"deadline_ms": 0}, b""), ErrorCode.INVALID_REQUEST, "route.deadline_ms"),
        (Generate(1, "m", {"queue_ms": 1e3}, b""), ErrorCode.INVALID_REQUEST, "route.queue_ms"),
        (Generate(1, "m", {"affinity": "a" * 257}, b""), ErrorCode.INVALID_REQUEST, "route.affinity"),
        (Generate(1, "m", {"resume": 0}, b""), ErrorCode.INVALID_REQUEST, "route.resume"),
        (Generate(1, "m", {"pin": 1}, b""), ErrorCode.INVALID_REQUEST, "route.pin"),
    ],
)
def test_refusals(scheduler: Scheduler, message: Generate, code: ErrorCode, field: str) -> None:
    ((channel, error),) = messages(scheduler.submit(5, message, NOW))
    assert isinstance(error, Error)
    body = unpack_body(error.body)
    assert (channel, error.request, body["code"], body["field"]) == (5, message.request, code, field)
    assert not scheduler.channels()


def test_every_key_of_the_route_has_a_check() -> None:
    for name in ROUTE_KEYS:
        with pytest.raises(RequestError, match="must be"):
            read_route({name: None})
    with pytest.raises(RequestError, match=f"known are {', '.join(ROUTE_KEYS)}; all else stands in the body"):
        read_route({"max_tokens": 5})
    with pytest.raises(RequestError, match="resume is 'true': must be true or false"):
        read_route({"resume": "true"})
    with pytest.raises(RequestError, match="deadline_ms is null: must be milliseconds"):
        read_route({"deadline_ms": None})


def test_a_refusal_does_not_keep_what_it_refused(scheduler: Scheduler) -> None:
    """One exception object that is raised for every request would keep the frames and bodies of all of them alive."""
    down, leaving = WireError(ErrorCode.MODEL_NOT_RUNNING, "down"), WireError(ErrorCode.DRAINING, "leaving")
    scheduler.refuse_new("m", down, NOW)
    for refused in down, leaving:
        ((_, error),) = messages(scheduler.submit(5, Generate(1, "m", {}, b"x"), NOW))
        assert isinstance(error, Error)
        assert unpack_body(error.body)["name"] == refused.code.wire_name
        assert refused.__traceback__ is None
        scheduler.leave(leaving)


def test_the_queue_is_bounded_in_requests_and_in_tokens() -> None:
    scheduler = make(Scheduler(window=WINDOW), tokens=10)
    submit(scheduler, 5, 1, 2, 3, 4, 5)
    ((_, error),) = messages(scheduler.submit(5, Generate(6, "m", {}, b""), NOW))
    assert isinstance(error, Error)
    body = unpack_body(error.body)
    assert (body["name"], body["retryable"], body["retry_after_ms"]) == ("overloaded", True, 1000)
    scheduler.cancel(5, 3, NOW)
    ((_, error),) = messages(scheduler.submit(5, Generate(7, "m", {}, bytes(24)), NOW))
    assert isinstance(error, Error), "two prompts of two tokens wait, and this one has seven"
    assert isinstance(messages(scheduler.submit(5, Generate(7, "m", {}, bytes(20)), NOW))[0][1], Accepted)


def test_retry_after_is_when_what_waits_now_will_have_been_started(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2)
    raw = frame(5, (1, 0, FINISHED))
    scheduler.events("m", raw, decoded(raw), NOW + 4)  # the request took 4 s
    submit(scheduler, 5, 3, 4, 5, 6)
    ((_, error),) = messages(scheduler.submit(5, Generate(7, "m", {}, b""), NOW))
    assert isinstance(error, Error)
    assert unpack_body(error.body)["retry_after_ms"] == 6000, "three wait, two are done at once"


def test_a_stream_whose_client_stopped_reading_is_ended(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2)
    for seq in range(WINDOW + 1):
        deliver(scheduler, frame(5, (1, seq, 0)))
    assert scheduler.end_stalled(NOW + 59) == []
    effects = scheduler.end_stalled(NOW + 60)
    ((request, seq, flags, fields),) = sent_to(effects, 5)
    assert (request, seq, flags, fields["error"]["name"]) == (1, WINDOW, ERROR, "slow_consumer")
    assert fields["delivered_tokens"] == WINDOW
    assert messages(effects)[0] == ("m", CancelJob(5, 1))


def test_the_stream_that_holds_most_is_ended_when_all_hold_too_much() -> None:
    scheduler = make(Scheduler(window=WINDOW, holds=SendBufferLimits(of_all=400)))
    submit(scheduler, 5, 1)
    submit(scheduler, 6, 1)
    ended = []
    for seq in range(30):
        for channel in (5, 6):
            if channel == 5 or seq < WINDOW + 3:
                effects = deliver(scheduler, frame(channel, (1, seq, 0)))
                ended += [(c, e[3]["error"]["name"]) for c in (5, 6) for e in sent_to(effects, c) if e[2] & ERROR]
        if ended:
            break
    assert ended == [(5, "slow_consumer")]


def crash(scheduler: Scheduler, generation: int, capacity: int = 2) -> list[Effect]:
    return scheduler.worker_gone("m", GONE, NOW) + scheduler.open("m", generation, capacity, NOW)


def test_one_death_is_one_strike_for_all_with_the_same_payload(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2)
    assert not sent_to(crash(scheduler, 2), 5), "twins are not poisoned by a single death"
    effects = crash(scheduler, 3)
    codes = [event[3]["error"]["name"] for event in sent_to(effects, 5)]
    assert codes == ["poisoned", "poisoned"], "and by the second, the one that waited to be alone is, too"
    assert scheduler.counts("m") == (0, 0)


def test_copies_that_wait_do_not_kill_more_workers(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2, 3, 4, 5)
    crash(scheduler, 2)
    effects = sent_to(crash(scheduler, 3), 5)
    assert [event[3]["error"]["name"] for event in effects] == ["poisoned"] * 5
    assert scheduler.counts("m") == (0, 0)


def test_who_cancels_or_leaves_is_struck_all_the_same(scheduler: Scheduler) -> None:
    for generation in (2, 3):
        submit(scheduler, 5, generation)
        scheduler.cancel(5, generation, NOW)
        crash(scheduler, generation)
    ((_, error),) = messages(scheduler.submit(5, Generate(9, "m", {}, b"body"), NOW))
    assert isinstance(error, Error)
    assert unpack_body(error.body)["name"] == "poisoned"


def test_copies_of_a_suspect_wait_for_their_turn(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1)
    crash(scheduler, 2)
    submit(scheduler, 5, 2, 3)  # copies of the suspect, while it runs alone
    scheduler.submit(6, Generate(1, "m", {}, b"innocent"), NOW)
    started = messages(deliver(scheduler, frame(5, (1, 0, EventFlag.ERROR), generation=2)))
    while ("m", JobMessage(6, 1, {"queue_ms": 0.0}, b"innocent")) not in started:
        (key,) = [(message.channel, message.request) for _, message in started if isinstance(message, JobMessage)]
        started = messages(deliver(scheduler, frame(key[0], (key[1], 0, EventFlag.ERROR), generation=2)))
        assert key[1] != 3, "the innocent one came in between"


def test_an_unconfirmed_cancel_is_answered_in_a_second() -> None:
    """A stopped worker cannot confirm a cancel."""
    alarms: list[float] = []
    scheduler = make(Scheduler(window=WINDOW, alarm=alarms.append))
    submit(scheduler, 5, 1)
    deliver(scheduler, frame(5, (1, 0, 0)))
    scheduler.cancel(5, 1, NOW)
    assert alarms == [NOW + 1]
    assert scheduler.expire(NOW + 0.9) == []
    assert alarms == [NOW + 1] * 2
    ((request, seq, flags, fields),) = sent_to(scheduler.expire(NOW + 1), 5)
    assert (request, seq, flags, fields["finish_reason"]) == (1, 1, FINISHED, "cancelled")
    assert fields["usage"]["completion_tokens"] == 1
    assert scheduler.counts("m") == (1, 0), "the worker still has it"
    assert not sent_to(deliver(scheduler, frame(5, (1, 1, FINISHED))), 5)
    assert scheduler.counts("m") == (0, 0)


def test_granting_nothing_is_no_sign_of_life(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1)
    for seq in range(WINDOW + 1):
        deliver(scheduler, frame(5, (1, seq, 0)))
    for second in range(1, 61):
        scheduler.credit(5, 1, 0, NOW + second)
    assert sent_to(scheduler.end_stalled(NOW + 60), 5)[0][3]["error"]["name"] == "slow_consumer"


def test_one_worker_is_kept_for_a_suspect_that_must_be_alone_and_the_other_goes_on() -> None:
    scheduler = Scheduler(window=1000)
    scheduler.add_model("m")
    for worker in ("m:1", "m:2"):
        scheduler.add_worker("m", worker, DOWN)
    for worker in ("m:1", "m:2"):
        scheduler.accept_new(worker)
        scheduler.open(worker, 1, 2, NOW)
    submit(scheduler, 5, 1)
    scheduler.worker_gone("m:1", GONE, NOW)  # a strike; the request resumes in the other worker, and is cancelled there
    scheduler.open("m:1", 2, 2, NOW)
    scheduler.cancel(5, 1, NOW)
    events = scheduler.events("m:2", raw := frame(5, (1, 0, FINISHED)), decoded(raw), NOW)
    assert sent_to(events, 5)
    for number, channel in enumerate((6, 7)):
        scheduler.submit(channel, Generate(1, "m", {"affinity": str(channel)}, b"long"), NOW)
        assert scheduler.counts("m") == (number + 1, 0)
    assert scheduler.work("m:1")[0] == scheduler.work("m:2")[0] == 1
    submit(scheduler, 5, 2)  # the suspect again; both workers have a new request

    def next_goes_to(request: int, now: float) -> str:
        message = Generate(request, "m", {"affinity": f"short {request}"}, b"short")
        (job,) = [effect for effect in scheduler.submit(8, message, now) if isinstance(effect, ToWorker)]
        raw = frame(8, (request, 0, FINISHED), generation=2 if job.worker == "m:1" else 1)
        scheduler.events(job.worker, raw, decoded(raw), now)
        return job.worker

    first = next_goes_to(1, NOW)
    assert next_goes_to(2, NOW + 4) == next_goes_to(3, NOW + 6) == first, "one is kept, the other goes on"
    kept, channel = ("m:2", 7) if first == "m:1" else ("m:1", 6)
    assert scheduler.work(kept)[0] == 1
    started: list[tuple[int | str, Message]] = []
    for seq in range(PROBATION):
        assert not started, "the long one may still be the reason if the worker dies"
        assert scheduler.worker_slot(kept) is None, "each of its events is looked at"
        raw = frame(channel, (1, seq, 0), generation=2 if kept == "m:1" else 1)
        started = messages(scheduler.events(kept, raw, decoded(raw), NOW + 7))[1:]
    assert started == [(kept, JobMessage(5, 2, {"queue_ms": 7000.0}, b"body"))], "beside the long one, which goes on"
    assert scheduler.worker_slot(kept) is not None


def test_who_waits_is_told_how_far_a_load_is_with_unit_and_rate_if_they_are_known() -> None:
    scheduler = Scheduler()
    scheduler.add_model("m")
    scheduler.add_worker("m", "m", DOWN)
    scheduler.rest("m", 0.0)
    scheduler.submit(1, Generate(1, "m", {"progress": True}, b""), 0.0)

    def told(progress: dict[str, Any]) -> dict[str, Any]:
        effects = scheduler.report_loading("m", {"phase": "copying model", "done": 1, "total": 2, **progress})
        ((_, report),) = messages(effects)
        assert isinstance(report, Report)
        return unpack_body(report.body)

    plain = {"phase": "loading", "part": "copying model", "done": 1, "total": 2}
    assert told({}) == plain
    assert told({"unit": "bytes", "per_s": 5}) == {**plain, "unit": "bytes", "per_s": 5}


def test_a_sleeping_model_is_woken_for_what_waits() -> None:
    scheduler = Scheduler()
    scheduler.add_model("m")
    for worker in ("m:1", "m:2"):
        scheduler.add_worker("m", worker, DOWN)
    assert scheduler.rest("m:1", 0.0) == []
    wake = scheduler.submit(1, Generate(1, "m", {}, b""), 0.0)
    assert wake[-1] == LoadForRequests("m")
    scheduler.accept_new("m:1")  # the worker is being started
    assert LoadForRequests("m") not in scheduler.submit(1, Generate(2, "m", {}, b""), 0.0)
    progress = {"phase": "loading", "done": 1, "total": 2}
    assert scheduler.report_loading("m", progress) == [], "nobody has asked for reports"
    scheduler.rest("m:2", 0.0)
    assert [type(effect) for effect in scheduler.open("m:1", 1, 8, 1.0)] == [ToWorker, ToWorker]
    # the model is unloaded while a request is on its way
    scheduler.pause("m:1", 2.0)
    late = scheduler.submit(1, Generate(3, "m", {}, b""), 2.0)
    assert LoadForRequests("m") not in late, "first the old process has to be gone"
    assert scheduler.rest("m:1", 3.0) == [LoadForRequests("m")]
