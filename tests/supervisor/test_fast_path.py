"""The compiled fast path and the Python reference decide alike. Two schedulers get the same frames.

A failure prints the seed; TEST_SEED repeats it.
"""

import os
import random
from collections import Counter
from typing import Any

import pytest

from protocol.codec import decode_events, encode, is_events, pack_event
from protocol.errors import ErrorCode, FrameError, WireError
from protocol.messages import TERMINAL, EventEntry, EventFlag, Events, Generate
from supervisor.keys.rights import OWNER
from supervisor.requests.counters import COUNTS, CounterTable, make_table
from supervisor.requests.queue import QueueLimits
from supervisor.requests.request import Effect, ToClient
from supervisor.requests.scheduler import Scheduler
from supervisor.requests.usage_ledger import UsageLedger
from supervisor.requests.worker_events import requests_of_whole_frame
from tests.compiled_roads import needs_compiled
from tests.fuzzing.mutating import Mutator
from tests.fuzzing.running import SEED

pytestmark = needs_compiled
DOWN = WireError(ErrorCode.MODEL_NOT_RUNNING, "down")
FRAMES, MUTATED = 6000, 10_000
CHANNELS, STREAMS, WINDOW = (1, 300), 20, 40
NOW = 1000.0


def a_scheduler() -> Scheduler:
    descriptor = make_table()
    scheduler = Scheduler(window=WINDOW, ledger=UsageLedger(CounterTable(descriptor), NOW))
    os.close(descriptor)  # the mapping stays
    scheduler.add_model("m", QueueLimits(100, 10**6))
    scheduler.add_worker("m", "m", DOWN)
    scheduler.accept_new("m")
    scheduler.open("m", 1, 1000, NOW)
    for channel in CHANNELS:
        for request in range(1, STREAMS + 1):
            submit(scheduler, channel, request)
    return scheduler


def submit(scheduler: Scheduler, channel: int, request: int) -> None:
    route = {} if request % 3 else {"resume": False}
    scheduler.submit(channel, Generate(request, "m", route, b"\x80"), NOW)


def state(scheduler: Scheduler) -> Any:
    worker_slot = scheduler.worker_slot("m")
    assert worker_slot is not None
    streams = {
        key: (
            r.phase,
            r.sent,
            r.credit,
            r.holds,
            r.first_token,
            r.unpaid,
            r.delivered_tokens,
            bytes(r.ids),
            len(r.held),
        )
        for key, r in scheduler._table.live.items()
    }
    assert scheduler._table.ledger is not None
    counters = scheduler._table.ledger.row(OWNER, "m").counters
    return (
        list(counters[COUNTS]),
        streams,
        list(worker_slot.running),
        worker_slot.tokens,
        scheduler.held_bytes,
        scheduler.dropped_frames,
    )


def plain(scheduler: Scheduler, frame: bytes) -> list[Effect] | str:
    """Return the decision of the Python reference about a frame that begins like EVENTS."""
    try:
        return scheduler.events("m", frame, decode_events(frame), NOW)
    except FrameError as e:
        return str(e)


def fast_or_plain(fast_path: Any, scheduler: Scheduler, frame: bytes) -> tuple[bool, list[Effect] | str]:
    channel = fast_path.take(frame, scheduler.worker_slot("m"), NOW)
    return (False, plain(scheduler, frame)) if channel is None else (True, [ToClient(channel, frame)])


def must_be_fast(scheduler: Scheduler, frame: bytes) -> bool:
    """Return whether the reference relays the frame whole, with at most one event of each request and no end."""
    worker_slot = scheduler.worker_slot("m")
    assert worker_slot is not None
    try:
        message = decode_events(frame)
        whole = message.generation == worker_slot.generation and requests_of_whole_frame(worker_slot, message)
    except FrameError:
        return False
    plain_flags = all(entry.flags <= 255 and not entry.flags & TERMINAL for entry in message.index)
    return bool(whole) and plain_flags and len({entry.request for entry in message.index}) == len(message.index)


def a_fast_path() -> Any:
    from supervisor.requests.fast_path import FastPath

    return FastPath()


