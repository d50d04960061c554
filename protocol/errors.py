"""Errors as they stand on the wire, and the exceptions that carry them.

WireError           an error with a code; what crosses a socket is ``WireError.to_wire()``
├── FrameError      bytes that are not a message of this protocol (answered or dropped, always counted)
├── RequestError    a request that cannot be served as asked; names the field
└── ConnectionLost  the client's connection ended; raised by the client library only

Messages say what to do. They never hold a prompt, an answer or a key.
"""

from enum import IntEnum
from typing import Any

from protocol.messages import Kind


class ErrorCode(IntEnum):
    """Stable numbers. The name on the wire is the member's name in lower case."""

    BAD_FRAME = 100
    """The bytes are not a message of this protocol."""
    BAD_VERSION = 101
    """The frame speaks another major version of the protocol."""
    INVALID_REQUEST = 102
    """A field of the request is unknown, has the wrong type, or is out of range. ``field`` names it."""
    UNSUPPORTED = 103
    """The kind, verb or option is known to the protocol, but not offered here."""
    TOO_LARGE = 104
    """The frame is larger than its kind may be."""
    DUPLICATE_REQUEST = 105
    """The request id is already in use on this connection. The request that uses it goes on."""
    CONTEXT_OVERFLOW = 106
    """Prompt and max_tokens do not fit the model's context."""
    UNAUTHORIZED = 200
    """The key is not on the supervisor's list, or not any more. Over TCP only."""
    FORBIDDEN = 201
    """The key has not the right that this takes: infer, status or admin. Over TCP only."""
    MODEL_NOT_FOUND = 300
    """No model of that name is configured."""
    MODEL_NOT_RUNNING = 301
    """The model is stopped; an operator has to start it."""
    MODEL_FAILED = 302
    """The model could not be loaded or crashed too often; an operator has to start it."""
    OVERLOADED = 303
    """The model's queue is full. Retry after ``retry_after_ms``."""
    RATE_LIMITED = 304
    """The key has reached its limit of unfinished requests or of tokens a minute, or the connection sent messages
    faster than the supervisor handles them. Retry after ``retry_after_ms``."""
    DRAINING = 305
    """The model, or the supervisor, is being stopped and takes no new requests."""
    DEADLINE_EXCEEDED = 401
    """The request's deadline_ms, or its ttft_ms, passed before it was done."""
    QUEUE_TIMEOUT = 402
    """The request waited for a worker longer than its queue_ms."""
    SLOW_CONSUMER = 403
    """The client read its stream too slowly and this stream was ended."""
    WORKER_DIED = 500
    """The process that computed the answer ended before it was finished."""
    POISONED = 504
    """Deaths of workers are blamed on this request, or on one with the same payload. The supervisor does not try it
    again for a while."""
    HELPER_FAILED = 505
    """The helper process that renders chat templates, or the one that tries constraints, was killed or stood still,
    twice in a row. The request is not to blame. Retry."""
    INTERNAL = 599
    """A fault of the supervisor or worker itself. Its log says more."""
    CONNECTION_LOST = 600
    """The connection to the supervisor ended. Never on the wire: the client library raises it."""

    @property
    def wire_name(self) -> str:
        return self.name.lower()


RETRYABLE = frozenset(
    {
        ErrorCode.OVERLOADED, ErrorCode.RATE_LIMITED, ErrorCode.DRAINING, ErrorCode.QUEUE_TIMEOUT,
        ErrorCode.WORKER_DIED, ErrorCode.HELPER_FAILED, ErrorCode.CONNECTION_LOST,
    }
)  # fmt: skip


class WireError(Exception):
    """An error with a code, as a client sees it.

    code            see ErrorCode
    message         one sentence for a person: what is wrong and what to do
    field           the offending field of the request, or None
    retry_after_ms  when a retry may help, in milliseconds, or None
    index           which choice of several it ended, set by the client library's ``choices``
    """

    index: int | None = None

    def __init__(
        self, code: ErrorCode, message: str, *, field: str | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms

    @property
    def retryable(self) -> bool:
        return self.code in RETRYABLE

    def __str__(self) -> str:
        return f"{self.code.wire_name}: {self.message}"

    def again(self) -> "WireError":
        """Return a copy. Raise the copy where the error itself is kept and raised more than once.

        The reason is that each raise adds a traceback to the exception. The traceback keeps the stack frames and all
        objects that they refer to in memory.
        """
        return WireError(self.code, self.message, field=self.field, retry_after_ms=self.retry_after_ms)

    def to_wire(self) -> dict[str, Any]:
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
        return wire

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> "WireError":
        """The exception for an error map received. A code unknown here becomes INTERNAL, its name in the message."""
        message = str(wire.get("message", ""))
        try:
            code = ErrorCode(wire.get("code", ErrorCode.INTERNAL))
        except ValueError:
            code, message = ErrorCode.INTERNAL, f"{wire.get('name')}: {message}"
        return WireError(code, message, field=wire.get("field"), retry_after_ms=wire.get("retry_after_ms"))


class FrameError(WireError):
    """Bytes that are not a message of this protocol.

    kind    the frame's kind, None if it cannot be read
    number  the number of the request or call that the frame names, 0 if it names none that can be read
    """

    def __init__(
        self, code: ErrorCode, message: str, *, kind: Kind | None = None, number: int = 0, field: str | None = None
    ) -> None:
        super().__init__(code, message, field=field)
        self.kind, self.number = kind, number


class RequestError(WireError):
    """A request that cannot be served as asked, by default INVALID_REQUEST naming the field."""

    def __init__(self, message: str, *, field: str | None = None, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> None:
        super().__init__(code, message, field=field)


class ConnectionLost(WireError):
    """The connection ended; raised exactly once per unfinished request, and by calls made afterwards."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.CONNECTION_LOST, message)

    def again(self) -> "ConnectionLost":
        return ConnectionLost(self.message)
