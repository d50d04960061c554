"""Turn every exception of a request into an answer of its API's shape, also for unknown paths and our own faults."""

from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from gateway.http.callers import caller_of
from gateway.http.dialect import without_version
from gateway.http.errors import FAULT, ApiError
from gateway.http.responses import ErrorAnswer
from protocol.errors import WireError

OFFERED: Final = (
    "GET /v1/models, POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, "
    "/v1/messages/count_tokens, /tokenize and /detokenize; /openapi.json lists all"
)
NOT_OFFERED: Final = (
    ("/embeddings", "embeddings are not offered: these models generate text"),
    ("/audio", "audio is not offered: these models read and write text"),
    ("/images", "images are not offered: these models read and write text"),
    ("/videos", "videos are not offered: these models read and write text"),
    ("/realtime", "the realtime API is not offered"),
    ("/moderations", "moderation is not offered"),
    ("/rerank", "reranking is not offered"),
    ("/responses", "responses cannot be fetched: only POST /v1/responses is offered, which takes previous_response_id"),
    ("/conversations", "conversations are not stored: send the earlier items in the input of /v1/responses"),
    ("/messages/batches", "batches are not offered: send the messages one by one"),
    ("/complete", "Anthropic's older API is not offered: use /v1/messages"),
    ("/assistants", "the Assistants API is not offered: use /v1/chat/completions"),
    ("/threads", "the Assistants API is not offered: use /v1/chat/completions"),
    ("/batches", "batches are not offered: the option priority has the value batch"),
    ("/files", "files are not offered"),
    ("/uploads", "files are not offered"),
    ("/fine_tuning", "fine-tuning is not offered"),
    ("/vector_stores", "vector stores are not offered"),
    ("/model", "models are loaded by their first request, or by POST /v1/models/NAME/load"),
    ("/lora", "adapters belong to their model in models.yaml, and cannot be exchanged"),
    ("/template", "a chat template is its model's own, and cannot be exchanged"),
    ("/api", "the own APIs of Ollama and LM Studio are not offered: choose OpenAI's API, with the base URL /v1"),
)
"""Beginnings of the paths of other APIs, after /v1, each with the reason of the refusal."""


async def refused(request: Request, error: Exception) -> Response:
    """Answer a request that the gateway or the supervisor refuses."""
    assert isinstance(error, ApiError | WireError)
    return ErrorAnswer(error)


async def not_routed(request: Request, error: Exception) -> Response:
    """Answer a request for a path or a method that does not exist. Only a caller with a token hears what there is."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        reason = _not_offered(path)
        nothing = f"there is nothing at {path[:128]!r}"
        if reason is None and not path.startswith("/v1/"):
            return ErrorAnswer(ApiError(404, nothing, code="not_found"))
        code = "unsupported" if reason else "not_found"
        refusal = ApiError(404, f"{reason or nothing}. Offered are {OFFERED}", code=code)
    elif error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        line = "" if error.detail == "Method Not Allowed" else f": {error.detail}"
        message = f"{request.method} is not offered here: use {allowed}{line}"
        refusal = ApiError(405, message, code="method_not_allowed")
    else:
        refusal = ApiError(error.status_code, error.detail)
    try:
        caller_of(request)
    except ApiError as e:
        return ErrorAnswer(e)
    response = ErrorAnswer(refusal)
    response.headers.update(error.headers or {})
    return response


def _not_offered(path: str) -> str | None:
    """Return why a path of another API is refused. None for a path of no API that is known."""
    path = without_version(path)
    return next((why for begin, why in NOT_OFFERED if path == begin or path.startswith(f"{begin}/")), None)


async def left(request: Request, error: Exception) -> Response:
    """Answer a client that disconnected while it sent its request. Nobody reads the answer."""
    return ErrorAnswer(ApiError(408, "the body did not arrive", code="incomplete_body"))


async def failed(request: Request, error: Exception) -> Response:
    """Answer a request that a fault of the gateway ended. The server logs the traceback, and the answer has none."""
    return ErrorAnswer(FAULT)


HANDLERS: Final[dict[type[Exception], ExceptionHandler]] = {
    ApiError: refused,
    WireError: refused,
    HTTPException: not_routed,
    ClientDisconnect: left,
    Exception: failed,
}
"""What answers each exception, for Starlette's ``exception_handlers``."""
