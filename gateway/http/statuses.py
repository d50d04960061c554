"""The HTTP status of each error, and its names in OpenAI's API.

The documentation's table of errors is made of this module, without the packages of the gateway.
"""

from typing import Final

from protocol.errors import ErrorCode

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
