"""The compiled outbox and the Python reference make the same frames of a step's events, however fast the reader is."""

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from model_worker.engine import DrawnToken, EngineEvent, Failed, Finished, NewTokens, Prefilling
from model_worker.link import MAX_FRAME_BYTES, MAX_FRAME_EVENTS, Outbox, PlainOutbox
from model_worker.loop import WorkerLoop, _Tracked
from protocol.codec import decode_events, is_events, split_events, unpack_event
from protocol.errors import ErrorCode, WireError
from protocol.messages import EventEntry, Message
from protocol.process.sockets import has_input, plain_has_input
from protocol.process.worker_spec import EngineSpec, ProgressLease
from tests.compiled_roads import needs_compiled
from tests.deterministic_engine import DeterministicEngine

pytestmark = needs_compiled
MOST = 2**64 - 1
OWN_IDS = {1: (1, 1), 2: (1, 2), 3: (300, 2**32), 4: (MOST, MOST), 5: (0, 1)}
"""(channel, request) of each job of the engine, by the job's id. The first job never ends."""


def beats(lease: ProgressLease) -> int:
    """Return the number of beats so far."""
    return lease.words[0] >> 32


class Scripted(DeterministicEngine):
    """An engine whose steps return scripted events."""

    def __init__(self) -> None:
        super().__init__(EngineSpec("m", "", "/"))
        self.script: list[list[EngineEvent]] = []

    def step(self) -> list[EngineEvent]:
        self.steps += 1
        return self.script.pop(0)


class Road:
    """A worker's loop with an outbox of its own, and the reader of its frames. A context manager.

    room  number of messages that the pipe holds
    """

    def __init__(self, kind: Callable[..., Any], most_events: int, most_bytes: int, room: int = 0) -> None:
        self.context = zmq.Context()
        self.reader, self.socket = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
        for socket in (self.reader, self.socket):
            socket.setsockopt(zmq.RCVHWM, room)
            socket.setsockopt(zmq.SNDHWM, room)
        self.reader.bind("inproc://road")
        self.socket.connect("inproc://road")
        self.outbox = kind(self.socket, MOST, most_events, most_bytes)
        self.engine, self.lease = Scripted(), ProgressLease()
        self.steps, self.take, self.queue = self.outbox.steps, self.outbox.take, self.outbox.queue
        self.loop = WorkerLoop(self.engine, self, lease=self.lease)  # type: ignore[arg-type]
        self.loop._stats_due = float("inf")
        self.message: list[tuple[int, ...]] = []
        for number, (channel, request) in OWN_IDS.items():
            carry: dict[str, Any] = {} if number % 2 else {"seq": 127, "token_ids": b"1234", "progress": True}
            tracked = _Tracked(channel, request, carry.get("seq", 0), len(carry.get("token_ids", b"")) // 4, carry)
            self.loop._jobs[number] = tracked
            self.loop._job_ids[channel, request] = number

    def __enter__(self) -> "Road":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def receive(self, wait_ms: int, also: Sequence[int] = ()) -> list[Message]:
        return []

    def flush(self) -> None:
        # asking for ZMQ_EVENTS makes libzmq notice at once that the reader has taken messages
        self.socket.get(zmq.EVENTS)
        self.outbox.flush()

    def prefill(self, *values: int) -> None:
        self.message.append(values)

    def run(self, steps: Sequence[Sequence[EngineEvent]]) -> None:
        self.socket.get(zmq.EVENTS)
        self.engine.script = [list(events) for events in steps]
        self.engine.script[-1].append(Prefilling(1, 0, 1))  # ends the last stretch of events
        while self.engine.script:
            self.loop._turn()

    def read(self, most: int) -> list[bytes]:
        frames: list[bytes] = []
        while len(frames) < most and has_input(self.reader):
            frames.append(self.reader.recv())
        return frames

    def rest(self) -> list[bytes]:
        frames = self.read(1 << 30)
        while self.outbox.unsent:
            self.flush()
            frames += self.read(1 << 30)
        return frames

    @property
    def state(self) -> Any:
        jobs = {number: (job.seq, job.tokens) for number, job in self.loop._jobs.items()}
        return jobs, self.loop._job_ids, self.outbox.unsent, self.engine.steps, beats(self.lease), self.message


class Id(IntEnum):
    NINE = 9


class Text(str):
    __slots__ = ()


@dataclass(slots=True)
class OwnDelta(NewTokens):
    more: int = field(default=0)


EDGES = [0, 1, 31, 32, 127, 128, 255, 256, 65535, 65536, 2**31, 2**32 - 1]
IDS = st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 2**32 - 1)), max_size=5)
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.builds("".__class__.__mul__, st.sampled_from("aé€😀"), st.sampled_from([0, 1, 31, 32, 255, 256])),
)
JOBS = st.sampled_from([*OWN_IDS])
LOGPROBS = [DrawnToken(7, -0.5, ((8, -0.25),))]
DELTAS = st.one_of(
    st.builds(NewTokens, JOBS, st.one_of(IDS, IDS.map(tuple)), TEXTS),
    st.builds(NewTokens, JOBS, st.just((5,)), st.just("x")),
    st.builds(NewTokens, JOBS, IDS, TEXTS, st.sampled_from([(), [], LOGPROBS])),
    st.builds(NewTokens, JOBS, st.sampled_from([(True,), (Id.NINE,), range(3), (), [], (1, Id.NINE)]), TEXTS),
    st.builds(NewTokens, JOBS, IDS, TEXTS.map(Text)),
    st.builds(OwnDelta, JOBS, IDS, TEXTS),
)
OTHERS = st.one_of(
    st.builds(Prefilling, JOBS, st.integers(0, 9), st.integers(9, 10)),
    st.builds(Finished, st.sampled_from([*OWN_IDS][1:]), IDS, TEXTS, st.just("length"), st.just(1), st.just(9)),
    st.builds(Failed, st.sampled_from([*OWN_IDS][1:]), st.just(WireError(ErrorCode.INVALID_REQUEST, "no"))),
)
STEPS = st.lists(st.lists(st.one_of(DELTAS, DELTAS, DELTAS, OTHERS), max_size=6), min_size=1, max_size=5)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), STEPS),
        st.tuples(st.just("run"), STEPS),
        st.tuples(st.just("read"), st.integers(0, 4)),
        st.tuples(st.just("answer"), st.binary(max_size=9)),
        st.tuples(st.just("flush"), st.none()),
    ),
    max_size=12,
)


