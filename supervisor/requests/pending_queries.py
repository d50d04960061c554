"""Remember which client asked a worker a question (tokenize, detokenize), until the worker has answered. Pure."""

from dataclasses import dataclass
from itertools import count

from protocol.codec import encode
from protocol.errors import ErrorCode, WireError
from protocol.messages import Reply
from supervisor.requests.in_flight import ToClient

MOST = 256
"""The most questions that a worker may have to answer at once."""
MOST_OF_PARTY = 32
"""The most questions of one client that a worker may have to answer at once."""


@dataclass(frozen=True, slots=True)
class Asker:
    """The client that has asked.

    channel  the number of its connection
    call     the number that it gave the call
    party    its party, as in ``InFlight``: its channel, or the number of a key
    """

    channel: int
    call: int
    party: int

    def reply(self, body: bytes) -> ToClient:
        """Return the effect that sends the client its answer."""
        return ToClient(self.channel, encode(Reply(self.call, body)))


class PendingQueries:
    """The questions that workers have yet to answer."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._open: dict[str, dict[int, Asker]] = {}

    def begin(self, worker: str, asker: Asker) -> int:
        """Note a question and return its number. Raises WireError (OVERLOADED) if too many are open."""
        asked = self._open.setdefault(worker, {})
        own = sum(other.party == asker.party for other in asked.values())
        if len(asked) >= MOST or own >= MOST_OF_PARTY:
            message = (
                f"{worker} has {len(asked)} questions to answer (at most {MOST}), {own} of this client (at most "
                f"{MOST_OF_PARTY}): try later"
            )
            raise WireError(ErrorCode.OVERLOADED, message, retry_after_ms=100)
        number = next(self._ids)
        asked[number] = asker
        return number

    def answered(self, worker: str, number: int) -> Asker | None:
        """Take note of an answer. Return the client that asked, or None if no client waits for this answer."""
        return self._open.get(worker, {}).pop(number, None)

    def worker_gone(self, worker: str) -> list[Asker]:
        """Forget the questions that a dead worker cannot answer. Return the clients that asked them."""
        return list(self._open.pop(worker, {}).values())
