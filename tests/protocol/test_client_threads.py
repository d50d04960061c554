"""Several threads can share one client: each gets its own messages, and none waits for ever."""

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from modelctl import Client
from protocol.client import sync_client
from protocol.client.sync_client import SharedConnection, Stream
from protocol.codec import pack_body, unpack_body
from protocol.errors import ConnectionLost
from protocol.messages import Call, Cancel, Generate, Message, Reply
from tests.protocol.scripted_peer import (
    DEADLINE_S,
    HoldingScript,
    ScriptedPeer,
    accepted,
    answers,
    delta,
    events,
    finished,
    peer_process,
    until_lost,
    wait_until,
)


class Threads:
    """A set of threads whose exceptions are raised in the test."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, run: Callable[..., object], *arguments: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                run(*arguments)
            except BaseException as e:
                self.errors.append(e)

        thread = threading.Thread(target=guarded, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def join(self, within: float = 2 * DEADLINE_S) -> None:
        deadline = time.monotonic() + within
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a thread waits for ever"
        if self.errors:
            raise self.errors[0]


@contextmanager
def patient(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Make a client whose threads look for messages only when they are woken, and not after a while by themselves."""
    monkeypatch.setattr(sync_client, "_LONGEST_WAIT_S", 300.0)
    with Client(endpoint) as client:
        client._connection._liveness.step = 300.0
        client._connection._look_at = time.monotonic() + 300
        yield client


def waits(stream: Stream) -> bool:
    return stream.request_id in stream._connection._waiters


def echo(peer: ScriptedPeer, client: bytes, message: Message) -> None:
    if isinstance(message, Generate):
        words = unpack_body(message.body)["prompt"].split()
        peer.send(client, accepted(message.request))
        *most, last = words
        for seq, word in enumerate(most):
            peer.send(client, events(delta(message.request, seq, word + " ", (seq,))))
        peer.send(client, events(finished(message.request, len(most), text=last)))
    elif isinstance(message, Call):
        peer.send(client, Reply(message.call, pack_body({"result": unpack_body(message.body)})))


