"""The answers that ``Client`` returns while they are generated: one, or several."""

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, Self, TypeVar

from protocol.client.answers import Completion, Delta
from protocol.client.shared_connection import SharedConnection
from protocol.client.stream_base import ChoicesBase, StreamBase

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Stream(StreamBase):
    """The answer to one request, while it is generated. Iterate over it for ``Delta`` objects.

    Leaving the loop cancels the request: by break, by an exception, by ``close()``, or when the stream is garbage
    collected. ``cancel()`` asks for the end and lets you read up to it; ``finish_reason`` is then "cancelled".

    If the request ends with an error, the iteration raises it once: WireError with the code, or ConnectionLost. It
    raises TimeoutError after the ``timeout`` of ``generate``. One thread at a time reads a stream. Any thread may
    cancel it.
    """

    _connection: SharedConnection

    def __iter__(self) -> Iterator[Delta]:
        # A separate iterator is deleted when the loop ends, even if a name still holds the stream.
        return _Loop(self)

    def __next__(self) -> Delta:
        self._connection.check()
        while True:
            delta = self._now()
            if delta is not None:
                return delta
            if self._over:
                raise StopIteration
            if not self._wait_any([self], self._timeout):
                self.close()
                raise TimeoutError(f"no event of request {self.request_id} within {self._timeout} s: it was cancelled")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def complete(self) -> Completion:
        """Read to the end, and return the whole answer."""
        for _ in self:
            pass
        return self._completion()

    def _wait_any(self, streams: "Sequence[Stream]", timeout: float | None) -> bool:
        """Wait until anything arrives for one of these streams. Return False after ``timeout`` seconds without that."""
        states = [stream._state for stream in streams]
        arrivals = sum(state.arrivals for state in states)

        def done() -> bool:
            # ACCEPTED brings nothing to read, but shows that the supervisor works on the request.
            return any(s._stirred for s in streams) or sum(state.arrivals for state in states) != arrivals

        return self._connection.wait(states, done, timeout)


class _Loop(Generic[T]):
    """The iterator of a ``for`` loop over a Stream or Choices. It is deleted when the loop ends."""

    __slots__ = ("_read",)

    def __init__(self, read: "_Read[T]") -> None:
        self._read = read

    def __iter__(self) -> "_Loop[T]":
        return self

    def __next__(self) -> T:
        return next(self._read)

    def __del__(self) -> None:
        self._read._abandon()


class _Read(Protocol[T_co]):
    def __next__(self) -> T_co: ...
    def _abandon(self) -> None: ...


class Choices(ChoicesBase[Stream]):
    """The answers of ``Client.choices``. Iterate for (index, ``Delta``) pairs in the order in which they arrive.

    Leaving the loop cancels every unfinished request. If one request ends with an error, the others are cancelled, and
    the iteration raises the WireError with its ``index``. Read ``streams`` one by one if one failure should not end
    the others.
    """

    def __iter__(self) -> Iterator[tuple[int, Delta]]:
        return _Loop(self)

    def __next__(self) -> tuple[int, Delta]:
        while True:
            if (came := self._now()) is not None:
                return came
            waiting = self._unfinished
            if not waiting:
                raise StopIteration
            if not waiting[0]._wait_any(waiting, self._timeout):
                raise self._timed_out()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def complete(self) -> list[Completion]:
        """Read all answers to their ends, and return them by index."""
        for _ in self:
            pass
        return [stream._completion() for stream in self.streams]
