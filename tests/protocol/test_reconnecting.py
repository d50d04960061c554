"""Requests of a lost connection end once, and the next request uses a new connection."""

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from modelctl import AsyncClient, Client
from protocol.client import connection
from protocol.client.async_client import LoopConnection
from protocol.client.connection import check_welcomed
from protocol.client.session import ClientSession
from protocol.client.sync_client import SharedConnection
from protocol.client.transport import FIRST_PAUSE_S
from protocol.codec import pack_body, pack_error
from protocol.errors import ConnectionLost, ErrorCode, WireError
from protocol.messages import Call, Error, Generate, GoAway, Hello, Message, Reply
from tests.protocol.scripted_peer import (
    HoldingScript,
    ScriptedPeer,
    answers,
    peer_process,
    pump_until,
    until_lost,
    wait_until,
)


class Accepting:
    """A listener that accepts connections and closes them. ``at``: their times, which show a client's patience."""

    def __init__(self, path: Path) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self.at: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                accepted, _ = self._server.accept()
            except OSError:
                return
            self.at.append(time.monotonic())
            accepted.close()

    def __enter__(self) -> "Accepting":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(5)


def lost_client(runtime_dir: Path, **options: Any) -> Client:
    with ScriptedPeer(runtime_dir / "front") as peer:
        client = Client(peer.endpoint, **options)
    until_lost(client)
    return client


def test_what_had_arrived_is_read_from_the_old_connection_after_the_new_one_was_made(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", HoldingScript(first=3)) as first:
        client = Client(first.endpoint)
        read, unread, left = (client.generate("letters", str(i)) for i in range(3))
        assert next(read).text == "0 "
        pump_until(client, lambda: len(unread._state.deltas) == len(left._state.deltas) == 3, "the deltas")
    until_lost(client)
    with ScriptedPeer(runtime_dir / "front", answers(["fine"])) as second, client:
        assert client.complete("letters", "x").text == "fine"
        for stream, texts in ((unread, ["0 ", "1 ", "2 "]), (read, ["1 ", "2 "])):
            got: list[str] = []
            with pytest.raises(ConnectionLost, match="the connection to the supervisor ended"):
                got.extend(each.text for each in stream)
            assert got == texts
            assert list(stream) == []
            stream.cancel()
            stream.close()
        left.close()
        assert list(left) == []
        assert [type(message) for message in second.received] == [Hello, Generate], "nothing of the old connection"
        assert client.server["server"] == "scripted"


def test_a_call_connects_anew_as_well(runtime_dir: Path) -> None:
    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Call):
            peer.send(client, Reply(message.call, pack_body({"result": {"fine": True}})))

    client = lost_client(runtime_dir)
    with ScriptedPeer(runtime_dir / "front", script), client:
        assert client.status() == {"fine": True}


def test_a_supervisor_that_comes_back_late_is_found(runtime_dir: Path) -> None:
    client = lost_client(runtime_dir, connect_timeout=10)
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(client.complete("letters", "x").text))
    thread.start()
    time.sleep(0.3)  # for this time no supervisor is there, which must not matter
    with ScriptedPeer(runtime_dir / "front", answers(["fine"])) as peer:
        thread.join(10)
        assert texts == ["fine"]
        assert len(peer.of(Generate)) == 1
        client.close()


def test_nobody_there_is_said_in_time(runtime_dir: Path) -> None:
    with lost_client(runtime_dir) as client:
        for attempt in (lambda: client.generate("letters", "x"), lambda: client.call("status")):
            start = time.monotonic()
            with pytest.raises(ConnectionLost, match=r"no supervisor is running here .*serve --runtime-dir /.+`"):
                attempt()
            assert time.monotonic() - start > 0.9


def test_a_try_that_begins_as_the_time_ends_does_not_hide_why_the_others_failed(runtime_dir: Path) -> None:
    shared = SharedConnection(f"ipc://{runtime_dir}/front", patience=60, redial=True)
    try:
        wait_until(lambda: bool(shared.pump() or shared._redial.failure), "the first try to fail")
        shared._dial(shared._redial.give_up_at, [])  # the last attempt, which has no result yet
        shared._check_deadlines(shared._redial.give_up_at, [])
        with pytest.raises(ConnectionLost, match="no supervisor is running here"):
            shared.wait_welcome()
    finally:
        shared.close()


