"""Remember which connection asked a worker what (tokenize, detokenize), until the worker has answered. Pure."""

from dataclasses import dataclass
from itertools import count

from protocol.codec import encode
from protocol.errors import ErrorCode, WireError
from protocol.messages import Reply
from supervisor.requests.in_flight import ToClient

MOST = 256
"""Questions that a worker may have to answer at once, ..."""
MOST_OF_CHANNEL = 32
"""... and those of one connection among them."""


@dataclass(frozen=True, slots=True)
class Asker:
    """The client that has asked: the channel of its connection, and the number that it gave the call."""

    channel: int
    call: int

    def reply(self, body: bytes) -> ToClient:
        """Return the effect that sends the client its answer."""
        return ToClient(self.channel, encode(Reply(self.call, body)))


class PendingQueries:
    """The queries that workers have yet to answer."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._open: dict[str, dict[int, Asker]] = {}

    def begin(self, worker: str, asker: Asker) -> int:
        """The number of a new question. Raises OVERLOADED."""
        asked = self._open.setdefault(worker, {})
        own = sum(other.channel == asker.channel for other in asked.values())
        if len(asked) >= MOST or own >= MOST_OF_CHANNEL:
            message = (
                f"{worker} has {len(asked)} questions to answer (at most {MOST}), {own} of this connection (at most "
                f"{MOST_OF_CHANNEL}): try later"
            )
            raise WireError(ErrorCode.OVERLOADED, message, retry_after_ms=100)
        number = next(self._ids)
        asked[number] = asker
        return number

    def answered(self, worker: str, number: int) -> Asker | None:
        """Who asked; None if nobody waits for this."""
        return self._open.get(worker, {}).pop(number, None)

    def worker_gone(self, worker: str) -> list[Asker]:
        """Those who get no answer."""
        return list(self._open.pop(worker, {}).values())
