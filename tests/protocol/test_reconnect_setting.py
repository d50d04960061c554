"""The libzmq in use behaves as the documentation of the wire says about ZMQ_RECONNECT_IVL and ZMQ_IMMEDIATE."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from protocol.client.transport import RECONNECT_MS
from tests.serving import wait_until

ANSWERS = [b"answer %d" % n for n in range(5)]


@contextmanager
def ended(directory: Path, interval: int, immediate: int) -> Iterator[zmq.Socket[bytes]]:
    """Make a client's socket with a connection that has ended while its answers are unread."""
    endpoint = f"ipc://{directory}/answers"
    theirs: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, dealer = theirs.socket(zmq.ROUTER), ours.socket(zmq.DEALER)
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        dealer.setsockopt(zmq.RECONNECT_IVL, interval)
        dealer.setsockopt(zmq.IMMEDIATE, immediate)
        router.bind(endpoint)
        dealer.connect(endpoint)
        dealer.send(b"hello")
        who, _ = router.recv_multipart()
        for answer in ANSWERS:
            router.send_multipart([who, answer])
        assert dealer.poll(10_000)
        router.close(linger=-1)  # sent frames leave before the connection ends
        theirs.term()
        assert monitor.poll(10_000), "the client was not told of the end"
        yield dealer
    finally:
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close(linger=0)
        ours.term()
        router.close(linger=0)
        theirs.term()


def test_with_a_long_interval_what_has_arrived_can_be_read(runtime_dir: Path) -> None:
    with ended(runtime_dir, RECONNECT_MS, immediate=0) as socket:
        assert [socket.recv(zmq.NOBLOCK) for _ in ANSWERS] == ANSWERS


@pytest.mark.parametrize(("interval", "immediate"), [(-1, 0), (RECONNECT_MS, 1)])
def test_without_reconnecting_and_with_immediate_it_is_dropped(
    runtime_dir: Path, interval: int, immediate: int
) -> None:
    with ended(runtime_dir, interval, immediate) as socket:
        wait_until(lambda: not socket.getsockopt(zmq.EVENTS) & zmq.POLLIN, what="the answers to be dropped")
