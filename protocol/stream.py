"""What the streams of both clients have in common: everything but the waiting."""

from typing import Any

from protocol.answers import Completion, Delta, StreamState, TokenLogprob
from protocol.connection import Connection


class StreamBase:
    """The answer to one request, as far as it was read."""

    def __init__(self, connection: Connection, state: StreamState) -> None:
        self._connection = connection
        self._state = state

    @property
    def request_id(self) -> int:
        """This client's number for the request."""
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
        """Once the answer was read to its end why it ended (protocol.messages.FinishReason), else None."""
        return None if self._state.deltas else self._state.finish_reason

    @property
    def usage(self) -> dict[str, Any]:
        """{prompt_tokens, completion_tokens, ...} at the end, else empty."""
        return {} if self._state.deltas else self._state.usage

    @property
    def timings(self) -> dict[str, Any]:
        """What the worker measured, in the unit that each name ends with, at the end, else empty."""
        return {} if self._state.deltas else self._state.timings

    def cancel(self) -> None:
        """Asks for the end of the request, which is then read as usual. Does nothing when it has ended."""
        self._connection.check_thread()
        self._connection.session.cancel(self._state)
        if self._connection.waits_to_send:
            self._connection.pump()

    def close(self) -> None:
        """Cancels the request, unless it has ended, and drops what was not read. Repeating it does nothing."""
        self._connection.check_thread()
        self._abandon()

    def __del__(self) -> None:
        # the constructor may have failed
        if hasattr(self, "_state"):
            self._abandon()

    def _abandon(self) -> None:
        self._connection.abandon(self._state)

    def _take(self) -> Delta | None:
        """The next delta; None if there is none yet, or (``ended``) will be none."""
        delta = self._connection.session.take(self._state)
        # Only with a delta in hand: a pump after None could end the stream with an error that nobody takes any more.
        if delta is not None and self._connection.waits_to_send:
            self._connection.pump()
        return delta

    def _completion(self) -> Completion:
        return Completion(self.text, self.token_ids, self.finish_reason or "", self.usage, self.timings, self.logprobs)