def living(steps: Sequence[Sequence[EngineEvent]], ended: set[int]) -> list[list[EngineEvent]]:
    """Return the events without those that follow a job's end."""
    kept: list[list[EngineEvent]] = []
    for events in steps:
        kept.append([])
        for event in events:
            if event.job not in ended:
                kept[-1].append(event)
                if isinstance(event, Finished | Failed):
                    ended.add(event.job)
    return kept


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.sampled_from([0, 1, 2]), st.integers(1, 4), st.sampled_from([0, 1, 40, 1000]))
def test_both_roads_make_the_same_frames(
    operations: list[tuple[str, Any]], room: int, most_events: int, most_bytes: int
) -> None:
    with (
        Road(Outbox, most_events, most_bytes, room) as compiled,
        Road(PlainOutbox, most_events, most_bytes, room) as plain,
    ):
        ended: set[int] = set()
        for name, value in operations:
            if name == "run":
                value = living(value, ended)
            if name == "read":
                assert compiled.read(value) == plain.read(value)
            for road in (compiled, plain):
                if name == "run":
                    road.run(value)
                elif name == "answer":
                    road.socket.get(zmq.EVENTS)
                    road.outbox.answer(value)
                elif name == "flush":
                    road.flush()
            assert compiled.state == plain.state
        assert compiled.rest() == plain.rest()


