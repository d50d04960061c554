"""Ask a gateway over HTTP, with the standard library only."""

import http.client
import json
from collections.abc import Mapping
from contextlib import closing
from types import MappingProxyType
from typing import Any

from tests.serving import WITHIN, Serving


def described(serving: Serving) -> dict[str, Any]:
    """Return the section about the gateway in the reply to ``status``."""
    gateway: dict[str, Any] = serving.overview()["supervisor"]["gateway"]
    return gateway


def ask(
    port: int, path: str, body: dict[str, Any] | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> Any:
    """Return the JSON of an answer, or its bytes if it is no JSON. Raises AssertionError if the status is not 200."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
        assert response.status == 200, text
        return json.loads(text) if response.headers.get_content_type() == "application/json" else text


def begin(connection: http.client.HTTPConnection, body: dict[str, Any]) -> http.client.HTTPResponse:
    """Ask for a stream, and return the response after its first line has come."""
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}))
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return response
