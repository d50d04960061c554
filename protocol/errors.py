"""The errors of the wire protocol, and the exceptions that carry them.

WireError           an error with a code; ``WireError.to_wire()`` is the map that crosses a socket
├── FrameError      bytes that are not a message of this protocol (answered or dropped, always counted)
├── RequestError    a request that cannot be served as asked; names the field
└── ConnectionLost  the client's connection ended; raised by the client library only

Messages say what to do. They never hold a prompt, an answer or a key.
"""

import copy
import copyreg
from enum import IntEnum
from typing import Any, Self

from protocol.messages import Kind


class ErrorCode(IntEnum):
    """The stable numbers of the errors. The name on the wire is the member's name in lower case."""

    # The text below each code has two paragraphs: what happened, and what to do. tools/docs/errors.py reads them.
    BAD_FRAME = 100
    """The bytes are not a message of this protocol.

    Mend the client as the message says."""
    BAD_VERSION = 101
    """The frame has another major version of the protocol.

    Install the client of the supervisor's version, which ``modelctl status`` shows."""
    INVALID_REQUEST = 102
    """``field`` of the request is unknown, has the wrong type, or is out of range.

    Change the field as the message says."""
    UNSUPPORTED = 103
    """This socket, model or engine does not offer the message, the verb or the option.

    Leave the option out, or use another engine. Send orders to the admin socket."""
    TOO_LARGE = 104
    """The frame is larger than its kind may be.

    Send less: a shorter prompt or a smaller schema. The message has the limit."""
    DUPLICATE_REQUEST = 105
    """Another request of this connection has the number, and goes on.

    Use each number once per connection."""
    CONTEXT_OVERFLOW = 106
    """Prompt and max_tokens do not fit the model's context.

    Shorten the prompt, lower max_tokens, or raise max_seq_len in models.yaml."""
    UNAUTHORIZED = 200
    """The key, or the HTTP key for which a gateway asks, is not on the list, was revoked, or has expired.

    See ``modelctl keys list`` on the supervisor's machine. ``modelctl keys new`` makes a key."""
    FORBIDDEN = 201
    """The key lacks the right for this message, or may not use this model.

    Use a key with that right or model: ``modelctl keys new NAME --rights ... --models ...``."""
    MODEL_NOT_FOUND = 300
    """No model of that name is configured.

    ``modelctl ps`` lists the names. A new model needs an entry in models.yaml and ``modelctl reload``."""
    MODEL_NOT_RUNNING = 301
    """The model was stopped.

    Start it: ``modelctl start MODEL``."""
    MODEL_FAILED = 302
    """The model could not be loaded, or its worker ended too often.

    With ``retry_after_ms`` the GPU had no room: retry after that time. Otherwise ``modelctl status MODEL`` and
    ``modelctl logs MODEL`` have the reason. Mend it, then ``modelctl start MODEL``."""
    OVERLOADED = 303
    """The model's queue is full: max_queue requests, or max_queue_tokens tokens of prompts.

    Retry after ``retry_after_ms``. If it happens often, add replicas or raise max_queue in models.yaml."""
    RATE_LIMITED = 304
    """The key has reached one of its limits, or the connection sent messages faster than the supervisor handles
    them.

    Retry after ``retry_after_ms``. ``modelctl keys list`` shows the limits."""
    DRAINING = 305
    """The model or the supervisor is being stopped, and takes no new requests.

    Retry when it has been started again."""
    DEADLINE_EXCEEDED = 401
    """deadline_ms passed before the answer was complete, or ttft_ms before its first token.

    Allow more time, or ask for fewer tokens. ``modelctl status MODEL`` shows how many requests wait."""
    QUEUE_TIMEOUT = 402
    """The request waited for a worker longer than its queue_ms.

    Retry later, or allow more time. ``modelctl status MODEL`` shows how many requests wait."""
    SLOW_CONSUMER = 403
    """The client read this stream too slowly.

    Read faster, or cancel a stream that you do not need. supervisor.stall in models.yaml is the time limit."""
    WORKER_DIED = 500
    """The worker ended before the answer did, and no other worker could go on with it.

    Send the request again. ``modelctl logs MODEL`` says why the worker ended."""
    POISONED = 504
    """This request, or one with the same payload, is blamed for deaths of workers.

    Do not send it again: the supervisor refuses it for a while (supervisor.poison.window). ``modelctl logs MODEL``
    says how the workers died."""
    HELPER_FAILED = 505
    """The helper process for chat templates or constraints was killed or hung, twice in a row. The request is not to
    blame.

    Send the request again. If it fails again, check the machine's memory and processor load."""
    INTERNAL = 599
    """A fault of the supervisor or of a worker itself.

    Report the fault with the lines of ``modelctl logs`` and ``modelctl logs MODEL``."""
    CONNECTION_LOST = 600
    """The connection to the supervisor ended. Never on the wire: the client library raises it.

    See ``modelctl status``: does the supervisor run? The next request connects anew; nothing is sent twice."""

    @property
    def wire_name(self) -> str:
        """The name on the wire."""
        return self.name.lower()


