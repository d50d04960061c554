"""What the streams of both clients share.

The modules ``sync_streams`` and ``async_streams`` beside this one add how a program waits for the next event.
"""

from collections.abc import Callable
from typing import Any

from protocol.client.answers import Completion, Delta, Progress, StreamState, TokenLogprob
from protocol.client.connection import Connection
from protocol.messages import FinishReason

OnProgress = Callable[[Progress], None]


class StreamBase:
    """The part of one request's answer that was read."""

    def __init__(
        self, connection: Connection, state: StreamState, timeout: float | None, on_progress: OnProgress | None
    ) -> None:
        self._connection = connection
        self._state = state
        self._timeout = timeout
        self._on_progress = on_progress
        self._left = False
        self._cut = False
        """Whether the reader left before it had read the end."""

    @property
    def request_id(self) -> int:
        """The number of the request on its connection."""
        return self._state.id

    @property
    def accepted(self) -> dict[str, Any] | None:
        """The supervisor's message ACCEPTED: the model, the place in the queue, ... None until it has arrived."""
        return self._state.accepted

    @property
    def text(self) -> str:
        """The text that was read so far."""
        return "".join(self._state.text)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that were read so far."""
        return tuple(self._state.token_ids)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the tokens that were read so far, if the request asked for them."""
        return tuple(self._state.logprobs)

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended: "stop", "length", "cancelled" or "banned_strings".

        It is known when the end has been read. A reader that left before the end finds "cancelled". It is None until
        then, and for an answer that ended with an error.
        """
        if self._cut:
            return FinishReason.CANCELLED
        return None if self._state.deltas else self._state.finish_reason

    @property
    def usage(self) -> dict[str, Any]:
        """Counts of tokens, like ``Completion.usage``. Empty until the end has been read."""
        return {} if self._state.deltas else self._state.usage

    @property
    def timings(self) -> dict[str, Any]:
        """Measured times, like ``Completion.timings``. Empty until the end has been read."""
        return {} if self._state.deltas else self._state.timings

    def cancel(self) -> None:
        """Ask the supervisor to end the request. The stream then brings its end as usual.

        It does nothing when the request has ended. With ``Client``, a signal handler may call it.
        """
        self._connection.cancel(self._state)

    def close(self) -> None:
        """Cancel the request, unless it has ended, and drop what was not read. A second call does nothing."""
        self._connection.check()
        self._leave()
        if not self._state.abandoned:
            self._connection.drop(self._state)

    def __del__(self) -> None:
        # the constructor may have failed
        if hasattr(self, "_left"):
            self._abandon()

    def _abandon(self) -> None:
        self._leave()
        self._connection.abandon(self._state)

    def _leave(self) -> None:
        self._cut = self._cut or not self._over
        self._left = True

    def _now(self) -> Delta | None:
        """The next delta, if it has come; None if there is none yet or (``_over``) will be none.

        Raises how the request ended, and what ``on_progress`` raises.
        """
        if self._left:
            return None
        report, self._state.report = self._state.report, None
        if report is not None and self._on_progress is not None:
            self._on_progress(report)
        return self._connection.take(self._state)

    @property
    def _over(self) -> bool:
        """Nothing will come any more, and what came was taken."""
        return self._left or (self._state.ended and not self._state.deltas and self._state.error is None)

    @property
    def _stirred(self) -> bool:
        """Whether ``_now`` has something to do."""
        state = self._state
        return self._left or state.ended or bool(state.deltas) or state.report is not None

    def _completion(self) -> Completion:
        return Completion(self.text, self.token_ids, self.finish_reason or "", self.usage, self.timings, self.logprobs)