def a_frame(chance: random.Random, scheduler: Scheduler) -> bytes:
    """Return a frame as a worker sends it, in which one thing may be wrong or unusual."""
    channel = chance.choice(CHANNELS)
    numbers = chance.sample(range(1, STREAMS + 1), chance.choice((1, 1, 1, 2, 5, 16, 20)))
    index, body = [], b""
    for number in numbers:
        request = scheduler._table.live.get((channel, number))
        ids = [chance.randrange(1 << 32) for _ in range(chance.choice((0, 1, 1, 1, 3)))]
        event = pack_event(ids, {"text": "x" * chance.choice((0, 1, 8, 300))})
        seq = request.next_seq if request is not None else 0
        index.append(EventEntry(number, seq, int(EventFlag.FIRST) if not seq else 0, len(ids), len(event)))
        body += event
    generation, odd, what = 1, chance.randrange(len(index)), chance.random()
    entry = index[odd]
    if what < 0.03:
        index[odd] = entry._replace(seq=entry.seq + chance.choice((1, 5, 2**40)))
    elif what < 0.06:
        index[odd] = entry._replace(request=chance.choice((0, 99, 2**33, 2**64 - 1)))
    elif what < 0.12:
        index[odd] = entry._replace(flags=int(chance.choice((EventFlag.FINISHED, EventFlag.ERROR))))
    elif what < 0.14:
        index[odd] = entry._replace(flags=chance.choice((64, 255, 256, 2**32)))
    elif what < 0.16:
        index[odd] = entry._replace(tokens=chance.choice((entry.length, 2**30, 2**62, 2**64 - 1)))
    elif what < 0.18:
        index[odd] = entry._replace(length=chance.choice((0, entry.length + 1, 2**32, 2**64 - 1)))
    elif what < 0.20:
        generation = chance.choice((0, 2, 2**64 - 1))
    elif what < 0.22:
        channel = chance.choice((0, 2, 2**63))
    elif what < 0.25:
        index.append(entry._replace(seq=entry.seq + 1))
        body = body + body[sum(e.length for e in index[:odd]) :][: entry.length]
    return encode(Events(channel, generation, index, body))


def test_it_decides_and_notes_what_python_would() -> None:
    print(f"TEST_SEED={SEED}")
    chance, found = random.Random(SEED), Counter[str]()
    one, other, fast_path = a_scheduler(), a_scheduler(), a_fast_path()
    for _ in range(FRAMES):
        frame = a_frame(chance, other)
        must = must_be_fast(other, frame)
        was_fast, reported = fast_or_plain(fast_path, one, frame)
        assert was_fast == must, frame.hex()
        assert reported == plain(other, frame), frame.hex()
        found["fast path" if was_fast else "refused" if isinstance(reported, str) else "other"] += 1
        if chance.random() < 0.5:
            channel, request, events = chance.choice(CHANNELS), chance.randint(1, STREAMS), chance.choice((1, WINDOW))
            assert one.credit(channel, request, events, NOW) == other.credit(channel, request, events, NOW)
        for channel in CHANNELS:
            for request in range(1, STREAMS + 1):
                if not other.holds(channel, request):
                    submit(one, channel, request), submit(other, channel, request)
        if not was_fast or chance.random() < 0.1:
            assert state(one) == state(other), frame.hex()
    assert state(one) == state(other)
    assert min(found["fast path"], found["refused"], found["other"]) > FRAMES // 50, found


@pytest.mark.long
def test_it_believes_no_frame_that_python_does_not() -> None:
    print(f"TEST_SEED={SEED}")
    chance = random.Random(SEED)
    fresh = a_scheduler()
    mutator = Mutator([a_frame(chance, fresh) for _ in range(200)], SEED)
    one, other, fast_path = a_scheduler(), a_scheduler(), a_fast_path()
    believed = 0
    for _ in range(MUTATED):
        frame = mutator.frame()
        channel = fast_path.take(frame, one.worker_slot("m"), NOW)
        if channel is not None:
            believed += 1
            assert is_events(frame)
            assert plain(other, frame) == [ToClient(channel, frame)], frame.hex()
            assert state(one) == state(other), frame.hex()
            one, other = a_scheduler(), a_scheduler()
    assert state(one) == state(a_scheduler()), "a frame that was not believed has changed something"
    assert believed > MUTATED // 1000, believed


def test_a_frame_cut_anywhere_does_not_take_the_fast_path() -> None:
    """The fast path reads nothing beyond a frame's end. Each frame has a buffer of its own for a sanitizer."""
    scheduler, fast_path = a_scheduler(), a_fast_path()
    event = pack_event([7], {"text": "x" * 300})
    index = [EventEntry(request, 0, 0, 1, len(event)) for request in range(1, 18)]
    whole = encode(Events(300, 1, index, event * 17))
    for size in range(len(whole)):
        assert fast_path.take(whole[:size], scheduler.worker_slot("m")) is None
    assert fast_path.take(whole + b"\0", scheduler.worker_slot("m")) is None
    assert fast_path.take(whole, scheduler.worker_slot("m")) == 300
