"""Errors as HTTP answers, in the shape of OpenAI's API."""

from typing import Any, Final

import orjson
from starlette.responses import Response

from protocol.errors import ErrorCode, WireError


class ApiError(Exception):
    """A request that the gateway itself refuses.

    status   the HTTP status
    message  a sentence that names the field, the value and the remedy
    code     the error's name, for programs
    param    the field that is wrong, or None
    """

    def __init__(self, status: int, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


STATUS: Final[dict[ErrorCode, int]] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.UNSUPPORTED: 400,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.CONTEXT_OVERFLOW: 400,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.MODEL_NOT_RUNNING: 503,
    ErrorCode.MODEL_FAILED: 503,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.DRAINING: 503,
    ErrorCode.WORKER_DIED: 502,
    ErrorCode.POISONED: 400,
}
"""HTTP status of each error of the supervisor. Any other error is a 500."""

NAMES: Final[dict[ErrorCode, str]] = {
    ErrorCode.CONTEXT_OVERFLOW: "context_length_exceeded",
}
"""Codes that programs know by another name than ours."""


def type_of(status: int) -> str:
    """Return OpenAI's ``type`` of an error with this HTTP status."""
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(error: ApiError | WireError) -> dict[str, Any]:
    """Return the JSON object that describes an error, as OpenAI's API does."""
    if isinstance(error, ApiError):
        status, code, param, message = error.status, error.code, error.param, error.message
    else:
        status = STATUS.get(error.code, 500)
        code, param, message = NAMES.get(error.code, error.code.wire_name), error.field, error.message
    return {"error": {"message": message, "type": type_of(status), "param": param, "code": code}}


def error_response(error: ApiError | WireError) -> Response:
    """Return the answer to a request that failed before its first byte was sent."""
    headers: dict[str, str] = {}
    if isinstance(error, ApiError):
        status, retry = error.status, error.status in (429, 503)
    else:
        status, retry = STATUS.get(error.code, 500), error.retryable
        if error.retry_after_ms is not None:
            headers["retry-after-ms"] = str(error.retry_after_ms)
            headers["retry-after"] = str(-(-error.retry_after_ms // 1000))
    if not retry:
        headers["x-should-retry"] = "false"
    return Response(orjson.dumps(error_body(error)), status, headers, "application/json")
