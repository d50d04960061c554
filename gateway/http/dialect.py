"""Which API a request belongs to, and the errors of Anthropic's API. Pure.

Every error of the gateway is answered in the shape of the API that the request belongs to, also an error that was found
before the request reached its endpoint.
"""

from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.http.errors import ApiError, status_of
from protocol.errors import ErrorCode, WireError

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
    described = {"type": kind, "message": _message(error)}
    return {"type": "error", "error": described, "request_id": request_id}


def _message(error: ApiError | WireError) -> str:
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
