"""The client reports each fault of the connection at once, once per request, with a remedy."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelctl import Client
from protocol.client import transport
from protocol.codec import encode, pack_body, pack_error
from protocol.errors import ConnectionLost, ErrorCode, WireError
from protocol.messages import Call, Cancel, Error, Events, Generate, Hello, Message, Reply, Welcome
from tests.protocol.scripted_peer import (
    HoldingScript,
    ScriptedPeer,
    accepted,
    answers,
    delta,
    events,
    finished,
    peer_process,
    pump_until,
    wait_until,
)


def test_no_supervisor(runtime_dir: Path) -> None:
    start = time.monotonic()
    for _ in range(10):
        with pytest.raises(ConnectionLost, match=r"no supervisor is running here .*front.*serve --runtime-dir /.+`"):
            Client(runtime_dir=runtime_dir)
    # A connection must not linger for messages that can never be sent: that would take five seconds each time.
    assert time.monotonic() - start < 40


def test_nobody_listens_on_the_socket_left_behind(runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(runtime_dir / "front"))
    with pytest.raises(ConnectionLost, match="no supervisor is running here"):
        Client(runtime_dir=runtime_dir, timeout=3600)  # a client that waited would outlast the test


def test_a_listener_that_never_greets(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", welcome=False) as peer:
        with pytest.raises(ConnectionLost, match=r"did not answer within 0.2 s"):
            Client(peer.endpoint, timeout=0.2)
        peer.wait_for(Hello)


def test_a_listener_that_is_no_zeromq_socket(runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(runtime_dir / "front"))
        server.listen()
        with pytest.raises(ConnectionLost, match=r"did not answer within 0.2 s"):
            Client(runtime_dir=runtime_dir, timeout=0.2)


def test_a_supervisor_that_refuses_in_its_greeting(runtime_dir: Path) -> None:
    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        peer.send(client, Error(0, pack_error(WireError(ErrorCode.BAD_VERSION, "this side speaks 2"))))

    with (
        ScriptedPeer(runtime_dir / "front", script, welcome=False) as peer,
        pytest.raises(WireError, match="speaks 2") as raised,
    ):
        Client(peer.endpoint)
    assert raised.value.code is ErrorCode.BAD_VERSION


def test_a_killed_supervisor_ends_every_request_once_and_at_once(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client must notice the end of the connection itself, since its heartbeats are an hour apart here."""
    monkeypatch.setattr(transport, "IPC_HEARTBEAT_MS", (3_600_000, 3_600_000, 3_600_000))
    with peer_process(runtime_dir / "front") as process, Client(runtime_dir=runtime_dir) as client:
        streams = [client.generate("letters", str(i)) for i in range(3)]
        for stream in streams:
            assert [next(stream).text for _ in range(3)] == ["0 ", "1 ", "2 "]
        process.kill()
        for stream in streams:
            with pytest.raises(ConnectionLost, match=r"connection to the supervisor ended .*serve --runtime-dir /.+`"):
                next(stream)
            assert list(stream) == []
        for attempt in (lambda: client.generate("letters", "x"), lambda: client.call("status")):
            with pytest.raises(ConnectionLost, match="no supervisor is running here"):
                attempt()


def test_what_came_before_the_end_is_delivered_before_it_is_raised(runtime_dir: Path) -> None:
    with peer_process(runtime_dir / "front") as process, Client(runtime_dir=runtime_dir) as client:
        stream = client.generate("letters", "x")
        pump_until(client, lambda: len(stream._state.deltas) == 3, "three deltas")
        process.kill()
        process.wait()
        assert [next(stream).text for _ in range(3)] == ["0 ", "1 ", "2 "]
        with pytest.raises(ConnectionLost):
            next(stream)


def test_an_answer_that_is_complete_is_no_loss(runtime_dir: Path) -> None:
    """libzmq reports the end of the connection before the last frames are read. The client reads those frames first."""
    peer = ScriptedPeer(runtime_dir / "front", answers(["a", "b", "c"]))
    with peer, Client(peer.endpoint) as client:
        stream = client.generate("letters", "x")
        peer.wait_for(Generate)
        peer.stop()
        transport = client._connection.transport
        assert transport is not None
        while transport.monitor.poll(1000) == 0:
            pass
        assert stream.complete().text == "abc"
        with pytest.raises(ConnectionLost):
            client.generate("letters", "y")


def test_a_supervisor_that_comes_back_is_not_this_sessions(runtime_dir: Path) -> None:
    """Messages for the first supervisor must not reach the second, so a new connection has a new socket and session."""
    with ScriptedPeer(runtime_dir / "front", HoldingScript()) as first:
        client = Client(first.endpoint)
        stream = client.generate("letters", "x")
        assert next(stream).text == "0 "
    with ScriptedPeer(runtime_dir / "front", answers(["fine"])) as second, client:
        client._connection.session.cancel(stream._state)
        with pytest.raises(ConnectionLost):
            next(stream)
        assert client.complete("letters", "y").text == "fine"
        assert list(stream) == []
        assert [type(message) for message in second.received] == [Hello, Generate]


