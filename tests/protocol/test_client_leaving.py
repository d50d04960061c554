"""Every way of leaving a stream sends exactly one CANCEL, and the client delivers no event afterwards."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from modelctl import Client
from protocol.client.sync_client import Stream
from protocol.errors import ConnectionLost
from protocol.messages import Cancel, Generate
from tests.protocol.scripted_peer import REPOSITORY, HoldingScript, ScriptedPeer, answers, pump_until


class Boom(Exception):
    pass


def leave_by_break(client: Client) -> object:
    for _ in client.generate("letters", "x"):
        break
    return None


def leave_by_break_while_holding_the_stream(client: Client) -> object:
    stream = client.generate("letters", "x")
    for _ in stream:
        break
    return stream


def leave_by_exception(client: Client) -> object:
    stream = client.generate("letters", "x")
    try:
        for _ in stream:
            raise Boom
    except Boom:
        pass
    return stream


def leave_by_close(client: Client) -> object:
    stream = client.generate("letters", "x")
    next(stream)
    stream.close()
    stream.close()
    return stream


def leave_by_with(client: Client) -> object:
    with client.generate("letters", "x") as stream:
        next(stream)
    return stream


def leave_by_dropping(client: Client) -> object:
    stream = client.generate("letters", "x")
    next(stream)
    del stream
    return None


def leave_by_dropping_unread(client: Client) -> object:
    client.generate("letters", "x")
    return None


def leave_by_dropping_a_cycle(client: Client) -> object:
    stream = client.generate("letters", "x")
    next(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()
    return None


def leave_by_cancel_then_break(client: Client) -> object:
    for stream in [client.generate("letters", "x")]:
        for _ in stream:
            stream.cancel()
            break
    return None


def leave_by_timeout(client: Client) -> object:
    stream = client.generate("letters", "x", timeout=0.05)
    next(stream)
    with pytest.raises(TimeoutError, match=r"within 0.05 s"):
        next(stream)
    return stream


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_break_while_holding_the_stream,
        leave_by_exception,
        leave_by_close,
        leave_by_with,
        leave_by_dropping,
        leave_by_dropping_unread,
        leave_by_dropping_a_cycle,
        leave_by_cancel_then_break,
        leave_by_timeout,
    ],
    ids=lambda leave: leave.__name__.removeprefix("leave_by_"),
)
def test_leaving_cancels_once(runtime_dir: Path, leave: Callable[[Client], object]) -> None:
    hold = HoldingScript()
    answer = answers(["fine"])

    def script(peer: ScriptedPeer, client: bytes, message: object) -> None:
        (answer if getattr(message, "request", 0) == 2 else hold)(peer, client, message)  # type: ignore[arg-type]

    with ScriptedPeer(runtime_dir / "front", script) as peer, Client(peer.endpoint) as client:
        kept = leave(client)
        # a second request on the same connection comes after the CANCEL, and its answer after the late events
        assert client.complete("letters", "y").text == "fine"
        assert peer.of(Cancel) == [Cancel(1)]
        session = client._connection.session
        pump_until(client, lambda: not session._streams, "the table of requests to be empty")
        assert session.ignored == 0
        if isinstance(kept, Stream):
            assert kept.finish_reason == "cancelled"
            assert list(kept) == []
            kept.cancel()
            kept.close()
        del kept
    assert peer.of(Cancel) == [Cancel(1)]


def test_cancel_lets_the_reader_see_the_end(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", HoldingScript()) as peer, Client(peer.endpoint) as client:
        stream = client.generate("letters", "x")
        texts = []
        for delta in stream:
            texts.append(delta.text)
            stream.cancel()
        assert texts == ["0 ", "late "]
        assert stream.finish_reason == "cancelled"
        stream.cancel()
        assert peer.of(Cancel) == [Cancel(1)]


def test_leaving_at_the_end_cancels_nothing(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", answers(["a", "b"])) as peer, Client(peer.endpoint) as client:
        for delta in (stream := client.generate("letters", "x")):
            if delta.text == "b":
                pump_until(client, lambda: stream._state.ended, "the terminal event")
                break
        client.complete("letters", "y")
    assert peer.of(Cancel) == []
    assert stream.finish_reason == "stop", "all of it was read"


def test_the_reason_is_known_as_soon_as_the_loop_is_left(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", HoldingScript()) as peer, Client(peer.endpoint) as client:
        for _ in (stream := client.generate("letters", "x")):
            assert stream.finish_reason is None
            break
        assert stream.finish_reason == "cancelled"


def test_leaving_before_the_end_is_cancelled_even_if_the_end_had_come(runtime_dir: Path) -> None:
    """The client has not read the whole answer, so "stop" would be misleading."""
    with ScriptedPeer(runtime_dir / "front", answers(["a", "b"])) as peer, Client(peer.endpoint) as client:
        for _ in (stream := client.generate("letters", "x")):
            pump_until(client, lambda: stream._state.ended, "the terminal event")
            break
        assert (stream.text, stream.finish_reason) == ("a", "cancelled")


def test_a_stream_dropped_in_another_thread_is_cancelled_by_the_next_use(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", HoldingScript()) as peer, Client(peer.endpoint) as client:
        streams = [client.generate("letters", "x")]
        next(streams[0])
        other = threading.Thread(target=streams.clear)
        other.start()
        other.join()
        client._connection.pump()
        assert peer.wait_for(Cancel) == [Cancel(1)]


def test_a_finalizer_in_the_midst_of_anything_disturbs_nothing(runtime_dir: Path) -> None:
    """The collector may drop a stream between any two steps of receiving and sending. Then its CANCEL has to wait."""
    victims: list[Stream] = []

    class DroppingSocket:
        def __init__(self, socket: "zmq.Socket[bytes]") -> None:
            self._socket = socket

        def __getattr__(self, name: str) -> Any:
            return getattr(self._socket, name)

        def recv(self, flags: int) -> bytes:
            frame = self._socket.recv(flags)
            del victims[-1:]
            return frame

        def send(self, frame: bytes, flags: int) -> None:
            self._socket.send(frame, flags)
            del victims[-1:]

    with ScriptedPeer(runtime_dir / "front", HoldingScript(first=5)) as peer, Client(peer.endpoint) as client:
        connection, line = client._connection, client._connection.transport
        assert line is not None
        victims += [client.generate("letters", str(i)) for i in range(20)]
        real, line.socket = line.socket, DroppingSocket(line.socket)  # type: ignore[assignment]
        extra = [client.generate("letters", str(i)) for i in range(20)]
        pump_until(client, lambda: not victims, "all to be dropped")
        peer.wait_for(Cancel, 20)
        line.socket = real
        for stream in extra:
            stream.cancel()
            assert stream.complete().finish_reason == "cancelled"
        assert sorted(g.request for g in peer.of(Generate)) == list(range(1, 41))
        assert sorted(c.request for c in peer.of(Cancel)) == list(range(1, 41))
        assert not connection.session._streams


def test_closing_the_client_ends_its_streams_once(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", HoldingScript()) as peer:
        client = Client(peer.endpoint)
        stream = client.generate("letters", "x")
        next(stream)
        client.close()
        client.close()
        with pytest.raises(ConnectionLost, match="this client was closed"):
            next(stream)
        assert list(stream) == []
        with pytest.raises(RuntimeError, match="was closed"):
            client.generate("letters", "x")


def run_script(source: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", source, *arguments],
        capture_output=True, text=True, timeout=60, cwd=REPOSITORY,
    )  # fmt: skip


@pytest.fixture
def holding(runtime_dir: Path) -> Iterator[ScriptedPeer]:
    with ScriptedPeer(runtime_dir / "front", HoldingScript()) as peer:
        yield peer


def test_a_program_may_end_with_a_stream_open(holding: ScriptedPeer) -> None:
    source = """
