"""The OpenAPI document describes the requests that the gateway accepts."""

import subprocess
import sys
from typing import Any

import jsonschema
import pytest

from gateway.app import API
from gateway.http.notes import Notes
from gateway.openai.foreign_options import ABOUT_THE_ACCOUNT
from gateway.openai.options import OWN, read_chat
from gateway.openai.schema import document
from tests.serving import ROOT, WITHIN

MESSAGES = [{"role": "user", "content": "hello"}]


def body_of(path: str) -> dict[str, Any]:
    schema: dict[str, Any] = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


def test_a_gateway_starts_without_what_only_the_document_needs() -> None:
    source = "import sys, gateway.server; print({'protocol.request', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=WITHIN, cwd=ROOT)
    assert done.stdout == "set()\n", done.stderr


def test_every_endpoint_of_the_api_is_described() -> None:
    paths = {path.replace("{id}", end) for path in document()["paths"] for end in ("{name:path}", "{id:path}")}
    for _, path, _ in API:
        assert {path, f"/v1{path}"} & paths


def test_every_schema_is_valid_and_every_option_is_there() -> None:
    for path in [path for path, described in document()["paths"].items() if "post" in described]:
        jsonschema.Draft202012Validator.check_schema(body_of(path))
    assert set(body_of("/v1/completions")["properties"]) >= (OWN - {"tools", "messages"}) | ABOUT_THE_ACCOUNT


@pytest.mark.parametrize(
    ("options", "valid"),
    [
        ({"temperature": 0.5, "top_k": 5, "stop": ["x"], "seed": None, "min_p": 0.1}, True),
        ({"n": 3, "stream": True, "stream_options": {"include_usage": True}}, True),
        ({"response_format": {"type": "json_object"}, "max_completion_tokens": 5}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, True),
        ({"n": 0}, False),
        ({"nosuch": 1}, True),
        ({"stream": "yes"}, False),
        ({"messages": []}, False),
    ],
)
def test_the_document_and_the_gateway_agree(options: dict[str, Any], valid: bool) -> None:
    body = {"model": "m", "messages": MESSAGES} | options
    assert jsonschema.Draft202012Validator(body_of("/v1/chat/completions")).is_valid(body) == valid
    try:
        read_chat(body, Notes())
    except Exception:
        assert not valid
    else:
        assert valid
