"""Errors of the gateway and of the supervisor as HTTP statuses, headers, and bodies in the shape of OpenAI's API."""

import logging
import time
from typing import Any, Final

from gateway.http.statuses import STATUS, code_of, type_of
from protocol.errors import ErrorCode, WireError

log = logging.getLogger(__name__)
RETRY_AFTER_S: Final = 1
"""Seconds after which a client may send a refused request again, if the supervisor does not know better."""


class ApiError(Exception):
    """A request that the gateway itself refuses.

    status   the HTTP status
    message  a sentence that names the field, the value and the remedy
    code     the error's name, for programs
    param    the field that is wrong, or None
    retry    whether the same request may succeed when it is sent again
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "invalid_request",
        param: str | None = None,
        retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry = status, message, code, param, retry


UNREACHABLE: Final = ApiError(503, "the gateway cannot reach the supervisor: tell its operator", code="connection_lost")
"""Stands for a refusal of the gateway's own key. The caller can do nothing about that key, and its name is not his
business."""
FAULT: Final = ApiError(500, "a fault of the gateway: its log says more", code="internal")
"""Stands for any exception that is no refusal. An answer never holds a traceback."""


class OwnKeyLog:
    """Tells the operator that the supervisor refuses the gateway's own key: once a minute, not with every request."""

    EVERY_S: Final = 60.0

    def __init__(self) -> None:
        self._next = 0.0

    def tell(self, error: WireError) -> None:
        """Log the supervisor's refusal, which names the key."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + self.EVERY_S
            log.error("the supervisor refuses this gateway's own key, so requests are answered with 503: %s", error)


_own_key_log = OwnKeyLog()


def for_caller(error: ApiError | WireError) -> ApiError | WireError:
    """Return the error that the caller of the gateway is told. It is another one if the gateway's own key is refused.

    The supervisor names the field on_behalf_of if the caller's key is unknown or has ended, and if the gateway's key
    lacks the right to ask for other keys.

    The error loses its traceback, because the traceback keeps the frames, and with them the body of the request. The
    function that sends the answer is one of these frames, and has the answer with the error. Such a cycle of 45 MiB
    stayed until the garbage collector's next full pass, which hardly ever comes (``gateway.garbage_collection``).
    """
    error.__traceback__ = error.__context__ = None
    if isinstance(error, ApiError):
        return error
    of_field = (error.field or "").removeprefix("route.") == "on_behalf_of"
    if error.code is (ErrorCode.FORBIDDEN if of_field else ErrorCode.UNAUTHORIZED):
        _own_key_log.tell(error)
        return UNREACHABLE
    return WireError(error.code, error.message) if of_field else error  # the caller has sent no such field


def status_of(error: ApiError | WireError) -> int:
    """Return the HTTP status of an error."""
    return error.status if isinstance(error, ApiError) else STATUS[error.code]


def error_body(error: ApiError | WireError) -> dict[str, Any]:
    """Return the JSON object that describes an error, as OpenAI's API does."""
    if isinstance(error, ApiError):
        code, param = error.code, error.param
    else:
        code, param = code_of(error.code), error.field and error.field.removeprefix("route.")
    return {"error": {"message": _message(error), "type": type_of(status_of(error)), "param": param, "code": code}}


def _message(error: ApiError | WireError) -> str:
    """Return the message of an error.

    LiteLLM, LangChain and others recognise a prompt that is too long by OpenAI's sentence. Then they shorten it, or
    choose another model.
    """
    if isinstance(error, ApiError) or error.code is not ErrorCode.CONTEXT_OVERFLOW or error.field == "max_tokens":
        return error.message
    remedy = "Please reduce the length of the messages or the prompt."
    if error.overflow is None:
        return f"This model's maximum context length is exceeded: prompt is too long: {error.message}. {remedy}"
    tokens, context = error.overflow
    return (
        f"This model's maximum context length is {context} tokens. However, your prompt is too long: it has {tokens} "
        f"tokens. {remedy}"
    )


def error_headers(error: ApiError | WireError) -> dict[str, str]:
    """Return the headers that say whether, and when, to send the request again.

    The client packages of OpenAI send a request again after every 408, 409, 429 and 5xx. ``x-should-retry: false``
    stops them where a repetition cannot help.
    """
    after_ms = None if isinstance(error, ApiError) else error.retry_after_ms
    retry = error.retry if isinstance(error, ApiError) else error.retryable
    headers = {"x-should-retry": "true" if retry else "false"}
    if after_ms is not None:
        headers["retry-after-ms"] = str(max(1, after_ms))
    if retry:
        headers["retry-after"] = str(RETRY_AFTER_S if after_ms is None else max(1, -(-after_ms // 1000)))
    if status_of(error) == 401:
        headers["www-authenticate"] = "Bearer"
    return headers