def test_each_of_many_threads_gets_its_own(runtime_dir: Path) -> None:
    """Threads use streams, choices, calls and abandoned streams in random order over one connection."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")

    def work(client: Client, number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        for turn in range(40):
            prompt = " ".join(f"{number}:{turn}:{i}" for i in range(rng.randrange(1, 30)))
            match rng.randrange(4):
                case 0:
                    assert client.call("status", number=number, turn=turn) == {"number": number, "turn": turn}
                case 1:
                    for each in client.choices("letters", prompt, n=3).complete():
                        assert each.text.strip() == prompt
                case 2:
                    for begin in client.generate("letters", prompt):
                        assert begin.text.startswith(f"{number}:{turn}:")
                        break
                case _:
                    assert client.complete("letters", prompt).text.strip() == prompt

    threads = Threads()
    with ScriptedPeer(runtime_dir / "front", echo, window=8) as peer, Client(peer.endpoint) as client:
        for number in range(16):
            threads.start(work, client, number)
        threads.join(60)
        wait_until(lambda: client.status() == {} and not client._connection.session._streams, "all to be over")
        assert client._connection.session.ignored == 0
        assert not client._connection._waiters
        assert len(peer.clients) == 1


def test_whoever_waited_for_all_leaves_it_to_another(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads()
    got: list[str] = []
    with (
        ScriptedPeer(runtime_dir / "front", HoldingScript(first=0)) as peer,
        patient(peer.endpoint, monkeypatch) as client,
    ):
        streams = [client.generate("letters", str(i)) for i in range(4)]
        peer.wait_for(Generate, 4)
        for i, stream in enumerate(streams):
            threads.start(lambda stream=stream: got.append(next(stream).text))
            wait_until(lambda i=i: waits(streams[i]), "the thread to wait")  # type: ignore[misc]
        for i in (0, 2, 1, 3):  # the first thread waits for all
            peer.inject(peer.clients[0], events(delta(i + 1, 0, str(i))))
            wait_until(lambda i=i: str(i) in got, f"the delta of {i}")  # type: ignore[misc]
        threads.join()


def test_any_thread_may_cancel(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads()
    reasons: list[str] = []
    with (
        ScriptedPeer(runtime_dir / "front", HoldingScript(first=0)) as peer,
        patient(peer.endpoint, monkeypatch) as client,
    ):
        streams = [client.generate("letters", str(i)) for i in range(3)]
        for stream in streams:
            threads.start(lambda stream=stream: reasons.append(stream.complete().finish_reason))
            wait_until(lambda stream=stream: waits(stream), "the thread to wait")  # type: ignore[misc]
        for stream in streams:
            stream.cancel()
        threads.join()
        assert reasons == ["cancelled"] * 3
        assert len(peer.of(Cancel)) == 3


def test_closing_the_client_wakes_all(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads()
    with (
        ScriptedPeer(runtime_dir / "front", HoldingScript(first=0)) as peer,
        patient(peer.endpoint, monkeypatch) as client,
    ):
        streams = [client.generate("letters", str(i)) for i in range(4)]
        for stream in streams:
            threads.start(stream.complete)
            wait_until(lambda stream=stream: waits(stream), "the thread to wait")  # type: ignore[misc]
        client.close()
        with pytest.raises(ConnectionLost):
            threads.join()
        assert [str(error) for error in threads.errors] == ["connection_lost: this client was closed"] * 4


def test_the_end_of_the_connection_wakes_all(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads()
    with (
        peer_process(runtime_dir / "front") as process,
        patient(f"ipc://{runtime_dir}/front", monkeypatch) as client,
    ):
        streams = [client.generate("letters", str(i)) for i in range(8)]
        for stream in streams:
            threads.start(stream.complete)
            wait_until(lambda stream=stream: waits(stream), "the thread to wait")  # type: ignore[misc]
        process.kill()
        with pytest.raises(ConnectionLost):
            threads.join()
        assert len(threads.errors) == 8
        assert all(isinstance(error, ConnectionLost) for error in threads.errors)
        assert len({id(error) for error in threads.errors}) == 8, "one object each: a traceback is part of it"


def test_a_stream_dropped_by_one_thread_while_another_waits(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads()
    with (
        ScriptedPeer(runtime_dir / "front", HoldingScript(first=0)) as peer,
        patient(peer.endpoint, monkeypatch) as client,
    ):
        waiting, dropped = client.generate("letters", "1"), [client.generate("letters", "2")]
        threads.start(waiting.complete)
        wait_until(lambda: client._connection._polling is not None, "the thread to wait")
        threads.start(dropped.clear)
        assert peer.wait_for(Cancel) == [Cancel(2)]
        waiting.cancel()
        threads.join()


def test_what_is_left_while_the_lock_is_held_is_cancelled_when_it_is_free(runtime_dir: Path) -> None:
    """Another thread may leave a stream, or a finalizer or signal handler that interrupts this thread."""
    with ScriptedPeer(runtime_dir / "front", HoldingScript(first=0)) as peer, Client(peer.endpoint) as client:
        dropped, cancelled = [client.generate("letters", "1")], client.generate("letters", "2")
        other = [client.generate("letters", "3")]
        with client._connection.lock:
            dropped.clear()
            cancelled.cancel()
            threads = Threads()
            threads.start(other.clear)
            threads.join()
            assert len(client._connection._noted) == 3
        next_one = client.generate("letters", "4")
        assert sorted(cancel.request for cancel in peer.wait_for(Cancel, 3)) == [1, 2, 3]
        assert cancelled.complete().finish_reason == "cancelled"
        next_one.close()


def test_a_signal_handler_may_cancel(runtime_dir: Path) -> None:
    """A hundred signals come at any point, while the thread reads a stream that only a cancel ends."""

    def endless(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Generate):
            unsent[message.request] = 0
        elif isinstance(message, Cancel):
            peer.send(client, events(finished(message.request, unsent.pop(message.request), "cancelled")))
        for request in unsent:
            for _ in range(8):
                peer.send(client, events(delta(request, unsent[request], "x")))
                unsent[request] += 1

    unsent: dict[int, int] = {}
    current: list[Stream] = []
    before = signal.signal(signal.SIGALRM, lambda *_: current[-1].cancel())
    try:
        with ScriptedPeer(runtime_dir / "front", endless, window=8) as peer, Client(peer.endpoint) as client:
            for i in range(100):
                current.append(client.generate("letters", str(i)))
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.003))
                assert current[-1].complete().finish_reason == "cancelled"
            assert len(peer.of(Cancel)) == 100
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_signal_handler_that_would_wait_for_itself_is_refused(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", HoldingScript(first=0)) as peer, Client(peer.endpoint) as client:
        stream = client.generate("letters", "1")
        with client._connection.lock:
            for attempt in (lambda: client.generate("letters", "2"), lambda: next(stream), stream.close, client.close):
                with pytest.raises(RuntimeError, match="interrupted its own work"):
                    attempt()
        stream.cancel()
        assert stream.complete().finish_reason == "cancelled"


def test_one_thread_at_a_time_reads_a_stream(runtime_dir: Path) -> None:
    threads = Threads()
    with ScriptedPeer(runtime_dir / "front", HoldingScript(first=1)) as peer, Client(peer.endpoint) as client:
        stream = client.generate("letters", "x")
        next(stream)  # without this, ACCEPTED would wake the thread for a moment, and this thread could take its place
        threads.start(stream.complete)
        wait_until(lambda: waits(stream), "the thread to wait")
        with pytest.raises(RuntimeError, match="one thread at a time"):
            next(stream)
        stream.cancel()
        threads.join()


def test_threads_connect_anew_once_for_all(runtime_dir: Path) -> None:
    threads = Threads()
    texts: list[str] = []
    with ScriptedPeer(runtime_dir / "front", answers(["first"])) as first:
        client = Client(first.endpoint)
        assert client.complete("letters", "x").text == "first"
    until_lost(client)
    with ScriptedPeer(runtime_dir / "front", answers(["second"])) as second, client:
        for _ in range(8):
            threads.start(lambda: texts.append(client.complete("letters", "x").text))
        threads.join()
        assert texts == ["second"] * 8
        assert len(second.clients) == 1


def test_threads_share_one_attempt_to_connect_where_nobody_listens(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that find the connection lost before the attempt fails share its result, and none of them tries again."""
    threads = Threads()
    with ScriptedPeer(runtime_dir / "front") as peer:
        client = Client(peer.endpoint, connect_timeout=0.5)
    until_lost(client)
    is_lost, connect = client._connection.is_lost, client._new_connection
    asked: list[None] = []
    attempts: list[SharedConnection] = []

    def counted_is_lost() -> bool:
        asked.append(None)
        return is_lost()

    def counted_connect(**how: Any) -> SharedConnection:
        wait_until(lambda: len(asked) == 8, "all threads to find the connection lost")
        attempts.append(connect(**how))
        return attempts[-1]

    monkeypatch.setattr(client._connection, "is_lost", counted_is_lost)
    monkeypatch.setattr(client, "_new_connection", counted_connect)
    for _ in range(8):
        threads.start(client.complete, "letters", "x")
    with client, pytest.raises(ConnectionLost, match="no supervisor is running here"):
        threads.join()
    assert len(threads.errors) == 8
    assert len(attempts) == 1