def test_every_length_that_a_number_and_a_text_can_have() -> None:
    numbers = [near for edge in (0x80, 0x100, 0x10000, 0x100000000, 2**64) for near in (edge - 1, edge) if near <= MOST]
    sizes = [near for edge in (32, 256, 65536) for near in (edge - 1, edge)]
    made = []
    for kind in (Outbox, PlainOutbox):
        with Road(kind, 1 << 20, 1 << 20) as road:
            for number in numbers:
                road.loop._jobs[number + 10] = _Tracked(number, number, number if number < MOST else 0, number // 2, {})
                for size in sizes:
                    road.run([[NewTokens(number + 10, [min(number, 2**32 - 1)], "x" * size)]])
            for tokens in (1, 2, 4096, 4097):
                road.run([[NewTokens(1, range(tokens), "")], [NewTokens(1, [*range(tokens)], "")]])
            for events in (15, 16, 65535, 65536):
                road.run([[NewTokens(1, (1,), "")] * events])
            made.append((road.rest(), [(job.seq, job.tokens) for job in road.loop._jobs.values()]))
    assert made[0] == made[1]


def test_a_stretch_of_steps_ends_with_what_is_not_usual_with_input_and_in_time() -> None:
    with Road(Outbox, 10, 1000) as road:
        usual: list[EngineEvent] = [NewTokens(1, (7,), "x"), NewTokens(5, (), "")]
        road.engine.script = [list(usual) for _ in range(50)] + [[*usual, Prefilling(2, 1, 2), *usual]]
        road.loop._turn()
        assert (road.engine.steps, beats(road.lease)) == (51, 51)
        assert road.message == [(1, 2, 1, 2)]
        frames = road.read(100)
        entries = [entry for frame in frames for entry in decode_events(frame).index]
        assert (len(frames), [entry.seq for entry in entries]) == (51, list(range(52)))

        def endless() -> list[EngineEvent]:
            road.engine.steps += 1
            if road.engine.steps == 1000:
                road.reader.send(b"")
            return list(usual)

        jobs, steps = road.loop._jobs, partial(road.outbox.steps, endless, road.lease)
        deadline = time.monotonic() + 30
        assert steps(jobs, deadline) == (usual, 2)
        assert road.engine.steps >= 1000
        assert time.monotonic() < deadline
        road.socket.recv()
        begun, before = time.monotonic(), road.engine.steps
        steps(jobs, begun + 0.01)
        assert 0.01 <= time.monotonic() - begun < 30
        assert road.engine.steps > before
        before = road.engine.steps
        steps(jobs, 0.0)
        assert road.engine.steps == before + 1
        assert beats(road.lease) == road.engine.steps


@pytest.mark.parametrize(
    ("most_events", "most_bytes", "size"), [(MAX_FRAME_EVENTS, MAX_FRAME_BYTES, 240), (4096, 1 << 20, 60_000)]
)
def test_a_frame_has_at_most_so_many_events_and_bytes(most_events: int, most_bytes: int, size: int) -> None:
    for events in ([NewTokens(1, (i,), "x") for i in range(2 * most_events + 1)], [NewTokens(1, (), "y" * size)] * 40):
        made = []
        for kind in (Outbox, PlainOutbox):
            with Road(kind, most_events, most_bytes) as road:
                road.run([events])
                made.append(road.rest())
        assert made[0] == made[1]
        assert len(made[0]) == 3
        for frame in made[0]:
            message = decode_events(frame)
            assert is_events(frame)
            assert len(message.body) <= most_bytes
            assert len(message.index) <= most_events


@pytest.mark.parametrize("size", [65_535, 65_536, 70_000, 2 << 20])
def test_a_long_event_arrives_whole(size: int) -> None:
    with Road(Outbox, 10, 1 << 20) as road:
        ids = tuple(range(size // 16))
        road.run(
            [
                [
                    NewTokens(1, (1,), "a"),
                    NewTokens(1, (), "é" * (size // 2)),
                    NewTokens(1, ids, ""),
                    NewTokens(1, (2,), "b"),
                ]
            ]
        )
        events = [unpack_event(*event) for frame in road.rest() for event in split_events(decode_events(frame))]
        texts = [fields["text"] for _, fields in events]
        assert texts == ["a", "é" * (size // 2), "", "b"]
        assert [ids for ids, _ in events] == [(1,), (), ids, (2,)]


def without(name: str) -> NewTokens:
    delta = NewTokens(1, (1,), "x")
    delattr(delta, name)
    return delta


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (NewTokens(99, (1,), "x"), KeyError),
        (NewTokens(99, (), ""), KeyError),
        (Finished(99, (1,), "x", "stop", 1, 1), KeyError),
        (NewTokens([], (1,), "x"), TypeError),  # type: ignore[arg-type]
        (NewTokens(1, (1,), "\ud800"), UnicodeEncodeError),
        (NewTokens(1, (-1,), "x"), OverflowError),
        (NewTokens(1, (2**32,), "x"), OverflowError),
        (NewTokens(1, (2**64, 1), "x"), Exception),
        (NewTokens(1, (1, -1), "x"), Exception),
        (NewTokens(1, (1.0,), "x"), AttributeError),  # type: ignore[arg-type]
        (NewTokens(1, None, "x"), TypeError),  # type: ignore[arg-type]
        (NewTokens(1, ("1", "2"), "x"), Exception),  # type: ignore[arg-type]
        (without("job"), AttributeError),
        (without("token_ids"), AttributeError),
        (without("text"), AttributeError),
        (without("logprobs"), AttributeError),
        (None, AttributeError),
    ],
)
def test_what_ends_the_process_does_so_on_either_road(event: Any, error: type[Exception]) -> None:
    roads = []
    for kind in (Outbox, PlainOutbox):
        with Road(kind, 10, 1000) as road:
            with pytest.raises(error) as raised:
                road.run([[NewTokens(1, (1,), "x"), event, NewTokens(1, (1,), "x")]])
            roads.append((road.state, road.rest(), raised.type))
    assert roads[0] == roads[1]


@pytest.mark.parametrize("events", [(NewTokens(1, (1,), "x"),), ()])
def test_events_need_not_be_a_list(events: Any) -> None:
    for kind in (Outbox, PlainOutbox):
        with Road(kind, 10, 1000) as road:
            assert road.outbox.steps(lambda: events, road.lease, road.loop._jobs, 0.0) == (events, 0)


def test_misuse_is_refused() -> None:
    with Road(Outbox, 10, 1000) as road:
        assert road.outbox.take([NewTokens(1, (1,), "x")], 5, road.loop._jobs) == 5
        assert road.outbox.take([NewTokens(1, (1,), "x")], 0, {1: "no tally"}) == 0
        for wrong in (
            lambda: road.outbox.take([], -1, road.loop._jobs),
            lambda: road.outbox.queue(1, EventEntry(1, 0, 0, 0, 5), b"four"),
            lambda: road.outbox.queue(1, (1, 2, 3), b"four"),
            lambda: road.outbox.queue(1, EventEntry(-1, 0, 0, 0, 4), b"four"),
            lambda: road.outbox.queue(-1, EventEntry(1, 0, 0, 0, 4), b"four"),
            lambda: Outbox(road.socket, 1, 0, 10),
        ):
            with pytest.raises((ValueError, OverflowError)):
                wrong()
        with pytest.raises(TypeError):
            road.outbox.steps(lambda: None, road.lease, road.loop._jobs, 0.0)
        assert road.rest() == []


@pytest.mark.parametrize("kind", [Outbox, PlainOutbox])
def test_a_closed_socket_is_an_error_and_loses_nothing_silently(kind: Callable[..., Any]) -> None:
    with Road(kind, 10, 1000) as road:
        road.socket.close()
        with pytest.raises(zmq.ZMQError, match=r"not a socket|non-socket") as raised:
            road.outbox.answer(b"x")
        assert raised.value.errno == zmq.ENOTSOCK
        assert road.outbox.unsent
    with Road(kind, 10, 1000) as road:
        road.outbox.queue(1, EventEntry(1, 0, 0, 0, 1), b"x")
        road.socket.close()
        with pytest.raises(zmq.ZMQError):
            road.outbox.flush()
        assert road.outbox.unsent


def test_input_is_seen_by_both() -> None:
    with Road(Outbox, 10, 1000) as road:
        for look in (has_input, plain_has_input):
            assert look(road.socket) is False
        road.reader.send(b"x")
        for look in (has_input, plain_has_input):
            assert look(road.socket) is True
        road.socket.close()
        for look in (has_input, plain_has_input):
            with pytest.raises(zmq.ZMQError):
                look(road.socket)


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    """Return the bytes that Python has allocated, C buffers included."""

    def in_use() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    yield in_use
    tracemalloc.stop()


@pytest.mark.long
def test_memory_is_given_back(traced: Callable[[], int]) -> None:
    many: list[EngineEvent] = [NewTokens(number, (1, 2**20), "some text €") for number in OWN_IDS for _ in range(20)]
    joined = []
    for kind in (Outbox, PlainOutbox):
        with Road(kind, 100, 10_000, room=1) as road:
            road.run([many] * 3)
            road.rest()
            before = traced()
            for _ in range(300):
                road.run([many])
            joined.append(traced() - before)
            assert joined[-1] > 1_000_000, "the pipe is full, events are joined"
            assert len(road.rest()) > 300
            assert abs(traced() - before) < 50_000
            for _ in range(20):
                road.run([many])
                road.rest()
            assert abs(traced() - before) < 50_000
    assert joined[0] < joined[1], "less than Python takes"
