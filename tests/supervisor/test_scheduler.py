"""The scheduler's rules one by one; test_scheduler_machine has them all at once."""

from typing import Any

import pytest

from protocol.codec import decode, encode, pack_event, split_events, unpack_body, unpack_event
from protocol.errors import ErrorCode, WireError
from protocol.messages import (
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
)
from supervisor import scheduler as scheduler_module
from supervisor.in_flight import Effect, ToClient, ToWorker
from supervisor.scheduler import Scheduler

DOWN = WireError(ErrorCode.MODEL_NOT_RUNNING, "down")
GONE = WireError(ErrorCode.WORKER_DIED, "gone")
WINDOW = 4
FINISHED, ERROR = EventFlag.FINISHED, EventFlag.ERROR


@pytest.fixture
def scheduler() -> Scheduler:
    """One model ``m`` with a worker of generation 1 that takes two jobs; a queue of three."""
    scheduler = Scheduler(window=WINDOW)
    scheduler.add_model("m", queue_limit=3, refusal=DOWN)
    scheduler.accept_new("m")
    scheduler.open("m", 1, 2)
    return scheduler


def messages(effects: list[Effect]) -> list[tuple[int | str, Message]]:
    """(channel or model, message) of each effect."""
    told: list[tuple[int | str, Message]] = []
    for effect in effects:
        if isinstance(effect, ToClient):
            told.append((effect.channel, decode(effect.frame, SUPERVISOR_TO_CLIENT)))
        else:
            told.append((effect.model, decode(effect.frame, SUPERVISOR_TO_WORKER)))
    return told


def submit(scheduler: Scheduler, channel: int, *requests: int) -> None:
    for request in requests:
        scheduler.submit(channel, Generate(request, "m", {}, b"body"))


def frame(channel: int, *events: tuple[int, int, int], generation: int = 1) -> bytes:
    """EVENTS with (request, seq, flags) each, one token an event."""
    packed = [pack_event([7], {"text": "x"}) for _ in events]
    index = [EventEntry(r, seq, int(flags), 1, len(p)) for (r, seq, flags), p in zip(events, packed, strict=True)]
    return encode(Events(channel, generation, index, b"".join(packed)))


def deliver(scheduler: Scheduler, raw: bytes) -> list[Effect]:
    message = decode(raw, frozenset({Events.kind}))
    assert isinstance(message, Events)
    return scheduler.events("m", raw, message)


def told(effects: list[Effect], channel: int) -> list[tuple[int, int, int, dict[str, Any]]]:
    """(request, seq, flags, map) of every event for a client."""
    return [
        (entry.request, entry.seq, entry.flags, unpack_event(entry, event)[1])
        for target, message in messages(effects)
        if target == channel and isinstance(message, Events)
        for entry, event in split_events(message)
    ]


def test_accepted_goes_before_the_job(scheduler: Scheduler) -> None:
    effects = messages(scheduler.submit(5, Generate(1, "m", {}, b"body")))
    assert [type(message) for _, message in effects] == [Accepted, JobMessage]
    assert effects[1] == ("m", JobMessage(5, 1, {}, b"body"))


def test_a_frame_is_passed_on_as_it_is_while_there_is_credit(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2)
    raw = frame(5, (1, 0, 0), (2, 0, 0))
    assert deliver(scheduler, raw) == [ToClient(5, raw)]


def test_only_the_stream_without_credit_is_held_back(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2)
    for seq in range(WINDOW):
        deliver(scheduler, frame(5, (1, seq, 0)))
    effects = deliver(scheduler, frame(5, (1, WINDOW, 0), (2, 0, 0), (1, WINDOW + 1, FINISHED)))
    assert [event[:3] for event in told(effects, 5)] == [(2, 0, 0)]
    assert scheduler.counts("m") == (1, 0), "the worker has finished the held one: its place is free"
    effects = scheduler.credit(5, 1, 1)
    assert [event[:3] for event in told(effects, 5)] == [(1, WINDOW, 0), (1, WINDOW + 1, FINISHED)]
    assert scheduler.totals("m")["finished"] == 1


def test_a_terminal_event_needs_no_credit(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1)
    for seq in range(WINDOW):
        deliver(scheduler, frame(5, (1, seq, 0)))
    effects = deliver(scheduler, frame(5, (1, WINDOW, FINISHED)))
    assert [event[:3] for event in told(effects, 5)] == [(1, WINDOW, FINISHED)]


def test_an_ended_job_makes_room_for_the_next(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2, 3)
    effects = deliver(scheduler, frame(5, (1, 0, FINISHED)))
    assert messages(effects)[-1] == ("m", JobMessage(5, 3, {}, b"body"))


def test_a_dead_worker_ends_what_it_held_and_keeps_what_waits(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2, 3)
    deliver(scheduler, frame(5, (1, 0, 0), (1, 1, 0)))
    effects = told(scheduler.end_running("m", GONE), 5)
    assert [event[:3] for event in effects] == [(1, 2, ERROR), (2, 0, ERROR)]
    assert [event[3]["delivered_tokens"] for event in effects] == [2, 0]
    assert effects[0][3]["error"]["name"] == "worker_died"
    assert scheduler.counts("m") == (0, 1)
    assert messages(scheduler.open("m", 2, 2)) == [("m", JobMessage(5, 3, {}, b"body"))]


