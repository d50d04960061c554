"""What the streams of both clients have in common: everything but the waiting."""

from collections.abc import Callable
from typing import Any

from protocol.answers import Completion, Delta, Progress, StreamState, TokenLogprob
from protocol.connection import Connection
from protocol.messages import FinishReason

OnProgress = Callable[[Progress], None]


class StreamBase:
    """The answer to one request, as far as it was read."""

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
        """This connection's number for the request."""
        return self._state.id

    @property
    def accepted(self) -> dict[str, Any] | None:
        """What the supervisor said when it took the request: {model, queue_position, ...}; None until it did."""
        return self._state.accepted

    @property
    def text(self) -> str:
        """All text read so far."""
        return "".join(self._state.text)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of all tokens read so far."""
        return tuple(self._state.token_ids)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Those of all tokens read so far, if the request asked for logprobs."""
        return tuple(self._state.logprobs)

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended (protocol.messages.FinishReason). It is known once the reader has read the end, and is
        "cancelled" once the reader has left before that. None until then, and for an answer that ended with an
        error."""
        if self._cut:
            return FinishReason.CANCELLED
        return None if self._state.deltas else self._state.finish_reason

    @property
    def usage(self) -> dict[str, Any]:
        """Counts of tokens at the end, as ``Completion.usage`` has them, else empty."""
        return {} if self._state.deltas else self._state.usage

    @property
    def timings(self) -> dict[str, Any]:
        """What was measured, as ``Completion.timings`` has it, at the end, else empty."""
        return {} if self._state.deltas else self._state.timings

    def cancel(self) -> None:
        """Asks for the end of the request, which is then read as usual. Does nothing when it has ended.

        With ``Client``, a signal handler may call it, too.
        """
        self._connection.cancel(self._state)

    def close(self) -> None:
        """Cancels the request, unless it has ended, and drops what was not read. Repeating it does nothing."""
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
