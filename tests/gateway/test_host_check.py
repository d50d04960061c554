"""The gateway accepts only its own names in a Host header."""

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.http.host_check import HostCheck, host_name


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8000", "localhost"),
        ("127.0.0.1:8000", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[::1]", "::1"),
        ("evil.example", "evil.example"),
        ("localhost.evil.example:80", "localhost.evil.example"),
        ("", ""),
    ],
)
def test_the_host_is_without_port_and_brackets(header: str, host: str) -> None:
    assert host_name(header) == host


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

    scope = {"type": "http", "method": "GET", "headers": [(b"host", host.encode()) for host in hosts]}
    asyncio.run(HostCheck(inner, ["models.example.org"])(scope, receive, send))
    return found[0]


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "192.168.1.5:80", "MODELS.example.org"])
def test_own_names_and_addresses_pass(host: str) -> None:
    assert status(host) == 299


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "", "127.0.0.1.evil.example:80", "a b"])
def test_other_names_are_refused(host: str) -> None:
    assert status(host) == 421


def test_a_request_with_two_hosts_or_none_is_refused() -> None:
    assert status("localhost", "localhost") == 421
    assert status() == 421