def test_words_of_a_former_generation_are_dropped(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1)
    scheduler.end_running("m", GONE)
    submit(scheduler, 5, 1)
    scheduler.open("m", 2, 2)
    assert deliver(scheduler, frame(5, (1, 0, FINISHED), generation=1)) == []
    assert scheduler.dropped_frames == 1
    assert told(deliver(scheduler, frame(5, (1, 0, FINISHED), generation=2)), 5)


def test_a_finished_answer_survives_the_death_of_its_worker(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1)
    for seq in range(WINDOW + 2):
        deliver(scheduler, frame(5, (1, seq, 0)))
    deliver(scheduler, frame(5, (1, WINDOW + 2, FINISHED)))
    assert scheduler.end_running("m", GONE) == []
    assert [event[1] for event in told(scheduler.credit(5, 1, WINDOW), 5)] == [4, 5, 6]


def test_a_client_that_leaves_has_its_jobs_cancelled_and_hears_no_more(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2, 3)
    submit(scheduler, 6, 1)
    assert messages(scheduler.gone(5)) == [("m", CancelJob(5, 1)), ("m", CancelJob(5, 2))]
    assert scheduler.counts("m") == (2, 1), "a place is free when the worker has let go, not before"
    effects = deliver(scheduler, frame(5, (1, 0, 0), (2, 0, FINISHED)))
    assert messages(effects) == [("m", JobMessage(6, 1, {}, b"body"))]
    assert scheduler.gone(5) == []


def test_cancelling_in_each_phase(scheduler: Scheduler) -> None:
    submit(scheduler, 5, 1, 2, 3)
    ((_, _, flags, told_map),) = told(scheduler.cancel(5, 3), 5)
    assert (flags, told_map["finish_reason"]) == (FINISHED, "cancelled")
    assert messages(scheduler.cancel(5, 1)) == [("m", CancelJob(5, 1))]
    assert told(deliver(scheduler, frame(5, (1, 0, FINISHED))), 5)
    assert scheduler.cancel(5, 1) == scheduler.cancel(5, 3) == scheduler.cancel(9, 9) == []
    for seq in range(WINDOW + 3):
        deliver(scheduler, frame(5, (2, seq, 0)))
    held_first = messages(scheduler.cancel(5, 2))
    assert [type(message) for _, message in held_first] == [Events, CancelJob]
    assert told(deliver(scheduler, frame(5, (2, WINDOW + 3, 0), (2, WINDOW + 4, FINISHED))), 5)


def test_slow_consumers_are_cut_off_by_memory_of_stream_and_of_connection(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_HELD_BYTES", 3000)
    monkeypatch.setattr(scheduler_module, "MAX_HELD_BYTES_OF_CONNECTION", 4000)

    def until_cut(channel: int, request: int) -> int:
        for seq in range(100):
            effects = deliver(scheduler, frame(channel, (request, seq, 0)))
            if any(event[2] & ERROR for event in told(effects, channel)):
                names = [e[3]["error"]["name"] for e in told(effects, channel)]
                assert names == ["slow_consumer"]
                assert isinstance(effects[0], ToWorker), "the worker is told to let go"
                deliver(scheduler, frame(channel, (request, seq + 1, FINISHED)))
                return seq
        raise AssertionError("never cut off")

    submit(scheduler, 5, 1)
    alone = until_cut(5, 1)
    submit(scheduler, 5, 2)
    for seq in range(alone - 1):
        deliver(scheduler, frame(5, (2, seq, 0)))
    deliver(scheduler, frame(5, (2, alone - 1, FINISHED)))  # finished, and held in full
    submit(scheduler, 5, 3)
    assert until_cut(5, 3) < alone
    submit(scheduler, 6, 1)
    assert until_cut(6, 1) == alone, "another connection has a bound of its own"
    scheduler.gone(5)
    submit(scheduler, 5, 4)
    assert until_cut(5, 4) == alone, "what a connection held is forgotten with it"


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        (Generate(1, "nosuch", {}, b""), ErrorCode.MODEL_NOT_FOUND, "model"),
        (Generate(0, "m", {}, b""), ErrorCode.INVALID_REQUEST, "request"),
        (Generate(1, "m", {"resume": True}, b""), ErrorCode.UNSUPPORTED, "route.resume"),
        (Generate(1, "m", {"resume": 0}, b""), ErrorCode.INVALID_REQUEST, "route.resume"),
        (Generate(1, "m", {"pin": 1}, b""), ErrorCode.INVALID_REQUEST, "route.pin"),
    ],
)
def test_refusals(scheduler: Scheduler, message: Generate, code: ErrorCode, field: str) -> None:
    ((channel, error),) = messages(scheduler.submit(5, message))
    assert isinstance(error, Error)
    body = unpack_body(error.body)
    assert (channel, error.request, body["code"], body["field"]) == (5, message.request, code, field)
    assert not scheduler.channels()


def test_the_queue_is_bounded_in_requests_and_in_bytes(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(scheduler, 5, 1, 2, 3, 4, 5)
    ((_, error),) = messages(scheduler.submit(5, Generate(6, "m", {}, b"")))
    assert isinstance(error, Error)
    body = unpack_body(error.body)
    assert (body["name"], body["retryable"], body["retry_after_ms"] > 0) == ("overloaded", True, True)
    scheduler.cancel(5, 3)
    monkeypatch.setattr(scheduler_module, "MAX_WAITING_BYTES", 10)
    ((_, error),) = messages(scheduler.submit(5, Generate(7, "m", {}, b"xxx")))
    assert isinstance(error, Error)
    assert isinstance(messages(scheduler.submit(5, Generate(7, "m", {}, b"xx")))[0][1], Accepted)
