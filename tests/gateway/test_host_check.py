"""The gateway accepts only its own names in a Host header."""

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.http.origin import HostCheck


def status(*hosts: str) -> int:
    """Return the status of a request with these Host headers. 299: the check let it through."""
    found: list[int] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    scope = {"type": "http", "method": "GET", "headers": [(b"host", host.encode("latin-1")) for host in hosts]}
    asyncio.run(HostCheck(inner, ["models.example.org"])(scope, receive, send))
    return found[0]


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8000",
        "127.0.0.1",
        "[::1]:8000",
        "[::1]",
        "192.168.1.5:80",
        "MODELS.example.org",
        "localhost.",
        "models.example.org.:443",
        "[fe80::1%25eth0]:80",
    ],
)
def test_own_names_and_addresses_pass(host: str) -> None:
    assert status(host) == 299


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "",
        "127.0.0.1.evil.example:80",
        "a b",
        "[::1]evil.com",
        "[::1]:80evil.com",
        "[::1",
        "::1",
        "[127.0.0.1]",
        "[::1%evil.com]",
        "localhost:evil.com",
        "localhost:80@evil.com",
        "user@localhost",
        "127.0.0.1:evil.com",
        "localhost,evil.com",
        "localhost/",
        "l\xf6calhost",
        "127.1",
        "2130706433",
    ],
)
def test_other_names_are_refused(host: str) -> None:
    assert status(host) == 421


def test_a_request_with_two_hosts_or_none_is_refused() -> None:
    assert status("localhost", "localhost") == 421
    assert status() == 421
