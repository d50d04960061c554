"""The asyncio client works against a real peer. The tests of the blocking client cover the code that both share."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from modelctl import AsyncClient
from protocol.client.async_client import AsyncChoices, AsyncStream
from protocol.codec import pack_body, pack_error, unpack_body
from protocol.errors import ConnectionLost, ErrorCode, WireError
from protocol.messages import Call, Cancel, Error, Generate, Message, Ping, Pong, Reply
from tests.protocol.scripted_peer import (
    DEADLINE_S,
    CreditScript,
    HoldingScript,
    Script,
    ScriptedPeer,
    accepted,
    answers,
    delta,
    events,
    finished,
    peer_process,
)


async def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def connected(
    runtime_dir: Path, script: Script | None, window: int = 256
) -> AsyncIterator[tuple[ScriptedPeer, AsyncClient]]:
    with ScriptedPeer(runtime_dir / "front", script, window=window) as peer:
        async with AsyncClient(peer.endpoint) as client:
            yield peer, client


def echo(peer: ScriptedPeer, client: bytes, message: Message) -> None:
    """Answer requests with the words of their prompts, and calls with their own parameters."""
    if isinstance(message, Generate):
        words = unpack_body(message.body)["prompt"].split()
        peer.send(client, accepted(message.request))
        for seq, word in enumerate(words):
            peer.send(client, events(delta(message.request, seq, word + " ", (seq,))))
        peer.send(client, events(finished(message.request, len(words))))
    elif isinstance(message, Call):
        peer.send(client, Reply(message.call, pack_body({"result": {message.verb: unpack_body(message.body)}})))


def test_a_stream_delivers_its_deltas_then_how_it_ended(runtime_dir: Path) -> None:
    async def main() -> None:
        async with connected(runtime_dir, answers(["a ", "b"])) as (peer, client):
            assert client.server["server"] == "scripted"
            stream = client.generate("letters", "x", temperature=0)
            assert [(d.text, d.token_ids) async for d in stream] == [("a ", (0,)), ("b", (1,))]
            assert (stream.text, stream.finish_reason, stream.token_ids) == ("a b", "stop", (0, 1))
            assert stream.accepted == {"model": "letters", "queue_position": 0}
            assert [d async for d in stream] == []
            answer = await client.complete("letters", "y")
            assert (answer.text, answer.usage["completion_tokens"]) == ("a b", 2)
            assert peer.of(Cancel) == []

    asyncio.run(main())


def test_200_streams_at_once_each_get_their_own_answer(runtime_dir: Path) -> None:
    """Tasks send while others receive. A send may consume an edge of the descriptor, which must lose no message."""

    async def ask(client: AsyncClient, number: int) -> str:
        prompt = " ".join(f"{number}:{i}" for i in range(20))
        pieces = []
        async for each in client.generate("letters", prompt):
            pieces.append(each.text)
            if len(pieces) % 7 == 0:
                assert await client.call("status", number=number) == {"status": {"number": number}}
        assert "".join(pieces).strip() == prompt
        return prompt

    async def main() -> None:
        async with connected(runtime_dir, echo, window=8) as (peer, client):
            prompts = await asyncio.wait_for(asyncio.gather(*(ask(client, i) for i in range(200))), 60)
            assert len(set(prompts)) == 200
            assert len(peer.of(Call)) == 400
            assert not client._connection.session._streams
            assert not client._connection._waiters

    asyncio.run(main())


def test_credit_is_granted_as_events_are_taken(runtime_dir: Path) -> None:
    script = CreditScript(total=100, window=8)

    async def main() -> None:
        async with connected(runtime_dir, script, window=8) as (_, client):
            unread, read = client.generate("letters", "1"), client.generate("letters", "2")
            assert len([d async for d in read]) == 100
            assert script.sent[unread.request_id] == 8
            assert len([d async for d in unread]) == 100

    asyncio.run(main())


async def leave_by_break(client: AsyncClient) -> object:
    async for _ in client.generate("letters", "x"):
        break
    return None


async def leave_by_break_while_holding_the_stream(client: AsyncClient) -> object:
    stream = client.generate("letters", "x")
    async for _ in stream:
        break
    return stream


async def leave_by_exception(client: AsyncClient) -> object:
    stream = client.generate("letters", "x")
    try:
        async for _ in stream:
            raise KeyError
    except KeyError:
        pass
    return stream


async def leave_by_aclosing(client: AsyncClient) -> object:
    async with aclosing(client.generate("letters", "x")) as stream:
        await anext(stream)
    return stream


async def leave_by_dropping(client: AsyncClient) -> object:
    stream = client.generate("letters", "x")
    await anext(stream)
    del stream
    gc.collect()
    return None


async def leave_by_cancelling_the_waiting_task(client: AsyncClient) -> object:
    got = asyncio.Event()

    async def consume(stream: AsyncStream) -> None:
        async for _ in stream:
            got.set()

    stream = client.generate("letters", "x")
    task = asyncio.create_task(consume(stream))
    await got.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return task, stream


async def leave_by_cancelling_a_task_that_reads_without_a_loop(client: AsyncClient) -> object:
    stream = client.generate("letters", "x")
    await anext(stream)
    task = asyncio.ensure_future(anext(stream))
    await until(lambda: bool(client._connection._waiters), "the task to wait")
    task.cancel()
    await asyncio.wait([task])
    return task, stream


async def leave_by_cancelling_the_task_in_the_loops_body(client: AsyncClient) -> object:
    got = asyncio.Event()

    async def consume() -> None:
        stream = client.generate("letters", "x")
        async for _ in stream:
            got.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(consume())
    await got.wait()
    task.cancel()
    await asyncio.wait([task])
    return task


async def leave_by_cancelling_complete(client: AsyncClient) -> object:
    task = asyncio.create_task(client.complete("letters", "x"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return task


async def leave_by_timeout(client: AsyncClient) -> object:
    stream = client.generate("letters", "x", timeout=0.05)
    with pytest.raises(TimeoutError, match=r"no event of request 1 within 0.05 s"):
        async for _ in stream:
            pass
    return stream


async def leave_by_a_timeout_of_the_users_own(client: AsyncClient) -> object:
    stream = client.generate("letters", "x")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.complete(), 0.05)
    return stream


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_break_while_holding_the_stream,
        leave_by_exception,
        leave_by_aclosing,
        leave_by_dropping,
        leave_by_cancelling_the_waiting_task,
        leave_by_cancelling_a_task_that_reads_without_a_loop,
        leave_by_cancelling_the_task_in_the_loops_body,
        leave_by_cancelling_complete,
        leave_by_timeout,
        leave_by_a_timeout_of_the_users_own,
    ],
    ids=lambda leave: leave.__name__.removeprefix("leave_by_"),
)
def test_leaving_cancels_once(runtime_dir: Path, leave: Callable[[AsyncClient], Awaitable[object]]) -> None:
    hold, answer = HoldingScript(), answers(["fine"])

    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        (answer if getattr(message, "request", 0) == 2 else hold)(peer, client, message)

    async def main() -> None:
        async with connected(runtime_dir, script) as (peer, client):
            kept = await leave(client)
            assert (await client.complete("letters", "y")).text == "fine"
            assert peer.of(Cancel) == [Cancel(1)]
            await until(lambda: not client._connection.session._streams, "the table of requests to be empty")
            if isinstance(kept, AsyncStream):
                assert kept.finish_reason == "cancelled"
                assert [d async for d in kept] == []
            del kept
        assert peer.of(Cancel) == [Cancel(1)]

    asyncio.run(main())


def test_the_reason_is_known_as_soon_as_the_loop_is_left(runtime_dir: Path) -> None:
    async def main() -> None:
        async with connected(runtime_dir, HoldingScript()) as (_, client):
            stream = client.generate("letters", "x")
            async for _ in stream:
                break
            assert stream.finish_reason == "cancelled"

    asyncio.run(main())


def test_cancel_lets_the_reader_see_the_end(runtime_dir: Path) -> None:
    async def main() -> None:
        async with connected(runtime_dir, HoldingScript()) as (peer, client):
            stream, texts = client.generate("letters", "x"), []
            async for each in stream:
                texts.append(each.text)
                stream.cancel()
            assert (texts, stream.finish_reason) == (["0 ", "late "], "cancelled")
            assert peer.of(Cancel) == [Cancel(1)]

    asyncio.run(main())


def test_errors_raise_with_code_and_field(runtime_dir: Path) -> None:
    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Generate):
            error = WireError(ErrorCode.INVALID_REQUEST, "max_tokens is 0: must be at least 1", field="max_tokens")
            peer.send(client, Error(message.request, pack_error(error)))

    async def main() -> None:
        async with connected(runtime_dir, script) as (_, client):
            with pytest.raises(WireError, match="max_tokens is 0") as raised:
                await client.complete("letters", "x", max_tokens=0)
            assert (raised.value.code, raised.value.field) == (ErrorCode.INVALID_REQUEST, "max_tokens")
            with pytest.raises(WireError) as refused:
                client.generate("letters", "x" * (5 << 20))
            assert refused.value.code is ErrorCode.TOO_LARGE

    asyncio.run(main())


def test_pings_are_answered_while_nobody_waits(runtime_dir: Path) -> None:
    async def main() -> None:
        async with connected(runtime_dir, None) as (peer, _):
            peer.inject(peer.clients[0], Ping(7))
            await until(lambda: peer.of(Pong) == [Pong(7)], "PONG")

    asyncio.run(main())


def test_a_killed_supervisor_ends_every_request_once_and_at_once(runtime_dir: Path) -> None:
    async def consume(stream: AsyncStream, started: asyncio.Semaphore) -> str:
        for _ in range(3):
            await anext(stream)
        started.release()
        with pytest.raises(ConnectionLost):
            await anext(stream)
        assert [d async for d in stream] == []
        return stream.text

    async def main() -> None:
        with peer_process(runtime_dir / "front") as process:
            async with AsyncClient(runtime_dir=runtime_dir) as client:
                started = asyncio.Semaphore(0)
                streams = [client.generate("letters", str(i)) for i in range(50)]
                tasks = [asyncio.create_task(consume(stream, started)) for stream in streams]
                call = asyncio.create_task(client.call("never answered"))
                for _ in tasks:
                    await asyncio.wait_for(started.acquire(), DEADLINE_S)
                process.kill()
                start = time.monotonic()
                assert await asyncio.gather(*tasks) == ["0 1 2 "] * 50
                with pytest.raises(ConnectionLost):
                    await call
                assert time.monotonic() - start < DEADLINE_S
                for ask in (client.complete("letters", "x"), client.call("status")):
                    start = time.monotonic()
                    with pytest.raises(ConnectionLost, match="no supervisor is running here"):
                        await ask
                    assert time.monotonic() - start < DEADLINE_S

    asyncio.run(main())


def test_no_supervisor_and_one_that_never_greets(runtime_dir: Path) -> None:
    async def main() -> None:
        with pytest.raises(ConnectionLost, match=r"no supervisor is running here .*serve --runtime-dir /.+`"):
            await AsyncClient(runtime_dir=runtime_dir, timeout=3600).connect()  # waiting would outlast the test
        with (
            ScriptedPeer(runtime_dir / "front", welcome=False) as peer,
            pytest.raises(ConnectionLost, match=r"did not answer within 0.1 s"),
        ):
            await AsyncClient(peer.endpoint, timeout=0.1).connect()

    asyncio.run(main())


def test_closing_ends_what_waits(runtime_dir: Path) -> None:
    async def main() -> None:
        async with connected(runtime_dir, HoldingScript(first=0)) as (_, client):
            stream = client.generate("letters", "x")
            task = asyncio.create_task(stream.complete())
            await until(lambda: bool(client._connection._waiters), "the task to wait")
            await client.close()
            with pytest.raises(ConnectionLost, match="this client was closed"):
                await task
            with pytest.raises(RuntimeError, match="was closed"):
                client.generate("letters", "y")

    asyncio.run(main())


def test_misuse_is_refused_by_name(runtime_dir: Path) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="not connected"):
            AsyncClient(runtime_dir=runtime_dir).generate("letters", "x")
        async with connected(runtime_dir, HoldingScript(first=0)) as (_, client):
            with pytest.raises(RuntimeError, match="connected before"):
                await client.connect()
            with pytest.raises(RuntimeError, match="'MainThread'"):
                await asyncio.to_thread(client.generate, "letters", "x")
            stream = client.generate("letters", "x")
            first = asyncio.create_task(stream.complete())
            await until(lambda: bool(client._connection._waiters), "the task to wait")
            with pytest.raises(RuntimeError, match="one task at a time"):
                await anext(stream)
            stream.cancel()
            assert (await first).finish_reason == "cancelled"
            with pytest.raises(TimeoutError, match=r"no answer to unheard within 0.05 s"):
                await client.call("unheard", reply_timeout=0.05)

    asyncio.run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_second_loop_of_the_thread_is_refused_and_nothing_is_sent(
    runtime_dir: Path, run: Callable[[Awaitable[object]], object]
) -> None:
    """The client waits on the descriptors with its own loop, so nobody would read the answer."""
    with ScriptedPeer(runtime_dir / "front", HoldingScript(first=1)) as peer:
        client = AsyncClient(peer.endpoint)

        async def first() -> tuple[AsyncStream, AsyncChoices]:
            await client.connect()
            return client.generate("letters", "x"), client.choices("letters", "y", n=2)

        async def second() -> None:
            for misuse in (
                lambda: client.complete("letters", "z"),
                client.status,
                lambda: anext(stream),
                lambda: anext(choices),
            ):
                with pytest.raises(RuntimeError, match="belongs to another event loop, which is closed: make an Async"):
                    await misuse()
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                client.generate("letters", "z")
            await client.close()

        stream, choices = run(first())  # type: ignore[misc]
        with pytest.raises(RuntimeError, match="belongs to another event loop, which is closed"):
            client.generate("letters", "z")  # no loop runs here
        peer.wait_for(Generate, 3)
        run(second())
        assert (len(peer.of(Generate)), len(peer.of(Call))) == (3, 0)


def test_a_loop_that_runs_in_turns_may_use_its_client_in_between(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", answers(["a ", "b"])) as peer, asyncio.Runner() as own:
        client = own.run(AsyncClient(peer.endpoint).connect())
        stream = client.generate("letters", "x")  # no loop runs, and the client's own will
        with asyncio.Runner() as other, pytest.raises(RuntimeError, match="belongs to another event loop: make"):
            other.run(stream.__anext__())
        assert own.run(stream.complete()).text == "a b"
        own.run(client.close())


def test_a_timer_that_is_due_at_once_does_no_harm_on_uvloop(runtime_dir: Path) -> None:
    """uvloop returns a handle without ``when()`` for a call that is due in less than half a millisecond."""

    async def main() -> None:
        async with connected(runtime_dir, HoldingScript()) as (_, client):
            stream = client.generate("letters", "x")
            client._connection._liveness.step, client._connection._check_at = 1e-4, 0.0
            for _ in range(3):
                client._connection.pump()
            assert (await anext(stream)).text == "0 "

    uvloop.run(main())
