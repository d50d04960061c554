"""The OpenAPI document describes the requests that the gateway accepts."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from gateway.app import API
from gateway.http.answers import Notes
from gateway.openai.foreign_options import ABOUT_THE_ACCOUNT
from gateway.openai.requests import OWN, read_chat
from gateway.openai.schema import document
from gateway.orders import options_of
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
    paths = {
        path.replace("{id}", end)
        for path in document()["paths"]
        for end in ("{name:path}", "{id:path}", "{model:path}")
    }
    for _, path, _ in API:
        assert {path, f"/v1{path}"} & paths
    assert set(
        document()["paths"]["/v1/keys/{name}"]["patch"]["requestBody"]["content"]["application/json"]["schema"][
            "properties"
        ]
    ) == set(options_of("set_key", ["name"]))


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document()["paths"].items():
        for method, described in methods.items():
            yield f"{method.upper()} {path}", described


def test_no_option_and_no_endpoint_is_without_a_description() -> None:
    bare = []
    for name, described in operations():
        texts = {"": described.get("description"), "summary": described.get("summary")}
        texts |= {each["name"]: each.get("description") for each in described.get("parameters", ())}
        if "requestBody" in described:
            properties = described["requestBody"]["content"]["application/json"]["schema"]["properties"]
            texts |= {option: schema.get("description") for option, schema in properties.items()}
        bare += [f"{name} {option}" for option, text in texts.items() if not text or not text.strip().endswith(".")]
    assert bare == []


def test_every_answer_is_described_with_its_errors() -> None:
    shared = document()["components"]["responses"]
    for name, described in operations():
        assert described["tags"][0] in [tag["name"] for tag in document()["tags"]]
        for status, answer in described["responses"].items():
            found = shared[answer["$ref"].rpartition("/")[2]] if "$ref" in answer else answer
            assert found["description"], (name, status)
        assert {"200", "503"} <= described["responses"].keys(), name
        if described.get("security") is None:
            assert {"400", "401", "403", "default"} <= described["responses"].keys(), name
    anthropic = document()["paths"]["/v1/messages"]["post"]["responses"]["529"]["$ref"].rpartition("/")[2]
    assert shared[anthropic]["content"]["application/json"]["schema"]["properties"]["type"] == {"const": "error"}


def test_descriptions_are_those_of_the_page_of_options() -> None:
    """Options of this project are described at one place, from which docs/http-api.md is made, too."""
    shown = body_of("/v1/completions")["properties"]
    assert shown["min_p"]["description"] == "Drop tokens less likely than this share of the likeliest; 0 is off."
    assert (shown["min_p"]["default"], shown["priority"]["default"]) == (0.0, "normal")
    assert shown["priority"]["description"].startswith("Share of the workers while other requests wait: `interactive`")
    assert shown["max_new_tokens"]["description"] == "Another name of `max_tokens`."
    assert shown["cache_prompt"]["description"] == "An option of llama-server. It changes nothing here."
    assert body_of("/v1/responses")["properties"]["top_logprobs"]["description"].startswith("Not offered: ")
    page = (ROOT / "docs" / "http-api.md").read_text()
    parts = (
        "http-endpoints",
        "http-orders",
        "http-options",
        "request-options",
        "responses-options",
        "anthropic-options",
    )
    for name in parts:
        assert f"<!-- part: {name} -->" in page


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