def test_a_call_waits_no_longer_than_the_connection(runtime_dir: Path) -> None:
    with peer_process(runtime_dir / "front") as process, Client(runtime_dir=runtime_dir) as client:
        process.kill()
        with pytest.raises(ConnectionLost):
            client.call("never answered")


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ([events(delta(1, 0, "a"), delta(1, 2, "c"), finished(1, 3))], "event 2 came where 1 was due"),
        ([events(delta(1, 0, "a")), events(delta(1, 0, "a"))], "event 0 came where 1 was due"),
        ([events(delta(1, 0, "a"), finished(1, 1), delta(1, 2, "b"))], "event 2 followed the terminal event"),
        ([events(delta(1, 0, "a"), (1, 1, 6, (), {"finish_reason": "stop"}))], "flagged both FINISHED and ERROR"),
        ([events(delta(1, 0, "a"), (1, 1, 2, (), {}))], "finish_reason"),
        ([events(delta(1, 0, "a"), (1, 1, 4, (), {"error": 5}))], "error is not a map"),
        ([events(delta(1, 0, "a"), (1, 1, 0, (), {"text": 5}))], "text is not a string"),
        ([Events(1, 1, [*events(delta(1, 0, "a")).index[:0], (1, 0, 0, 0, 1)], b"\xc1")], "cannot be read"),  # type: ignore[list-item]
    ],
    ids=["gap", "repeated", "after terminal", "two ends", "no reason", "bad error", "bad text", "bad map"],
)
def test_a_stream_that_breaks_the_protocol_ends_alone(runtime_dir: Path, frames: list[Events], what: str) -> None:
    """The broken stream ends with INTERNAL, its later events are ignored, and the other stream goes on."""

    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Generate) and message.request == 2:
            for frame in frames:
                peer.send(client, frame)
            peer.send(client, events(delta(1, 9, "ignored"), delta(2, 0, "fine"), finished(2, 1)))

    with ScriptedPeer(runtime_dir / "front", script) as peer, Client(peer.endpoint) as client:
        broken, fine = client.generate("letters", "1"), client.generate("letters", "2")
        assert [d.text for d in fine] == ["fine"]
        with pytest.raises(WireError, match=what) as raised:
            list(broken)
        assert raised.value.code is ErrorCode.INTERNAL
        assert list(broken) == []
        assert broken.finish_reason is None
        assert client._connection.session.ignored >= 1
        if "followed" not in what:
            assert peer.wait_for(Cancel) == [Cancel(1)]


def test_a_frame_that_cannot_be_read_ends_the_connection(runtime_dir: Path) -> None:
    """The frame may have held the terminal event of any request, and no request may wait for ever."""
    with ScriptedPeer(runtime_dir / "front", HoldingScript()) as peer, Client(peer.endpoint) as client:
        streams = [client.generate("letters", str(i)) for i in range(2)]
        assert [next(s).text for s in streams] == ["0 ", "0 "]
        peer.inject(peer.clients[0], b"\x93\x01\x12garbage")
        for stream in streams:
            with pytest.raises(ConnectionLost, match="cannot read"):
                next(stream)


def test_a_kind_from_the_future_is_ignored(runtime_dir: Path) -> None:
    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Call):
            peer.send(client, b"\x92\x01\x7f")
            peer.send(client, encode(Reply(message.call, pack_body({"result": {"ok": True}}))))

    with ScriptedPeer(runtime_dir / "front", script) as peer, Client(peer.endpoint) as client:
        assert client.call("status") == {"ok": True}
        assert client._connection.session.ignored == 1


def test_a_request_refused_for_the_connection_as_a_whole_ends_all(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", HoldingScript()) as peer, Client(peer.endpoint) as client:
        stream = client.generate("letters", "x")
        next(stream)
        peer.inject(peer.clients[0], Error(0, pack_error(WireError(ErrorCode.BAD_FRAME, "not a frame"))))
        with pytest.raises(WireError, match="not a frame") as raised:
            next(stream)
        assert raised.value.code is ErrorCode.BAD_FRAME


def test_waiting_long_is_no_error_while_the_connection_lives(runtime_dir: Path) -> None:
    """After ACCEPTED nothing comes for several times the time-out of other requests. Then the answer comes."""
    with ScriptedPeer(runtime_dir / "front", HoldingScript(first=0)) as peer, Client(peer.endpoint) as client:
        patient = client.generate("letters", "x")
        for _ in range(3):
            with pytest.raises(TimeoutError):
                client.complete("letters", "y", timeout=0.05)
        peer.inject(peer.clients[0], events(delta(1, 0, "at last"), finished(1, 1)))
        assert [d.text for d in patient] == ["at last"]


def test_accepted_counts_as_a_sign_of_life(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front") as peer, Client(peer.endpoint) as client:
        stream = client.generate("letters", "x", timeout=5)
        peer.wait_for(Generate)
        peer.inject(peer.clients[0], accepted(1))
        peer.inject(peer.clients[0], events(delta(1, 0, "a"), finished(1, 1)))
        assert [d.text for d in stream] == ["a"]


def test_the_window_of_the_greeting_holds(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", welcome=False) as peer:

        def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
            if isinstance(message, Hello):
                peer.send(client, Welcome(pack_body({"window": "nonsense"})))

        peer._script = script
        with Client(peer.endpoint) as client:
            assert client._connection.session._window == 256


@pytest.fixture
def threads() -> Iterator[None]:
    """Check that a closed client leaves nothing: no descriptor, and no thread of libzmq."""

    def count(what: str) -> int:
        return len(os.listdir(f"/proc/self/{what}"))

    before = count("task"), count("fd")
    yield
    wait_until(lambda: (count("task"), count("fd")) <= before, "threads and descriptors to be given back")


@pytest.mark.usefixtures("threads")
def test_nothing_is_left_behind(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", HoldingScript()) as peer:
        for _ in range(5):
            with Client(peer.endpoint) as client:
                next(client.generate("letters", "x"))
        for _ in range(5):
            with pytest.raises(ConnectionLost):
                Client(f"ipc://{runtime_dir}/none")
