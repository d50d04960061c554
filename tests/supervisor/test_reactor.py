"""The bare loop misses no message of the sockets that it polls in each turn, nor of the sockets that wake it by their
descriptor. That descriptor is edge-triggered, so its edge may come too early."""

import os
import random
import time
from collections.abc import Iterator

import pytest
import zmq

from supervisor.reactor import Reactor

WITHIN = 60.0


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


class Pair:
    """A socket that a reactor watches, and its peer. ``got``: the number of messages that the handler read."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], reactor: Reactor, number: int, *, busy: bool) -> None:
        self.socket, self.peer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        self.socket.bind(f"inproc://{number}")
        self.peer.connect(f"inproc://{number}")
        self.peer.send(b"hello")
        self.peer_id = self.socket.recv_multipart()[0]
        self.got = 0
        reactor.watch(self.socket, self.read, busy=busy)

    def read(self) -> None:
        while True:
            try:
                self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.got += 1

    def close(self) -> None:
        self.socket.close(linger=0)
        self.peer.close(linger=0)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_missed_whoever_used_a_socket_meanwhile(context: zmq.Context[zmq.Socket[bytes]], seed: int) -> None:
    draw = random.Random(seed)
    reactor = Reactor()
    pairs = [Pair(context, reactor, number, busy=number < 2) for number in range(4)]
    reader, writer = os.pipe()
    read: list[bytes] = []
    reactor.watch(reader, lambda: read.append(os.read(reader, 1)))
    sent, written = [0] * 4, 0
    for _ in range(2000):
        for _ in range(draw.randrange(4)):
            number = draw.randrange(4)
            pairs[number].peer.send(b"x")
            sent[number] += 1
        if draw.random() < 0.3:  # a send may consume the edge of a message without reading it
            used = draw.choice(pairs)
            used.socket.send_multipart([used.peer_id, b"y"])
            used.socket.get(zmq.EVENTS)
            reactor.poll_all()
        if draw.random() < 0.05:
            os.write(writer, b"z")
            written += 1
        awaited = [pair.got for pair in pairs] != sent or len(read) != written
        deadline = time.monotonic() + WITHIN
        while awaited and time.monotonic() < deadline:
            reactor.timers.at(deadline, lambda: None)
            reactor.turn()
            awaited = [pair.got for pair in pairs] != sent or len(read) != written
            if draw.random() < 0.5:
                break  # leave messages for later turns
    while [pair.got for pair in pairs] != sent or len(read) != written:
        begun = time.monotonic()
        reactor.timers.at(begun + WITHIN, lambda: None)
        reactor.turn()
        assert time.monotonic() < begun + WITHIN, f"seed {seed}: {[pair.got for pair in pairs]} of {sent} were read"
    for pair in pairs:
        pair.close()
    os.close(reader)
    os.close(writer)