import sys
from modelctl import Client
with Client(sys.argv[1]) as client:
    stream = client.generate("letters", "x")
    print(next(stream).text)
other = Client(sys.argv[1])
kept = other.generate("letters", "x")
next(kept)
"""
    ended = run_script(source, holding.endpoint)
    assert (ended.returncode, ended.stdout) == (0, "0 \n"), ended.stderr
    assert ended.stderr == ""
    assert len(holding.of(Generate)) == 2


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_what_is_dropped_in_a_cycle_does_not_stop_the_garbage_collector(holding: ScriptedPeer, kind: str) -> None:
    """The collector may finalize the context before the sockets, and the sockets before a stream."""
    source = """
import asyncio, gc, sys
import modelctl

def drop():
    with_cycle = []
    for _ in range(10):
        client = modelctl.Client(sys.argv[1])
        streams = [client.generate("letters", "x") for _ in range(3)]
        next(streams[0])
        with_cycle.append((client, streams))
    with_cycle.append(with_cycle)

async def drop_in_a_loop():
    with_cycle = []
    for _ in range(10):
        client = await modelctl.AsyncClient(sys.argv[1]).connect()
        streams = [client.generate("letters", "x") for _ in range(3)]
        await anext(streams[0])
        with_cycle.append((client, streams))
    with_cycle.append(with_cycle)

if sys.argv[2] == "Client":
    drop()
else:
    asyncio.run(drop_in_a_loop())
print(gc.collect() > 0)
"""
    ended = run_script(source, holding.endpoint, kind)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")
    assert len(holding.of(Generate)) == 30


def test_a_fork_is_refused(holding: ScriptedPeer) -> None:
    source = """
import os, sys
from modelctl import Client
with Client(sys.argv[1]) as client:
    stream = client.generate("letters", "x")
    next(stream)
    child = os.fork()
    if child == 0:
        for use in (lambda: client.generate("letters", "y"), lambda: next(stream)):
            try:
                use()
            except RuntimeError as e:
                assert f"process {os.getppid()}" in str(e), e
            else:
                os._exit(3)
        del stream
        client.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stream.cancel()
    print([delta.text for delta in stream], stream.finish_reason)
"""
    ended = run_script(source, holding.endpoint)
    assert (ended.returncode, ended.stdout) == (0, "['late '] cancelled\n"), ended.stderr
    assert len(holding.of(Cancel)) == 1
