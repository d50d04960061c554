"""The answers that ``AsyncClient`` returns while they are generated: one, or several."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Generic, Protocol, Self, TypeVar

from protocol.client.answers import Completion, Delta
from protocol.client.loop_connection import LoopConnection
from protocol.client.stream_base import ChoicesBase, StreamBase

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
