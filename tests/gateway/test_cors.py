"""Only web pages of allowed origins may use the gateway."""

import asyncio
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gateway.http.origin import Cors

CHAT = "https://chat.example.org"


def ask(method: str, **headers: str) -> httpx2.Response:
    """Return the answer of an application without routes behind the middleware. 404: the middleware let it through."""

    async def answer(request: Request) -> Response:
        return PlainTextResponse("answer")

    async def send() -> httpx2.Response:
        app = Starlette(
            routes=[Route("/", answer, methods=["GET", "POST"])], middleware=[Middleware(Cors, origins=[CHAT])]
        )
        transport: Any = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, "/", headers=named)

    return asyncio.run(send())


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "",
        "http://localhost",
        "http://localhost:3000",
        "http://chat.example.org",
        "https://chat.example.org.evil.example",
        "http://localhost:8000.evil.example",
        "http://user@localhost:8000",
        "http://[",
        "http://[::1]localhost:8000",
        "http://localhost:8000/x",
        "foo://localhost:8000",
        "//localhost:8000",
        "localhost:8000",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_of_other_origins_are_refused(origin: str, method: str) -> None:
    response = ask(method, origin=origin, access_control_request_method="POST")
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "unknown_origin"
    assert "gateway.cors_origins" in response.json()["error"]["message"]
    assert not [name for name in response.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("origin", ["http://localhost:8000", "https://LOCALHOST:8000"])
def test_the_own_origin_passes_without_headers_for_others(origin: str) -> None:
    response = ask("POST", origin=origin)
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


def test_a_request_without_an_origin_passes() -> None:
    assert ask("POST").text == "answer"


def test_a_named_origin_reads_the_answer_without_credentials() -> None:
    response = ask("POST", origin=CHAT)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, CHAT)
    assert response.headers["vary"] == "origin"
    assert "retry-after" in response.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in response.headers


def test_a_preflight_of_a_named_origin_is_answered_without_a_token() -> None:
    wanted = "authorization, X-Stainless-Lang, x-modelctl-page"
    response = ask(
        "OPTIONS", origin=CHAT, access_control_request_method="POST", access_control_request_headers=wanted
    )  # fmt: skip
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (204, CHAT)
    assert response.headers["access-control-allow-headers"] == "authorization, x-stainless-lang"
    assert "access-control-allow-credentials" not in response.headers