def test_pauses_between_tries_grow(runtime_dir: Path) -> None:
    client = lost_client(runtime_dir, connect_timeout=1.5)
    (runtime_dir / "front").unlink(missing_ok=True)
    with Accepting(runtime_dir / "front") as listener, client, pytest.raises(ConnectionLost):
        client.generate("letters", "x")
    pauses = [after - before for before, after in zip(listener.at, listener.at[1:], strict=False)]
    assert 2 <= len(pauses) <= 7
    for i, pause in enumerate(pauses):
        assert pause >= FIRST_PAUSE_S * 2**i / 2


def test_a_listener_that_never_greets(runtime_dir: Path) -> None:
    client = lost_client(runtime_dir, connect_timeout=0.2)
    with ScriptedPeer(runtime_dir / "front", welcome=False) as peer, client:
        with pytest.raises(ConnectionLost, match=r"did not answer within 0.2 s"):
            client.generate("letters", "x")
        assert peer.of(Generate) == []


def test_a_refusal_is_final(runtime_dir: Path) -> None:
    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        peer.send(client, Error(0, pack_error(WireError(ErrorCode.BAD_VERSION, "this side speaks 2"))))

    client = lost_client(runtime_dir, connect_timeout=3600)  # a second attempt would outlast the test
    with (
        ScriptedPeer(runtime_dir / "front", script, welcome=False) as peer,
        client,
        pytest.raises(WireError, match="speaks 2"),
    ):
        client.generate("letters", "x")
    assert len(peer.clients) == 1


def test_it_can_be_switched_off(runtime_dir: Path) -> None:
    client = lost_client(runtime_dir, reconnect=False)
    with ScriptedPeer(runtime_dir / "front", answers(["a"])) as peer, client:
        for _ in range(2):
            with pytest.raises(ConnectionLost, match="the connection to the supervisor ended"):
                client.generate("letters", "x")
        assert peer.received == []


def test_a_client_that_was_closed_stays_closed(runtime_dir: Path) -> None:
    client = lost_client(runtime_dir)
    client.close()
    with ScriptedPeer(runtime_dir / "front", answers(["a"])), pytest.raises(RuntimeError, match="was closed"):
        client.generate("letters", "x")


