"""Several answers to one prompt: as many requests, sent together and read together."""

from typing import Generic, TypeVar

from protocol.client.answers import Delta
from protocol.client.stream_base import StreamBase
from protocol.errors import WireError

S = TypeVar("S", bound=StreamBase)


class ChoicesBase(Generic[S]):
    """Several answers to one prompt.

    streams  the stream of each answer
    """

    def __init__(self, streams: tuple[S, ...], timeout: float | None) -> None:
        self.streams = streams
        self._timeout = timeout
        self._turn = 0

    def __len__(self) -> int:
        return len(self.streams)

    def cancel(self) -> None:
        """Ask the supervisor to end every unfinished request. The streams then bring their ends as usual."""
        for stream in self.streams:
            stream.cancel()

    def close(self) -> None:
        """Cancel every unfinished request, and drop what was not read. A second call does nothing."""
        for stream in self.streams:
            stream.close()

    def _abandon(self) -> None:
        for stream in self.streams:
            stream._abandon()

    def _now(self) -> tuple[int, Delta] | None:
        """What has come, each in turn; None if there is nothing yet or (``_over``) will be nothing."""
        for ahead in range(len(self.streams)):
            index = (self._turn + ahead) % len(self.streams)
            try:
                delta = self.streams[index]._now()
            except WireError as e:
                e.index = index
                self.close()
                raise
            if delta is not None:
                self._turn = index + 1
                return index, delta
        return None

    @property
    def _unfinished(self) -> list[S]:
        return [stream for stream in self.streams if not stream._over]

    def _timed_out(self) -> TimeoutError:
        self.close()
        return TimeoutError(f"no event of any choice within {self._timeout} s: all were cancelled")
