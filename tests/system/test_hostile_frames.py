"""Bytes that are no valid message cause an error or a counted disconnect, and everything else goes on."""

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator

import msgpack
import psutil
import pytest
import zmq

from protocol import limits
from protocol.codec import encode
from protocol.messages import Call, Generate, Kind
from tests.deterministic_engine import answer
from tests.raw_client import RawClient
from tests.serving import Serving, engine, wait_until

SEED = int(os.environ.get("TEST_SEED", random.randrange(2**32)))
MIB = 1 << 20
TOKENS = 500
MAX_GROWTH = 48 * MIB
"""Bytes by which the supervisor may grow in a test. One 16 MiB frame may be coming in, and malloc keeps some memory."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    with Serving({"a": engine(step_s=0.001, context=100_000)}) as serving:
        yield serving


@pytest.fixture
def serving(shared: Serving) -> Iterator[Serving]:
    """Run a well-behaved stream during each test. It must not be affected, and the supervisor must not grow."""
    print(f"TEST_SEED={SEED}")
    before = psutil.Process(shared.pid).memory_info().rss
    parts: list[str] = []

    def behave() -> None:
        with shared.client() as client:
            parts.append(client.complete("a", "well-behaved", max_tokens=TOKENS).text)

    neighbour = threading.Thread(target=behave)
    neighbour.start()
    yield shared
    neighbour.join(30)
    assert parts == [answer("well-behaved", TOKENS)]
    with shared.client() as client:
        assert client.complete("a", "afterwards", max_tokens=5).text == answer("afterwards", 5)
    grown = psutil.Process(shared.pid).memory_info().rss - before
    assert grown < MAX_GROWTH, f"the supervisor grew by {grown / MIB:.0f} MiB"
    assert shared.status("a")["restarts"] == 0


def bad_frames(serving: Serving) -> int:
    return serving.counters()["bad_frames"]


def test_two_megabytes_of_garbage(serving: Serving) -> None:
    chance = random.Random(SEED)
    before = bad_frames(serving)
    with RawClient(serving.runtime_dir) as client:
        sizes = [1, 2, 3, 100, 4096, MIB // 2, MIB, MIB // 2]
        for size in sizes:
            client.send(b"\xff" + chance.randbytes(size - 1))
        client.barrier()
        assert len(client.errors) == len(sizes)
        assert bad_frames(serving) == before + len(sizes)


def test_many_small_random_frames(serving: Serving) -> None:
    """Some frames begin like a valid message: the version, a kind, and then random bytes."""
    chance = random.Random(SEED)
    with RawClient(serving.runtime_dir) as client:
        for _ in range(3_000):
            head = bytes([0x90 + chance.randrange(16), 1, chance.randrange(40)]) if chance.random() < 0.8 else b""
            client.send(head + chance.randbytes(chance.randrange(40)))
        client.barrier(10)


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


MALFORMED = [
    nested(500),
    nested(100_000),
    b"\x95\x01\x02\x01\xa1a" + nested(1000),
    b"\x95\x01\x02\x01\xa1a\x80" + msgpack.packb(nested(100_000)),
    b"\x95\x01\x02\x01\xa1a\xdd\xff\xff\xff\xff",
    b"\x95\x01\x02\x01\xa1a\xdf\xff\xff\xff\xff",
    b"\x95\x01\x02\x01\xdb\xff\xff\xff\xff",
    msgpack.packb([1, 2, 1, "a", {}, b"x" * (5 * MIB)]),
    msgpack.packb([1, 2, 1, "a" * 2000, {}, b""]),
    msgpack.packb([1, 2, -1, "a", {}, b""]),
    msgpack.packb([1, 2, 1, "a", {}, "text"]),
    msgpack.packb([1, 2, 1, "a", {}]),
    msgpack.packb([1, 2, 1, "a", {}, b"", b""]),
    msgpack.packb([2, 2, 1, "a", {}, b""]),
    msgpack.packb([0, 1, b""]),
    msgpack.packb([1, 99]),
    msgpack.packb([1, 32, 1, 1, b""]),
    msgpack.packb([1, 18, 1, 1, [], b""]),
    msgpack.packb({1: 2}),
    b"",
    b"\x00",
]


def test_malformed_frames_are_answered_and_counted(serving: Serving) -> None:
    for frame in MALFORMED:
        what = f"{frame[:8].hex()}..., {len(frame)} bytes"
        before = bad_frames(serving)
        with RawClient(serving.runtime_dir) as client:
            client.send(frame)
            client.barrier()
            assert len(client.errors) == 1, what
            assert bad_frames(serving) == before + 1, what
            client.generate(7, "a", "the same connection", max_tokens=2)
            client.read_until_ended(7)
            assert client.heard[7].text == answer("the same connection", 2), what


def test_a_request_is_answered_however_many_bad_frames_came_before_it(serving: Serving) -> None:
    """One request has a bad frame that is refused, the other a valid frame."""
    too_large = encode(Generate(7, "a", {}, bytes(limits.MAX_FRAME[Kind.GENERATE])))
    with RawClient(serving.runtime_dir) as client:
        for _ in range(100):
            client.send(b"\xc1")
        client.send(too_large)
        client.generate(8, "a", "answered all the same", max_tokens=2)
        client.read_until_ended(8)
        assert [error["name"] for request, error in client.errors if request == 7] == ["too_large"]
        assert client.heard[8].text == answer("answered all the same", 2)


def test_bodies_that_are_bombs_are_answered_where_they_are_opened(serving: Serving) -> None:
    for bomb in (nested(100_000), msgpack.packb({"x": [{}] * 60_000}), msgpack.packb({"x": [[]] * 1_000_000})):
        with RawClient(serving.runtime_dir) as client:
            client.send(encode(Generate(1, "a", {}, bomb)))
            client.send(encode(Call(2, "status", bomb[: 60 << 10])))
            client.read_until_ended(1)
            assert client.heard[1].ends == ["invalid_request"]
            assert "error" in client.replies[0]


def test_messages_of_several_frames(serving: Serving) -> None:
    before = bad_frames(serving)
    with RawClient(serving.runtime_dir) as client:
        for parts in (2, 3, 500):
            client.socket.send_multipart([b"\x93\x01\x06\x05"] * parts)
        client.barrier()
        assert bad_frames(serving) == before + 3


def test_a_frame_beyond_the_sockets_cap_ends_its_connection_only(serving: Serving) -> None:
    before = serving.counters()
    with RawClient(serving.runtime_dir) as client:
        client.barrier()
        monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            client.send(bytes(20 * MIB))
            assert monitor.poll(5000), "the connection was not ended"
        finally:
            client.socket.disable_monitor()
            monitor.close(linger=0)
        wait_until(lambda: serving.counters()["connections_closed"] > before["connections_closed"])
        assert serving.counters()["bad_frames"] == before["bad_frames"]


def raw_connections(serving: Serving, payload: Callable[[random.Random], bytes]) -> None:
    chance = random.Random(SEED)
    for name in ("front", "admin"):
        for _ in range(100):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(serving.runtime_dir / name))
                peer.settimeout(1)
                try:
                    peer.sendall(payload(chance))
                except OSError:
                    pass  # the supervisor may close the connection


def test_peers_that_do_not_speak_zeromq(serving: Serving) -> None:
    raw_connections(serving, lambda chance: chance.randbytes(chance.randrange(2000)))


def test_peers_that_begin_a_handshake_and_go_on_with_garbage(serving: Serving) -> None:
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)
    raw_connections(serving, lambda chance: greeting[: chance.randrange(65)] + chance.randbytes(chance.randrange(500)))
    wait_until(lambda: serving.counters()["handshakes_failed"] > 0)


def test_only_workers_may_connect_to_the_workers_socket(serving: Serving) -> None:
    """The kernel says which process a connection comes from, and the supervisor knows which ones it has started."""
    before = serving.counters()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    stranger.connect(f"ipc://{serving.runtime_dir}/back")
    try:
        for frame in (b"", b"\x91\x01\x23", msgpack.packb([1, 18, 1, 1, [[1, 0, 2, 0, 1]], b"\x80"]), os.urandom(1000)):
            stranger.send(frame)
        stranger.send_multipart([b"a", b"b", b"c"])
        assert monitor.poll(60_000), "the stranger was not refused"
        assert serving.counters()["connections_denied"] == before["connections_denied"] + 1
        assert serving.counters()["worker_frames_dropped"] == before["worker_frames_dropped"]
    finally:
        stranger.disable_monitor()
        monitor.close(linger=0)
        stranger.close()
        context.term()