def test_a_supervisor_that_has_said_goodbye(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front") as peer:
        client = Client(peer.endpoint)
        peer.inject(peer.clients[0], GoAway(pack_body({"reason": "it is being restarted"})))
        pump_until(client, lambda: client._connection.session.goaway is not None, "GOAWAY")
        with pytest.raises(WireError, match="it is being restarted"):
            client.generate("letters", "x")
    until_lost(client)
    with ScriptedPeer(runtime_dir / "front", answers(["fine"])), client:
        assert client.complete("letters", "x").text == "fine"


def test_after_an_interrupt_the_client_is_of_use_again(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between reading a frame and applying it loses the frame, and so the connection, but nothing else."""
    receive = ClientSession.receive
    interrupts: list[BaseException] = []

    def interrupted(session: ClientSession, frame: bytes) -> Any:
        if interrupts:
            raise interrupts.pop()
        return receive(session, frame)

    with ScriptedPeer(runtime_dir / "front", HoldingScript()) as peer, Client(peer.endpoint) as client:
        monkeypatch.setattr(ClientSession, "receive", interrupted)
        stream = client.generate("letters", "x")
        assert next(stream).text == "0 "
        interrupts.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            client.complete("letters", "y")
        with pytest.raises(ConnectionLost, match="interrupted"):
            next(stream)
        assert next(client.generate("letters", "z")).text == "0 "
        assert len(peer.clients) == 2


# ---- in a loop


async def loop_until_lost(client: AsyncClient) -> None:
    async with asyncio.timeout(10):
        while client._connection.session.broken is None:
            await asyncio.sleep(0.002)


def test_in_a_loop_the_next_request_connects_anew(runtime_dir: Path) -> None:
    async def main() -> None:
        client = AsyncClient(runtime_dir=runtime_dir, connect_timeout=10)
        with peer_process(runtime_dir / "front") as process:
            await client.connect()
            stream = client.generate("letters", "x")
            assert [(await anext(stream)).text for _ in range(3)] == ["0 ", "1 ", "2 "]
            process.kill()
            with pytest.raises(ConnectionLost):
                await anext(stream)
        early = [asyncio.create_task(client.complete("letters", str(i))) for i in range(3)]
        await asyncio.sleep(0.2)  # no supervisor is there yet
        with ScriptedPeer(runtime_dir / "front", answers(["fine"])) as peer:
            assert [(await task).text for task in early] == ["fine"] * 3
            assert (await client.complete("letters", "y")).text == "fine"
            assert len(peer.clients) == 1
            assert len(peer.of(Generate)) == 4
            await client.close()

    asyncio.run(main())


def test_in_a_loop_nobody_there_is_said_in_time(runtime_dir: Path) -> None:
    async def main() -> None:
        with ScriptedPeer(runtime_dir / "front") as peer:
            client = await AsyncClient(peer.endpoint).connect()
        await loop_until_lost(client)
        for _ in range(2):
            start = time.monotonic()
            stream = client.generate("letters", "x")
            results = await asyncio.gather(
                stream.complete(),
                client.call("status"),
                client.choices("a", "x", n=2).complete(),
                return_exceptions=True,
            )
            assert [type(result) for result in results] == [ConnectionLost] * 3
            assert time.monotonic() - start > 0.9
        await client.close()

    asyncio.run(main())


def test_in_a_loop_generate_does_not_wait_for_the_connection(runtime_dir: Path) -> None:
    """If ``generate`` waited, it would wait for an hour, and the test would time out."""

    async def main() -> None:
        with ScriptedPeer(runtime_dir / "front") as peer:
            client = await AsyncClient(peer.endpoint, connect_timeout=3600).connect()
        await loop_until_lost(client)
        stream = client.generate("letters", "x")
        stream.cancel()
        await client.close()

    asyncio.run(main())


def test_in_a_loop_a_request_given_up_while_connecting_is_never_made(runtime_dir: Path) -> None:
    async def main() -> None:
        with ScriptedPeer(runtime_dir / "front") as peer:
            client = await AsyncClient(peer.endpoint, connect_timeout=10).connect()
        await loop_until_lost(client)
        given_up = client.generate("letters", "1")
        given_up.close()
        with ScriptedPeer(runtime_dir / "front", answers(["fine"])) as peer:
            assert (await client.complete("letters", "2")).text == "fine"
            assert [message.request for message in peer.of(Generate)] == [1, 2]
            await client.close()

    asyncio.run(main())


def test_nothing_is_left_of_connections_that_were_lost(runtime_dir: Path) -> None:

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))

    before = descriptors()
    client = None
    for _ in range(5):
        with ScriptedPeer(runtime_dir / "front", answers(["fine"])) as peer:
            client = client or Client(peer.endpoint)
            assert client.complete("letters", "x").text == "fine"
        until_lost(client)
    assert client is not None
    with pytest.raises(ConnectionLost):
        client.complete("letters", "x")
    client.close()
    wait_until(lambda: descriptors() <= before, "descriptors and threads to be given back")


def test_where_no_socket_can_be_made_that_is_said(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may run out of descriptors, and have some again before the time is over."""
    tries = []

    def fail(*_: object) -> None:
        tries.append(time.monotonic())
        raise zmq.ZMQError(errno.EMFILE)

    client = lost_client(runtime_dir, connect_timeout=0.3)
    with ScriptedPeer(runtime_dir / "front", answers(["fine"])), client:
        with monkeypatch.context() as patch:
            patch.setattr(connection, "Transport", fail)
            with pytest.raises(ConnectionLost, match=r"cannot make a socket for .*Too many open files"):
                client.complete("letters", "x")
        assert len(tries) > 1
        assert client.complete("letters", "x").text == "fine"


@contextmanager
def nobody_accepts() -> Iterator[str]:
    """Return an address whose accept queue is full. A connection to it is neither refused nor made."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as stack:
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("kind", [SharedConnection, LoopConnection])
def test_a_client_rests_while_its_connection_is_being_made(kind: type[SharedConnection] | type[LoopConnection]) -> None:
    """The socket's descriptor is readable from the start, and must not keep the client busy until it is connected."""
    pumped = 0

    async def connect(endpoint: str) -> None:
        nonlocal pumped
        waiting = kind(endpoint, patience=0.5)
        pump = waiting.pump

        def counted() -> None:
            nonlocal pumped
            pumped += 1
            pump()

        waiting.pump = counted  # type: ignore[method-assign]
        try:
            if isinstance(waiting, SharedConnection):
                waiting.wait_welcome()
            else:
                waiting.pump()
                while not check_welcomed(waiting):
                    await waiting.wait_change()
        finally:
            waiting.close()

    with nobody_accepts() as endpoint, pytest.raises(ConnectionLost, match="nobody took the connection"):
        asyncio.run(connect(endpoint))
    assert pumped < 50
