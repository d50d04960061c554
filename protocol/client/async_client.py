"""``AsyncClient``: send requests to a supervisor from an asyncio event loop, many at once.

    async with AsyncClient() as client:
        async for delta in client.generate("letters", "sort: d b a c ->", max_tokens=32, temperature=0):
            print(delta.text, end="")

``AsyncClient`` has the methods of ``protocol.client.sync_client.Client``, with the same rules for connections and
waiting.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar, Unpack

from protocol.client.answers import (
    Completion,
    Delta,
    Embeddings,
    Progress,
    TokenLogprob,
    Touched,
    text_in,
    token_ids_in,
)
from protocol.client.connection import CANNOT_CONNECT, Connection, check_welcomed
from protocol.client.request_options import (
    USAGE_S,
    RequestOptions,
    RouteOptions,
    choice_requests,
    collect_options,
    embed_options,
    given,
    pack_token_ids,
    rerank_options,
    tokenize_params,
)
from protocol.client.stream_base import ChoicesBase, ClientBase, OnProgress, StreamBase
from protocol.client.transport import Transport
from protocol.messages import Embed, Generate, Rerank

# A connection that belongs to an asyncio event loop.


_WELCOME = 0
"""The key under which a task waits for the greeting. The numbers of requests and calls begin at 1."""


class LoopConnection(Connection):
    """A connection for one event loop. Only code of the loop may use it, and code of its thread while no loop runs.

    The thread may call ``close`` in any loop. Any thread may call ``abandon``.
    """

    def __init__(self, endpoint: str | None, **more: Any) -> None:
        super().__init__(endpoint, **more)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._descriptors: tuple[int, ...] = ()
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        """When the timer calls, by the loop's clock. uvloop's handle does not know that if the time is now."""
        self._settling = False

    def check(self) -> None:
        self._check_thread()
        try:
            other = asyncio.get_running_loop() is not self._loop
        except RuntimeError:  # called between two runs of a loop, or after the last
            other = self._loop.is_closed()
        if other:
            # A request of another loop would be sent, and its events would wake nobody.
            raise RuntimeError(
                f"this client belongs to another event loop{', which is closed' if self._loop.is_closed() else ''}: "
                "make an AsyncClient in each event loop (each asyncio.run has its own), or use Client, which needs none"
            )

    def _check_thread(self) -> None:
        self.check_process()
        if (here := threading.current_thread()) is not self._thread:
            raise RuntimeError(
                f"this client belongs to thread {self._thread.name!r} and was used in {here.name!r}: "
                "make an AsyncClient in each event loop, or use Client, which threads may share"
            )

    async def wait_change(self) -> None:
        """Wait until anything happens."""
        await self._wait((_WELCOME,), None)

    async def wait(self, states: Collection[Touched], timeout: float | None) -> None:
        """Wait until something happens to one of these requests or calls.

        Raises TimeoutError after ``timeout`` seconds, and RuntimeError if another task waits for one of them.
        """
        await self._wait([state.id for state in states], timeout)

    def pump(self) -> None:
        super().pump()
        due = self.due()
        if due is None:
            return
        at = self._loop.time() + due
        if self._timer is not None and self._timer_at > at + 0.001:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer, self._timer_at = self._loop.call_at(at, self._on_time), at

    def close(self) -> None:
        if not self.closed:
            self._check_thread()  # any loop of the thread may close the client, because the client's own may have ended
        super().close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self, keys: Collection[int], timeout: float | None) -> None:
        if any(key in self._waiters for key in keys):
            raise RuntimeError("another task is reading this stream: one task at a time")
        future = self._loop.create_future()
        for key in keys:
            self._waiters[key] = future
        try:
            if timeout is None:
                await future
            else:
                async with asyncio.timeout(timeout):
                    await future
        finally:
            for key in keys:
                del self._waiters[key]

    def _on_time(self) -> None:
        self._timer = None
        self.pump()

    def _watch(self, transport: Transport) -> None:
        self._descriptors = transport.descriptors
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self.pump)

    def _unwatch(self) -> None:
        # Before the descriptors are closed: the next socket may get their numbers.
        if not self._loop.is_closed():
            for descriptor in self._descriptors:
                self._loop.remove_reader(descriptor)
        self._descriptors = ()

    def _changed(self, touched: list[Touched]) -> None:
        for key in (_WELCOME, *(state.id for state in touched)):
            future = self._waiters.get(key)
            if future is not None and not future.done():
                future.set_result(None)

    def _settle(self) -> None:
        """Make the loop carry out the noted actions at its next turn. Finalizers call this, in any thread."""
        if self._noted and not (self._settling or self.closed) and os.getpid() == self._pid:
            self._settling = True
            try:
                self._loop.call_soon_threadsafe(self._settle_now)
            except RuntimeError:  # the loop is closed, and the connection is not used any more
                pass

    def _settle_now(self) -> None:
        self._settling = False
        self.pump()


# The answers that ``AsyncClient`` returns while they are generated: one, or several.


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class AsyncStream(StreamBase):
    """The answer to one request, while it is generated. Iterate over it with ``async for`` for ``Delta`` objects.

    The rules are those of ``Stream``. Cancelling the task that waits for the next delta cancels the request, too. One
    task at a time reads a stream.
    """

    _connection: LoopConnection

    def __aiter__(self) -> AsyncIterator[Delta]:
        # A separate iterator is deleted when the loop ends, even if a name still holds the stream.
        return _Loop(self)

    async def __anext__(self) -> Delta:
        self._connection.check()
        while True:
            delta = self._now()
            if delta is not None:
                return delta
            if self._over:
                raise StopAsyncIteration
            try:
                await self._wait_any([self], self._timeout)
            except TimeoutError:
                self.close()
                raise TimeoutError(
                    f"no event of request {self.request_id} within {self._timeout} s: it was cancelled"
                ) from None
            except asyncio.CancelledError:
                # A cancelled task, and its frames, can be kept for long. So close the stream now.
                self.close()
                raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def aclose(self) -> None:
        """Close, as ``close`` does. The library function contextlib.aclosing calls it."""
        self.close()

    async def complete(self) -> Completion:
        """Read to the end, and return the whole answer."""
        async for _ in self:
            pass
        return self._completion()

    async def wait_accepted(self) -> None:
        """Wait until the supervisor has read the request: it has accepted it, or refused it, which reading the stream
        raises. Nothing is read."""
        while self._state.accepted is None and not self._stirred:
            await self._wait_any([self], None)

    async def _wait_any(self, streams: "Sequence[AsyncStream]", timeout: float | None) -> None:
        """Wait until something happens to one of these streams. Raises TimeoutError after ``timeout`` seconds."""
        if not any(stream._stirred for stream in streams):
            await self._connection.wait([stream._state for stream in streams], timeout)


class _Loop(Generic[T]):
    """The iterator of an ``async for`` loop over an AsyncStream or AsyncChoices. It is deleted when the loop ends."""

    __slots__ = ("_read",)

    def __init__(self, read: "_Read[T]") -> None:
        self._read = read

    def __aiter__(self) -> "_Loop[T]":
        return self

    def __anext__(self) -> Awaitable[T]:
        return self._read.__anext__()

    def __del__(self) -> None:
        self._read._abandon()


class _Read(Protocol[T_co]):
    def __anext__(self) -> Awaitable[T_co]: ...
    def _abandon(self) -> None: ...


class AsyncChoices(ChoicesBase[AsyncStream]):
    """The answers of ``AsyncClient.choices``. Iterate with ``async for`` for (index, ``Delta``) pairs.

    The rules are those of ``Choices``. Cancelling the task that waits for the next pair cancels every unfinished
    request, too.
    """

    def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        return _Loop(self)

    async def __anext__(self) -> tuple[int, Delta]:
        self.streams[0]._connection.check()
        while True:
            if (came := self._now()) is not None:
                return came
            waiting = self._unfinished
            if not waiting:
                raise StopAsyncIteration
            try:
                await waiting[0]._wait_any(waiting, self._timeout)
            except TimeoutError:
                raise self._timed_out() from None
            except BaseException:  # a cancelled task, and its frames, can be kept for long
                self.close()
                raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def aclose(self) -> None:
        """Close, as ``close`` does. The library function contextlib.aclosing calls it."""
        self.close()

    async def complete(self) -> list[Completion]:
        """Read all answers to their ends, and return them by index."""
        async for _ in self:
            pass
        return [stream._completion() for stream in self.streams]


__all__ = [
    "AsyncChoices",
    "AsyncClient",
    "AsyncStream",
    "Completion",
    "Delta",
    "Embeddings",
    "Progress",
    "TokenLogprob",
]


class AsyncClient(ClientBase[LoopConnection]):
    """A connection to the supervisor, from asyncio code. ``async with`` or ``await client.connect()`` makes it.

    The parameters and the rules for connections are those of ``Client``. An AsyncClient belongs to one event loop. Any
    number of tasks may use it. It refuses other threads and other event loops, also a later ``asyncio.run`` of the same
    thread, which may only close it. If it has to connect anew for ``generate``, it does so in the background. If that
    fails, the stream raises the error.
    """

    _connection_class = LoopConnection

    async def connect(self) -> Self:
        """Connect, wait for the supervisor's greeting, and return the client.

        Raises the errors of the constructor of ``Client``.
        """
        if self._connected is not None:
            raise RuntimeError("this client was connected before: make a new one")
        try:
            self._connected = connection = self._new_connection(patience=self.timeout)
            connection.pump()
            while not check_welcomed(connection):
                await connection.wait_change()
        except CANNOT_CONNECT as e:
            await self.close()
            raise e.with_traceback(None) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def __aenter__(self) -> Self:
        try:
            return await self.connect()
        except CANNOT_CONNECT as e:
            raise e.with_traceback(None) from None

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def generate(
        self,
        model: str | None,
        prompt: str | None = None,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """Send a request, without waiting, and return the stream of its answer.

        The options and errors are those of ``Client.generate``. If the client has to connect anew first, it does so in
        the background. If that fails, the stream raises the error.
        """
        connection, (state,) = self._begin(model, [collect_options(prompt, options, progress=on_progress is not None)])
        return AsyncStream(connection, state, timeout, on_progress)

    def choices(
        self,
        model: str | None,
        prompt: str | None = None,
        *,
        n: int,
        on_progress: Callable[[int, Progress], None] | None = None,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncChoices:
        """Send ``n`` requests with one prompt, and return their answers.

        The options are those of ``Client.choices``.
        """
        requests = choice_requests(collect_options(prompt, options, progress=on_progress is not None), n)
        connection, states = self._begin(model, requests)
        callbacks = [on_progress and partial(on_progress, i) for i in range(n)]
        streams = (AsyncStream(connection, state, timeout, tell) for state, tell in zip(states, callbacks, strict=True))
        return AsyncChoices(tuple(streams), timeout)

    async def complete(
        self,
        model: str | None,
        prompt: str | None = None,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Return the whole answer. Takes the options of ``generate``, and raises the errors of its stream."""
        stream = self.generate(model, prompt, on_progress=on_progress, timeout=timeout, **options)
        return await stream.complete()

    async def embed(
        self,
        model: str | None,
        texts: Iterable[str | Iterable[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool | None = None,
        timeout: float | None = None,
        **route: Unpack[RouteOptions],
    ) -> Embeddings:
        """Return the vectors of texts.

        The parameters and errors are those of ``Client.embed``.
        """
        given = embed_options(texts, route, dimensions=dimensions, prompt_name=prompt_name, truncate=truncate)
        return await self._vectors(model, given, Embed, timeout)

    async def rerank(
        self,
        model: str | None,
        query: str,
        documents: Iterable[str],
        *,
        instruction: str | None = None,
        truncate: bool | None = None,
        timeout: float | None = None,
        **route: Unpack[RouteOptions],
    ) -> Embeddings:
        """Return how well documents answer a query: a score for each, in their order.

        The parameters and errors are those of ``Client.rerank``.
        """
        given = rerank_options(query, documents, route, instruction=instruction, truncate=truncate)
        return await self._vectors(model, given, Rerank, timeout)

    async def tokenize(
        self,
        model: str | None,
        prompt: str | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        reply_timeout: float | None = None,
        **template: Any,
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt, or of a conversation as the model's chat template renders it.

        The parameters and errors are those of ``Client.tokenize``.
        """
        params = tokenize_params(model, template | {"prompt": prompt, "messages": messages})
        return token_ids_in(await self._call("tokenize", params, reply_timeout))

    async def detokenize(
        self, model: str | None, token_ids: Iterable[int] | bytes, *, reply_timeout: float | None = None
    ) -> str:
        """Return the text of token ids, or of bytes (u32, little endian). Raises the errors of ``call``."""
        params = {"model": model or "", "token_ids": pack_token_ids(token_ids)}
        return text_in(await self._call("detokenize", params, reply_timeout))

    async def call(self, verb: str, /, *, reply_timeout: float | None = None, **params: Any) -> dict[str, Any]:
        """Send a question or an order to the supervisor, and return its reply.

        The parameters and errors are those of ``Client.call``.
        """
        return await self._call(verb, params, reply_timeout)

    # --- verbs: `python -m tools.docs` writes these methods into async_client.py, too

    async def models(self) -> dict[str, Any]:
        """Return the models and their states: the reply to the verb "models"."""
        return await self._ask("models")

    async def status(self, model: str | None = None) -> dict[str, Any]:
        """Return the supervisor's state and that of one model or of all: the reply to the verb "status"."""
        return await self._ask("status", model=model)

    async def requests(self, limit: int | None = None) -> dict[str, Any]:
        """Return the unfinished requests, the oldest first: the reply to the verb "requests".

        limit  the greatest number of requests, from 1 to 500; 100 by default

        A key without the rights status and admin sees its own requests only.
        """
        return await self._ask("requests", limit=limit)

    async def ended_requests(self, after: int | None = None, limit: int | None = None) -> dict[str, Any]:
        """Return the last requests that have ended, the oldest first: the reply to the verb "ended_requests".

        after  the ``last`` of an earlier reply: return only requests that have ended since then
        limit  the greatest number of requests, from 1 to 1000; 100 by default. Older ones are left out

        A key without the rights status and admin sees its own requests only. If ``session`` differs from that of the
        earlier reply, the supervisor was started again: ask without ``after``.
        """
        return await self._ask("ended_requests", after=after, limit=limit)

    async def story(self, request: str) -> dict[str, Any]:
        """Return what became of a request, or of the requests of one HTTP request: the reply to the verb "story".

        request  the ``id`` of a request, as ``requests()`` names it, or one of its ``trace_ids``

        Raises RequestError for a request that is not known, or that this client may not see.
        """
        return await self._ask("story", id=request)

    async def cancel_request(self, request: str) -> None:
        """Cancel a request of any client: the verb "cancel_request". To end an own stream, use its ``cancel()``.

        request  the ``id`` of a request, as ``requests()`` names it, or one of its ``trace_ids``

        Locally this takes a client with ``admin=True``. Raises the errors of ``call``.
        """
        await self._ask("cancel_request", id=request)

    async def events(
        self,
        after: int | None = None,
        limit: int | None = None,
        model: str | None = None,
    ) -> dict[str, Any]:
        """Return events such as changes of state, deaths and reloads: the reply to the verb "events".

        after  the ``last`` of an earlier reply: return the events behind it. Unset: return the newest events
        limit  the greatest number of events, from 1 to 512; 100 by default
        model  return only the events of this model

        If ``session`` differs from that of the earlier reply, the supervisor was started again: ask without ``after``.
        """
        return await self._ask("events", after=after, limit=limit, model=model)

    async def usage(self, key: str | None = None, model: str | None = None, since: str | None = None) -> dict[str, Any]:
        """Return requests and tokens by key, model and day: the reply to the verb "usage".

        key    the name of a key; empty for requests without a key. Unset: all keys that this client may see
        model  the name of a model. Unset: all models
        since  the first day, such as "2026-01-31". Unset: all days that are kept

        A key without the rights status and admin sees its own usage only.
        """
        return await self._ask("usage", key=key, model=model, since=since)

    async def log_level(self, model: str | None = None, level: str | None = None) -> dict[str, str]:
        """Return the least levels of the lines in logs, by the name of the process: the verb "log_level".

        model  a model, "supervisor" or "gateway". Unset: all of them
        level  the new level: debug, info, warning or error. Unset: nothing is changed

        Locally this takes a client with ``admin=True``. Raises the errors of ``call``.
        """
        reply = await self._ask("log_level", model=model, level=level)
        levels: dict[str, str] = reply["levels"]
        return levels

    async def logs(
        self,
        model: str | None = None,
        lines: int | None = None,
        after: str | None = None,
        since: float | None = None,
    ) -> dict[str, Any]:
        """Return the last lines of a log, or the lines after a position: the reply to the verb "logs".

        model  a model, or one of its workers (``letters:2``), or "gateway". Unset: the supervisor's own log
        lines  the greatest number of lines, from 1 to 1000; 200 by default
        after  the ``position`` of an earlier reply: return the lines behind it
        since  seconds since 1970, in place of ``after``: return the lines from that time on, the oldest first
        """
        return await self._ask("logs", model=model, lines=lines, after=after, since=since)

    # --- end of the verbs

    async def close(self) -> None:
        """End the connection, and with it every unfinished request. A second call does nothing."""
        self._closed = True
        if self._connected is not None:
            self._connected.close()

    async def _vectors(
        self, model: str | None, given: dict[str, Any], kind: type[Generate], timeout: float | None
    ) -> Embeddings:
        connection, (state,) = self._begin(model, [given], kind)
        stream = AsyncStream(connection, state, timeout, None)
        async for _ in stream:
            pass
        return stream._embeddings()

    async def _ask(self, verb: str, **params: Any) -> dict[str, Any]:
        """Return the reply to a verb. A parameter that is None is left out."""
        return await self._call(verb, given(**params), USAGE_S if verb == "usage" else self.timeout)

    async def _call(self, verb: str, params: dict[str, Any], reply_timeout: float | None) -> dict[str, Any]:
        connection = self._usable()
        state = connection.ask(verb, params)
        try:
            if not state.ended:
                await connection.wait([state], reply_timeout)
        except TimeoutError:
            raise TimeoutError(f"no answer to {verb} within {reply_timeout} s") from None
        finally:
            connection.forget(state)
        if state.error is not None:
            try:
                raise state.error
            finally:
                del state  # it holds the error, whose traceback holds this frame and its parameters
        return state.result

    def _usable(self) -> LoopConnection:
        """Return the connection. If it was lost, return a new one, which sends requests as soon as it has connected."""
        connection = self._connection
        connection.check()
        if self._closed:
            raise RuntimeError("this client was closed: make a new one")
        if connection.is_lost() and self._reconnect:
            new = self._new_connection(patience=self._connect_timeout, redial=True)
            connection.close()
            self._connected = connection = new
        return connection
