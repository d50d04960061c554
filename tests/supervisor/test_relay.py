"""The relay uses its sockets correctly. test_fast_path tests its decisions."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from protocol.codec import EventWriter
from protocol.messages import EventEntry, EventFlag
from supervisor.ports.worker_port import DRAIN_LIMIT, open_local_port
from supervisor.ports.zap import ZapHandler
from supervisor.requests.queue import WorkerSlot
from supervisor.requests.request import RequestProgress
from supervisor.requests.request_phase import RequestPhase
from tests.compiled_roads import needs_compiled

pytestmark = needs_compiled
PATIENCE_MS = 30_000
CREDIT = 10**6


class Between:
    """A worker port that relays to a ROUTER, with a worker and a client of one running request (channel 1)."""

    def __init__(self, directory: Path) -> None:
        self.context = zmq.Context()
        self.zap = ZapHandler(self.context, os.getuid(), is_worker=lambda pid: pid == os.getpid())
        self.front = self._socket(zmq.ROUTER)
        self.front.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.front.bind(f"ipc://{directory}/front")
        self.connections: dict[int, Any] = {}
        clients: Any = SimpleNamespace(socket=self.front, connections_by_channel=self.connections)
        self.port, _ = open_local_port(self.context, f"ipc://{directory}/back", clients, self.seat_of)
        self.client, self.worker = self._socket(zmq.DEALER), self._socket(zmq.DEALER)
        self.worker.setsockopt(zmq.ROUTING_ID, b"W1")
        self.client.connect(f"ipc://{directory}/front")
        self.worker.connect(f"ipc://{directory}/back")
        self.client.send(b"")
        self.connection = SimpleNamespace(routing_id=self.front.recv_multipart()[0])
        self.stream: Any = RequestProgress(CREDIT, True)
        self.stream.phase = RequestPhase.RUNNING
        self.worker_slot = WorkerSlot("m", None, capacity=1, generation=1, running={(1, 7): self.stream})
        self.asked: list[bytes] = []
        self.connections[1] = self.connection
        assert self.port.relays
        self.seq = 0

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def seat_of(self, routing_id: bytes) -> WorkerSlot | None:
        self.asked.append(routing_id)
        return self.worker_slot if routing_id == b"W1" else None

    def frame(self, flags: int = 0) -> bytes:
        writer = EventWriter()
        event = writer.event((self.seq,), {"text": "x"})
        self.seq += 1
        return writer.frame(1, 1, [EventEntry(7, self.seq - 1, int(flags), 1, len(event))], event)

    def unusual(self, until: Callable[[list[Any]], bool]) -> list[tuple[bytes, bytes | None]]:
        """Wait for frames that the relay hands over, and return them when there are enough."""
        handed: list[tuple[bytes, bytes | None]] = []
        while not until(handed):
            self.wait()
            handed += self.port.receive()
        return handed

    def wait(self) -> None:
        """Wait until a message can be received. Admit new connections meanwhile."""
        poller = zmq.Poller()
        poller.register(self.port.socket, zmq.POLLIN)
        poller.register(self.zap.socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(PATIENCE_MS))
            assert ready, "nothing comes any more"
            self.zap.handle()
            if self.port.socket in ready:
                return

    def probe_for_ever(self) -> None:
        """Send to the client until libzmq raises because the client has gone."""
        while True:
            with suppress(zmq.Again):  # the probes may fill the pipe before
                self.front.send_multipart([self.connection.routing_id, b"probe"], zmq.NOBLOCK)

    def close(self) -> None:
        for socket in (self.client, self.worker, self.front):
            socket.close(linger=0)
        self.port.close()
        self.zap.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def between(tmp_path: Path) -> Iterator[Between]:
    it = Between(tmp_path)
    yield it
    it.close()


def test_what_is_not_usual_is_handed_over_in_its_turn(between: Between) -> None:
    frames = [between.frame() for _ in range(3)]
    last = between.frame(EventFlag.FINISHED)
    for frame in (frames[0], b"hello", frames[1], frames[2], last):
        between.worker.send(frame)
    noted: list[int] = []

    def enough(handed: list[Any]) -> bool:
        noted.append(between.stream.sent)
        return len(handed) == 2

    assert between.unusual(enough) == [(b"W1", b"hello"), (b"W1", last)]
    assert [between.client.recv() for _ in frames] == frames
    stream = between.stream
    assert (stream.sent, stream.credit, stream.unpaid, stream.delivered_tokens) == (3, CREDIT - 3, 3, 3)
    assert list(memoryview(stream.ids).cast("I")) == [0, 1, 2]
    assert between.worker_slot.tokens == 3
    assert stream.has_tokens
    assert 0 < stream.first_token <= time.monotonic()


def test_each_drain_takes_as_much_as_a_plain_one(between: Between) -> None:
    frames = [between.frame() for _ in range(DRAIN_LIMIT + 10)]
    for frame in frames:
        between.worker.send(frame)
    drains = 0
    while between.stream.sent < len(frames):
        between.wait()
        before = between.stream.sent
        assert list(between.port.receive()) == []
        assert between.stream.sent - before <= DRAIN_LIMIT
        assert between.port.more == (between.stream.sent - before == DRAIN_LIMIT)
        drains += 1
    assert drains >= 2
    assert len(between.asked) == drains, "who has an identity is asked once a drain"
    assert [between.client.recv() for _ in frames] == frames


def test_a_client_that_is_gone_is_left_to_who_can_end_its_requests(between: Between) -> None:
    between.client.close(linger=0)
    with pytest.raises(zmq.ZMQError, match="Host unreachable"):
        between.probe_for_ever()
    frame = between.frame()
    between.worker.send(frame)
    assert between.unusual(lambda handed: bool(handed)) == [(b"W1", frame)]
    assert between.stream.sent == between.worker_slot.tokens == 0, "noted as sent although it was not"


def test_frames_of_several_parts_and_of_strangers_are_handed_over(between: Between, tmp_path: Path) -> None:
    first, second = between.frame(), between.frame()
    between.worker.send_multipart([first, b"more", b"and more"])
    assert between.unusual(lambda handed: bool(handed)) == [(b"W1", None)]
    stranger = between._socket(zmq.DEALER)
    stranger.setsockopt(zmq.ROUTING_ID, b"W2")
    stranger.connect(f"ipc://{tmp_path}/back")
    stranger.send(second)
    assert between.unusual(lambda handed: bool(handed)) == [(b"W2", second)]
    stranger.close(linger=0)
    assert between.stream.sent == 0
    between.seq = 0
    between.worker.send(between.frame())
    assert between.unusual(lambda _: between.stream.sent == 1) == []


def test_a_closed_socket_is_an_error_and_no_crash(between: Between) -> None:
    between.front.close(linger=0)
    with pytest.raises(zmq.ZMQError):
        list(between.port.receive())
