"""Received conversations reach the chat template correctly, and invalid ones are refused with the field's name."""

from typing import Any

import pytest

from protocol.chat import RESERVED
from protocol.codec import pack_body, unpack_body
from protocol.errors import RequestError
from protocol.request import GenerateRequest, parse_generate

SECRET = "the secret of the prompt"
USER = {"role": "user", "content": SECRET}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"for": SECRET}}}


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


def parse(**fields: Any) -> GenerateRequest:
    return parse_generate(pack_body(fields))


def test_the_template_sees_what_was_sent_and_nothing_else() -> None:
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "a", "name": "ada"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "b", "tool_call_id": "c1"},
    ]
    sent = parse(messages=messages, tools=[CALL], template_kwargs={"enable_thinking": False}).for_template()
    assert [{k: list(v) if k == "tool_calls" else v for k, v in m.items()} for m in sent["messages"]] == messages
    assert (sent["tools"], sent["variables"]) == ([CALL], {"enable_thinking": False})
    bare = parse(messages=[USER]).for_template()
    assert bare == {
        "messages": [USER], "tools": None, "variables": {}, "add_generation_prompt": True,
        "continue_final_message": False,
    }  # fmt: skip


def test_what_is_nested_as_deep_as_allowed_reaches_the_template() -> None:
    sent = parse(messages=[USER], tools=[{"a": nested(63)}], template_kwargs={"a": nested(63)}).for_template()
    assert unpack_body(pack_body(sent))["variables"] == {"a": nested(63)}


@pytest.mark.parametrize(
    ("fields", "ends"),
    [({}, True), ({"add_generation_prompt": False}, False), ({"continue_final_message": True}, False)],
)
def test_where_the_text_ends(fields: dict[str, Any], ends: bool) -> None:
    sent = parse(messages=[USER], **fields).for_template()
    assert sent["add_generation_prompt"] is ends
    assert sent["continue_final_message"] is fields.get("continue_final_message", False)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"tools": SECRET}, "tools", "must be an array of maps"),
        ({"tools": [SECRET]}, "tools", "must be a map with strings as keys"),
        ({"tools": [{b"a": 2}]}, "tools", "must be a map with strings as keys"),
        ({"tools": [{}] * 257}, "tools", "at most 256 long"),
        ({"tools": [{"a": nested(64)}]}, "tools", "must not be nested deeper than 64"),
        ({"template_kwargs": {"a": nested(1000)}}, "template_kwargs", "must not be nested deeper than 64"),
        ({"template_kwargs": [1]}, "template_kwargs", "must be a map"),
        *(({"template_kwargs": {name: 1}}, "template_kwargs", "must not set variables") for name in sorted(RESERVED)),
        ({"template_kwargs": {"__x": 1}}, "template_kwargs", "must not set variables"),
        ({"template_kwargs": {SECRET: 1}}, "template_kwargs", "must not set variables"),
        ({"add_generation_prompt": 1}, "add_generation_prompt", "must be true or false"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "cannot be given together with add_generation_prompt",
        ),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages", "tool_calls are an assistant's, not a user's"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages", "content must be a string"),
        ({"messages": [{"role": "assistant", "tool_calls": SECRET}]}, "messages", "must be an array of maps"),
        ({"messages": [{**USER, "name": 5}]}, "messages", "messages.0.name is 5: must be a string"),
        ({"messages": [{**USER, "tool_call_id": "x" * 257}]}, "messages", "at most 256 characters long"),
    ],
)
def test_what_is_no_conversation_is_refused_by_name(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError, match=r"^[^\n]+$") as refused:
        parse(**{"messages": [USER], **fields})
    assert (refused.value.field or "").partition(".")[0] == field
    assert message in refused.value.message
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [CALL]},
        {"template_kwargs": {"a": 1}},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
    ],
)
def test_what_only_a_template_reads_needs_messages(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        parse(prompt="x", **fields)
    assert refused.value.field == next(iter(fields))
    assert "needs messages" in refused.value.message


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tools": [CALL], "tool_choice": "none"}, "tool_choice", "must be"),
        ({"tools": [CALL], "allowed_tools": ["look"]}, "allowed_tools", "needs tool_choice"),
        ({"tools": [CALL], "parallel_tool_calls": False}, "parallel_tool_calls", "needs tool_choice"),
        ({"reasoning_budget": -1}, "reasoning_budget", "at least 0"),
        ({"with_format": 1}, "with_format", "must be true or false"),
        ({"messages": [{**USER, "reasoning_content": "x"}]}, "messages", "reasoning_content is an assistant's"),
        ({"messages": None, "prompt": "x", "with_format": True}, "with_format", "needs messages"),
        ({"messages": None, "prompt": "x", "reasoning_budget": 3}, "reasoning_budget", "needs messages"),
    ],
)
def test_fields_of_reasoning_and_calls(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(**{"messages": [USER], **fields})
    assert (refused.value.field or "").partition(".")[0] == field
    assert message in refused.value.message
    assert SECRET not in str(refused.value)
