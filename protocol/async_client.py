"""``AsyncClient``: requests to a supervisor from an asyncio event loop, many at once.

    async with AsyncClient() as client:
        async for delta in client.generate("letters", "sort: d b a c ->", max_tokens=32, temperature=0):
            print(delta.text, end="")

The same surface as ``protocol.client.Client``, and the same rules: one client is one connection, and reconnecting is
making a new one. It belongs to one event loop, where any number of tasks may use it, and refuses other threads.
"""

import asyncio
import os
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Self

import zmq

from protocol.answers import Completion, Delta, StreamState, TokenLogprob, Touched
from protocol.asking import generate_body
from protocol.connection import Connection, check_can_generate, check_welcomed
from protocol.errors import ConnectionLost
from protocol.stream import StreamBase

__all__ = ["AsyncClient", "AsyncStream", "Completion", "Delta", "TokenLogprob"]

_WELCOME = 0
"""What waits for the greeting, among the ids of requests and calls (which begin at 1)."""


class AsyncStream(StreamBase):
    """The answer to one request, as it comes: iterate over it (``async for``) for ``Delta`` objects.

    Leaving the loop (break, an exception, ``close()``, or dropping the stream) cancels the request, and so does
    cancelling the task that waits for its next delta. ``cancel()`` asks for its end and lets you read up to it, where
    ``finish_reason`` is "cancelled". Iterating raises WireError with the code the request ended with (ConnectionLost
    among them), once; TimeoutError as ``AsyncClient.generate`` says. One task at a time reads a stream.
    """

    def __init__(
        self, client: "AsyncClient", connection: Connection, state: StreamState, timeout: float | None
    ) -> None:
        super().__init__(connection, state)
        self._client = client
        self._timeout = timeout

    def __aiter__(self) -> "_Loop":
        # an object of its own, which dies with the loop: the loop was left even where the stream is still referred to
        return _Loop(self)

    async def __anext__(self) -> Delta:
        self._connection.check_thread()
        while True:
            if self._state.abandoned:
                raise StopAsyncIteration
            delta = self._take()
            if delta is not None:
                return delta
            if self._state.ended:
                raise StopAsyncIteration
            await self._wait_for_event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def aclose(self) -> None:
        """``close()``, for contextlib.aclosing."""
        self.close()

    async def complete(self) -> Completion:
        """Reads to the end; the whole answer."""
        async for _ in self:
            pass
        return self._completion()

    async def _wait_for_event(self) -> None:
        try:
            await self._client._wait(self._state.id, self._timeout)
        except TimeoutError:
            self.close()
            raise TimeoutError(
                f"no event of request {self.request_id} within {self._timeout} s: it was cancelled"
            ) from None
        except asyncio.CancelledError:
            # a cancelled task can be kept for long, and its frames with it: do not leave this to the end of the stream
            self.close()
            raise


class _Loop:
    """What an ``async for`` loop holds. Its end is the end of the loop."""

    __slots__ = ("_stream",)

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    def __aiter__(self) -> "_Loop":
        return self

    def __anext__(self) -> Awaitable[Delta]:
        return self._stream.__anext__()

    def __del__(self) -> None:
        self._stream._abandon()