RETRYABLE = frozenset(
    {
        ErrorCode.OVERLOADED, ErrorCode.RATE_LIMITED, ErrorCode.DRAINING, ErrorCode.QUEUE_TIMEOUT,
        ErrorCode.WORKER_DIED, ErrorCode.HELPER_FAILED, ErrorCode.CONNECTION_LOST,
    }
)  # fmt: skip


class WireError(Exception):
    """An error with a code. All errors of a request or a call are of this class.

    code            an ErrorCode
    message         a sentence for people: what is wrong and what to do
    field           the field of the request that is wrong, or None
    retry_after_ms  milliseconds after which a retry may help, or None
    overflow        for CONTEXT_OVERFLOW, if the prompt was counted: its tokens, and the tokens of the model's context
    index           the index of the request that ended with the error, for ``Client.choices``; else None
    """

    index: int | None = None

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        field: str | None = None,
        retry_after_ms: int | None = None,
        overflow: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.overflow = overflow

    @property
    def retryable(self) -> bool:
        """True if the same request may succeed when it is sent again. ``retry_after_ms`` says when, so it says this."""
        return self.code in RETRYABLE or self.retry_after_ms is not None

    def __str__(self) -> str:
        return f"{self.code.wire_name}: {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own method calls the class with ``args``, which are not the arguments of this constructor. Then
        # the error could not be copied, and multiprocessing.Pool would wait for ever for an error that it cannot read.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def again(self) -> Self:
        """Return a copy. Raise the copy where the error itself is kept and raised more than once, because each raise
        adds a traceback, which keeps stack frames and their objects in memory."""
        return copy.copy(self)

    def to_wire(self) -> dict[str, Any]:
        """Return the error as a map for a message."""
        wire: dict[str, Any] = {
            "code": int(self.code),
            "name": self.code.wire_name,
            "message": self.message,
            "retryable": self.retryable,
        }
        if self.field is not None:
            wire["field"] = self.field
        if self.retry_after_ms is not None:
            wire["retry_after_ms"] = self.retry_after_ms
        if self.overflow is not None:
            wire["prompt_tokens"], wire["context"] = self.overflow
        return wire

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> "WireError":
        """Return the exception for an error map that was received. An unknown code becomes INTERNAL."""
        message = str(wire.get("message", ""))
        try:
            code = ErrorCode(wire.get("code", ErrorCode.INTERNAL))
        except ValueError:
            code, message = ErrorCode.INTERNAL, f"{wire.get('name')}: {message}"
        prompt, context = wire.get("prompt_tokens"), wire.get("context")
        return WireError(
            code,
            message,
            field=wire.get("field"),
            retry_after_ms=wire.get("retry_after_ms"),
            overflow=(prompt, context) if isinstance(prompt, int) and isinstance(context, int) else None,
        )


class FrameError(WireError):
    """The bytes are not a message of this protocol.

    kind    the frame's kind, None if it cannot be read
    number  the number of the request or call that the frame names, 0 if it names none that can be read
    """

    def __init__(
        self, code: ErrorCode, message: str, *, kind: Kind | None = None, number: int = 0, field: str | None = None
    ) -> None:
        super().__init__(code, message, field=field)
        self.kind, self.number = kind, number


class RequestError(WireError):
    """A request that cannot be served as it was asked. By default its code is INVALID_REQUEST."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        code: ErrorCode = ErrorCode.INVALID_REQUEST,
        overflow: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(code, message, field=field, overflow=overflow)


class ConnectionLost(WireError):
    """The connection to the supervisor ended. Every unfinished request raises it once."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.CONNECTION_LOST, message)
