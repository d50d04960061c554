"""The sequence of requests that Claude Code sends in a task gets answers, from an engine with a context of 64k tokens.

``tests/claude_code.py`` runs Claude Code itself. These requests have the shape of those that version 2.1.330 sends.
"""

import http.client
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import anthropic
import pytest

from gateway.anthropic.blocks import signature_of
from gateway.anthropic.requests import read_request
from gateway.http.answers import Notes
from tests.gateway.asking import ask
from tests.keyed import free_port
from tests.serving import WITHIN, Serving

CACHED = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"file_path": {"type": "string"}, "limit": {"type": "integer", "exclusiveMinimum": 0}},
    "required": ["file_path"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"name": "Read", "description": "Read a file. " * 2000, "input_schema": SCHEMA},
    {"name": "ToolSearch", "description": "Look a tool up.", "input_schema": {"type": "object"}},
    {"name": "DeferredToolPlaceholder", "input_schema": {"type": "object"}, "defer_loading": True},
]
FOUND = {"name": "WebFetch", "description": "Fetch.", "input_schema": {"type": "object"}, "defer_loading": True}
ENVIRONMENT = "# Environment\nYou have been invoked in a directory."
HEADERS = {
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "X-Claude-Code-Session-Id": "fde30f1d-e0f9-4271-b031-78ae8ad48d3b",
}


def body(messages: list[Any], version: int, tools: list[Any] = TOOLS) -> dict[str, Any]:
    """Return the options of a request. ``version`` is in the block for Anthropic's accounts, which differs."""
    return {
        "model": "claude-local",
        "max_tokens": 32_000,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.330.{version}; cc_entrypoint=cli;"},
            {"type": "text", "text": "You are a Claude agent.", **CACHED},
            {"type": "text", "text": "Use your own judgment along the way. " * 2000, **CACHED},
        ],
        "messages": messages,
        "tools": tools,
        "metadata": {"user_id": '{"session_id":"fde30f1d"}'},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "extra_body": {
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        },
    }


def begun(orders: str) -> list[Any]:
    """Return the messages of a task's first request. The last of them is of the role ``system``."""
    blocks = [
        {"type": "text", "text": "<system-reminder>\nBe brief.\n</system-reminder>\n"},
        {"type": "text", "text": orders},
    ]
    return [
        {"role": "user", "content": blocks},
        {"role": "system", "content": [{"type": "text", "text": ENVIRONMENT, **CACHED}]},
    ]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    port = free_port()
    models = {"claude-local": {"model_dir": ".", "engine": "tests.agent_engine:AgentEngine"}}
    with Serving(models, gateway={"listen": port, "auth": "none"}):
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{port}", api_key="none", timeout=WITHIN, max_retries=0, default_headers=HEADERS
    ) as client:
        yield client


def test_it_probes_the_server_and_lists_the_models(port: int, client: anthropic.Anthropic) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("HEAD", "/")
        response = connection.getresponse()
        response.read()
        assert response.status < 500
    (model,) = client.models.list(limit=1000).data
    assert (model.id, model.display_name, model.max_input_tokens) == ("claude-local", "claude-local", 65_536)


def test_a_task_with_two_calls(client: anthropic.Anthropic) -> None:
    messages = begun('call ToolSearch with {"query": "select:WebFetch"}')
    with client.messages.stream(**body(messages, 1)) as stream:
        first = stream.get_final_message()
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    assert first.usage.input_tokens > 10_000
    reference = {"type": "tool_reference", "tool_name": "WebFetch"}
    messages[1]["content"] = ENVIRONMENT  # it is a text in later requests
    messages += [first.to_param(), result_of(first, [reference])]
    messages[-1]["content"].append({"type": "text", "text": 'call WebFetch with {"url": "http://x.example"}'})
    tools = [*TOOLS, FOUND]
    with client.messages.stream(**body(messages, 2, tools)) as stream:
        second = stream.get_final_message()
    assert second.stop_reason == "tool_use"
    messages += [second.to_param(), result_of(second, "Hello, I am x.")]
    with client.messages.stream(**body(messages, 3, tools)) as stream:
        last = stream.get_final_message()
    assert (last.stop_reason, last.content[-1].text) == ("end_turn", "The tool says: Hello, I am x.")  # type: ignore[union-attr]
    counted = {
        name: value for name, value in body(messages, 4, tools).items() if name not in ("max_tokens", "metadata")
    }
    assert client.messages.count_tokens(**counted).input_tokens == last.usage.input_tokens


def result_of(message: Any, content: Any) -> dict[str, Any]:
    """Return the turn with the result of a message's call."""
    result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": content, **CACHED}
    return {"role": "user", "content": [result]}


def test_what_differs_between_requests_leaves_the_beginning_of_the_prompt_as_it_is() -> None:
    messages = begun("hello")
    answer = [{"type": "thinking", "thinking": "", "signature": "x"}, {"type": "text", "text": "Hi."}]
    later = [messages[0], {"role": "system", "content": ENVIRONMENT}, {"role": "assistant", "content": answer}]
    later.append({"role": "user", "content": "and now?"})
    first: Any = read_request(body(messages, 1), Notes()).wanted.options["messages"]
    second: Any = read_request(body(later, 2), Notes()).wanted.options["messages"]
    assert second[: len(first)] == first
    assert [message["role"] for message in second] == ["system", "user", "system", "assistant", "user"]


def test_the_prompt_of_each_request_begins_with_the_whole_prompt_before(port: int) -> None:
    """So a model's cache holds all but the end. Versions 2.1.330 and 2.1.332 were recorded, which write the number of
    tokens that are left into each turn of a user and each result, for the name of a model of Anthropic's."""

    def left(tokens: int) -> dict[str, Any]:
        told = f"<system-reminder>\n<total_tokens>{tokens} tokens left</total_tokens>\n</system-reminder>"
        return {"type": "text", "text": told}

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    thought = {"type": "thinking", "thinking": "", "signature": signature_of("I need the tool for that.")}
    called = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a.png"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image, left(14_978_191)]}
    turns: list[Any] = [
        {"role": "user", "content": [left(15_000_000), {"type": "text", "text": "Look at a.png."}]},
        {"role": "assistant", "content": [thought, called]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": [{"type": "text", "text": "I cannot see it."}]},
        {"role": "user", "content": [left(15_000_000), {"type": "text", "text": "And now?"}]},
    ]
    prompts = []
    for version, count in enumerate((1, 3, 5), 1):
        read: Any = read_request(body(turns[:count], version), Notes()).wanted.options
        prompts.append(ask(port, "/apply-template", {"model": "claude-local", "messages": read["messages"]})["prompt"])
    assert "14978191" in prompts[1]
    assert prompts[1].startswith(prompts[0])
    assert prompts[2].startswith(prompts[1])


def test_a_conversation_that_has_grown_too_long_is_refused_with_both_numbers(client: anthropic.Anthropic) -> None:
    asked = body(begun("x" * 4 * 65_536), 1)
    with (
        pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d{5,6} tokens > 65535 maximum"),
        client.messages.stream(**asked) as stream,
    ):
        stream.get_final_message()