class AsyncClient:
    """A connection to the supervisor, made by ``async with`` or ``await connect()``.

    endpoint     a ZeroMQ endpoint; unset is the front socket in the runtime directory
    runtime_dir  the supervisor's directory; unset is ``protocol.runtime_paths.default_runtime_dir()``
    timeout      seconds to wait for the supervisor's greeting, and for the answers of ``models`` and ``status``
    admin        connect to the operators' socket, which takes ``call`` only
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        runtime_dir: str | os.PathLike[str] | None = None,
        timeout: float = 5.0,
        admin: bool = False,
    ) -> None:
        self.timeout = timeout
        self._where: tuple[str | None, str | os.PathLike[str] | None, bool] = (endpoint, runtime_dir, admin)
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._connected: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._descriptors: tuple[int, int] = (-1, -1)

    async def connect(self) -> Self:
        """Connects and waits for the greeting.

        Raises ConnectionLost if no supervisor listens there (at once) or none answers (after ``timeout``); WireError if
        it refuses this client (bad_version, draining); ValueError for a socket path that is too long.
        """
        if self._connected is not None:
            raise RuntimeError("this client was connected before: make a new one")
        endpoint, runtime_dir, admin = self._where
        connection = Connection(endpoint, runtime_dir=runtime_dir, admin=admin, on_change=self._wake)
        self._connected, self._loop = connection, asyncio.get_running_loop()
        # Edge-triggered: readable once for all that happened, so a callback has to take in everything. ``pump`` does.
        self._descriptors = (int(connection.socket.get(zmq.FD)), int(connection.monitor.get(zmq.FD)))
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, connection.pump)
        try:
            connection.pump()
            async with asyncio.timeout(self.timeout):
                while not check_welcomed(connection):
                    await self._wait(_WELCOME, None)
        except TimeoutError:
            await self.close()
            raise ConnectionLost(
                f"the supervisor at {connection.endpoint} did not answer within {self.timeout} s"
            ) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def endpoint(self) -> str:
        return self._connection.endpoint

    @property
    def server(self) -> dict[str, Any]:
        """What the supervisor said of itself in its greeting: {server, session, window, ...}."""
        return dict(self._connection.session.welcome or {})

    def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        token_ids: Iterable[int] | bytes | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        resume: bool = False,
        timeout: float | None = None,
        **sampling: Any,
    ) -> AsyncStream:
        """Sends a request, without waiting; its answer is read from the stream returned.

        Takes and raises what ``protocol.client.Client.generate`` does.
        """
        connection = self._connection
        connection.check_usable()
        check_can_generate(connection)
        body = generate_body(prompt, messages, token_ids, max_tokens, stop, sampling)
        stream = AsyncStream(self, connection, connection.session.generate(model, body, resume=resume), timeout)
        connection.pump()
        return stream

    async def complete(self, model: str, prompt: str | None = None, **request: Any) -> Completion:
        """The whole answer; takes what ``generate`` takes and raises what its stream raises."""
        return await self.generate(model, prompt, **request).complete()

    async def call(self, verb: str, /, *, reply_timeout: float | None = None, **params: Any) -> dict[str, Any]:
        """Asks the supervisor something else; the map it answered.

        reply_timeout  seconds; unset waits while the connection lives

        Raises WireError with the code the supervisor answered, ConnectionLost, TimeoutError.
        """
        connection = self._connection
        connection.check_usable()
        state = connection.session.call(verb, params)
        try:
            connection.pump()
            if not state.ended:
                await self._wait(state.id, reply_timeout)
        except TimeoutError:
            raise TimeoutError(f"no answer to {verb} within {reply_timeout} s") from None
        finally:
            connection.session.forget_call(state)
        if state.error is not None:
            raise state.error
        return state.result

    async def models(self) -> dict[str, Any]:
        """``call("models")``."""
        return await self.call("models", reply_timeout=self.timeout)

    async def status(self, model: str | None = None) -> dict[str, Any]:
        """``call("status")``, of one model or of all."""
        params = {} if model is None else {"model": model}
        return await self.call("status", reply_timeout=self.timeout, **params)

    async def close(self) -> None:
        """Ends the connection, and with it every unfinished request. Repeating it does nothing."""
        connection = self._connected
        if connection is None or connection.closed:
            return
        connection.check_thread()
        assert self._loop is not None
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        connection.close()

    @property
    def _connection(self) -> Connection:
        if self._connected is None:
            raise RuntimeError("not connected: use `async with AsyncClient() as client`, or await client.connect()")
        return self._connected

    async def _wait(self, key: int, timeout: float | None) -> None:
        """Until something happens to the request or call. Raises TimeoutError after ``timeout`` seconds."""
        if key in self._waiters:
            raise RuntimeError("another task is reading this stream: one task at a time")
        assert self._loop is not None
        self._waiters[key] = future = self._loop.create_future()
        try:
            if timeout is None:
                await future
            else:
                async with asyncio.timeout(timeout):
                    await future
        finally:
            del self._waiters[key]

    def _wake(self, touched: list[Touched]) -> None:
        for key in (_WELCOME, *(state.id for state in touched)):
            future = self._waiters.get(key)
            if future is not None and not future.done():
                future.set_result(None)
