"""Errors of the gateway and of the supervisor as HTTP statuses, headers, and bodies in the shape of OpenAI's API."""

import logging
import time
from typing import Any, Final, TypeVar

from starlette.datastructures import Headers
from starlette.types import Scope

from protocol.errors import ErrorCode, WireError

# The HTTP status of each error, and its names in OpenAI's API.
#
# The documentation's table of errors is made of this module, without the packages of the gateway.


STATUS: Final[dict[ErrorCode, int]] = {
    ErrorCode.BAD_FRAME: 400,
    ErrorCode.BAD_VERSION: 502,
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.UNSUPPORTED: 400,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.DUPLICATE_REQUEST: 500,
    ErrorCode.CONTEXT_OVERFLOW: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.MODEL_NOT_RUNNING: 503,
    ErrorCode.MODEL_FAILED: 503,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.DRAINING: 503,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.QUEUE_TIMEOUT: 503,
    ErrorCode.SLOW_CONSUMER: 408,
    ErrorCode.WORKER_DIED: 502,
    ErrorCode.POISONED: 400,
    ErrorCode.HELPER_FAILED: 503,
    ErrorCode.INTERNAL: 500,
    ErrorCode.CONNECTION_LOST: 503,
}
"""HTTP status of each error."""

MEANINGS: Final = {
    400: "Something in the request is wrong or not offered. `param` names it.",
    401: "The request has no token, or one that is not valid.",
    403: "The key lacks a right, or may not use the model. Or a page of another site has sent the request.",
    404: "There is no such model, or the key may not know of it.",
    408: "The body did not come in time, or the client read too slowly.",
    409: "The state of the model does not allow the order.",
    413: "The body or the prompt is too large.",
    415: "The body is compressed, or its charset is not UTF-8.",
    429: "A limit of the key is reached, or the queue is full. `Retry-After` says when to try again.",
    502: "The worker died, and the answer could not go on elsewhere.",
    503: "The model or the supervisor does not answer now. `Retry-After`, if there is one, says when to try again.",
    504: "A deadline of the request has passed, or the supervisor did not answer in time.",
    529: "Anthropic's status for a full queue.",
}
"""The statuses of errors in words, for the OpenAPI document."""

NAMES: Final[dict[ErrorCode, str]] = {
    ErrorCode.CONTEXT_OVERFLOW: "context_length_exceeded",
}
"""Codes that programs know by another name than ours."""


def code_of(code: ErrorCode) -> str:
    """Return the name of an error in answers."""
    return NAMES.get(code, code.wire_name)


def type_of(status: int) -> str:
    """Return OpenAI's ``type`` of an error with this HTTP status."""
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


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


def invalid(place: str, what: str) -> ApiError:
    """Return the error for a field with a wrong value. ``what``: the message without the field, which comes first."""
    return ApiError(400, f"{place} {what}", param=place)


def unsupported(place: str, what: str) -> ApiError:
    """Return the error for a field that asks for what is not offered. ``what``: as in ``invalid``."""
    return ApiError(400, f"{place} {what}", code="unsupported", param=place)


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
    stayed until the garbage collector's next full pass, which hardly ever comes (``gateway.server``).
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
    return {
        "error": {"message": _openai_message(error), "type": type_of(status_of(error)), "param": param, "code": code}
    }


def _openai_message(error: ApiError | WireError) -> str:
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


# Which API a request belongs to, and the errors of Anthropic's API. Pure.
#
# Every error of the gateway is answered in the shape of the API that the request belongs to, also an error that was
# found before the request reached its endpoint.


ROOT: Final = "/messages"
"""The path of Anthropic's API after /v1, and the beginning of its other paths."""
VERSION_HEADER: Final = "anthropic-version"
"""A header that every client of Anthropic's API sends. It tells whose list of models is asked for."""
OVERLOADED: Final = 529
"""Anthropic's status for a server that has too much to do. 429 is for a key that has reached a limit."""
TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""Anthropic's type of error for each status. Other statuses below 500 are of the type of 400."""


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request is one of Anthropic's API: by its path, or by the header that its clients send."""
    path = without_version(scope.get("path", ""))
    if path == ROOT or path.startswith(f"{ROOT}/"):
        return True
    return VERSION_HEADER in Headers(scope=scope)


def without_version(path: str) -> str:
    """Return a path without /v1 at its beginning, however often it stands there."""
    while path.startswith("/v1/"):
        path = path.removeprefix("/v1")
    return path


def anthropic_status(error: ApiError | WireError) -> int:
    """Return the HTTP status of an error in Anthropic's API."""
    code = error.code if isinstance(error, ApiError) else error.code.wire_name
    return OVERLOADED if code == ErrorCode.OVERLOADED.wire_name else status_of(error)


def anthropic_body(error: ApiError | WireError, request_id: str) -> dict[str, Any]:
    """Return the JSON object that describes an error, as Anthropic's API does."""
    status = anthropic_status(error)
    kind = TYPES.get(status, TYPES[400] if status < 500 else "api_error")
    described = {"type": kind, "message": _anthropic_message(error)}
    return {"type": "error", "error": described, "request_id": request_id}


def _anthropic_message(error: ApiError | WireError) -> str:
    """Return the message of an error.

    Clients recognise a prompt that is too long by Anthropic's words, and then shorten the conversation. Claude Code
    also reads the two numbers.
    """
    if isinstance(error, ApiError):
        return error.message
    if error.code is not ErrorCode.CONTEXT_OVERFLOW or error.field == "max_tokens":
        named = error.field is None or error.message.startswith(error.field)
        return error.message if named else f"{error.field}: {error.message}"
    if error.overflow is None:
        return f"prompt is too long: {error.message}"
    tokens, context = error.overflow
    return f"prompt is too long: {tokens} tokens > {context - 1} maximum"


# Read fields of a request that must have one type. Pure.


T = TypeVar("T")
JSON_SCHEMA: Final = "a JSON schema, which is an object"
_TYPES: Final[dict[type, str]] = {str: "a string", bool: "true or false", list: "an array", dict: "an object"}


def checked(place: str, value: Any, kind: type[T], words: str = "") -> T:
    """Return a value of one type. Raises ApiError for another type. ``words``: what the field must be."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise invalid(place, f"must be {words or _TYPES[kind]}")
    return value


def checked_or_none(place: str, value: Any, kind: type[T], words: str = "") -> T | None:
    """Return a value of one type, or None. Raises ApiError for another type. ``words``: what the field must be."""
    return None if value is None else checked(place, value, kind, words)


def string_in(place: str, given: dict[str, Any], name: str) -> str:
    """Return a text of an object. ``place``: where the object stands. Raises ApiError for another type."""
    return checked(f"{place}.{name}", given.get(name), str)


def object_in(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object of a request's body; an empty one for none. Raises ApiError for another type."""
    return checked_or_none(name, body.get(name), dict) or {}
