"""Requests of Anthropic's API are read as their senders mean them, and what is not offered is refused by name."""

from typing import Any

import pytest

from gateway.anthropic.blocks import reasoning_in, signature_of
from gateway.anthropic.requests import read_messages, read_request
from gateway.conversation import OMITTED_FILE, OMITTED_IMAGE
from gateway.http.answers import Notes
from gateway.http.errors import ApiError

USER = {"role": "user", "content": "hello"}
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [USER]}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def options(**more: Any) -> Any:
    return read_request(BODY | more, Notes()).wanted.options


def test_a_plain_request() -> None:
    asked = read_request(
        BODY
        | {"stream": True, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "stop_sequences": ["END"]}
        | {"metadata": {"user_id": "u"}, "service_tier": "auto", "some_new_key": [1], "cache_control": None},
        Notes(),
    )
    assert (asked.wanted.model, asked.wanted.stream, asked.thinking) == ("m", True, "none")
    found = asked.wanted.options
    assert found["messages"] == [USER]
    assert found["stop"] == ["END"]
    assert (found["max_tokens"], found["temperature"], found["top_p"], found["top_k"]) == (5, 0.5, 0.9, 4)
    assert "metadata" not in found
    assert asked.wanted.names["stop"] == "stop_sequences"


def test_options_of_modelctl_are_taken_over() -> None:
    found = options(min_p=0.1, priority="batch", stop=None)
    assert (found["min_p"], found["priority"]) == (0.1, "batch")


@pytest.mark.parametrize(
    ("system", "content"),
    [
        ("Be kind.", "Be kind."),
        ([{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}], "Be kind."),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\n\nb"),
        ([{"type": "text", "text": "x-anthropic-billing-header: cc_version=2"}, {"type": "text", "text": "b"}], "b"),
    ],
)
def test_the_system_prompt(system: Any, content: str) -> None:
    assert options(system=system)["messages"] == [{"role": "system", "content": content}, USER]


def test_an_empty_system_prompt_is_none() -> None:
    for system in (None, "", [], [{"type": "text", "text": "x-anthropic-billing-header: x"}]):
        assert options(system=system)["messages"] == [USER]


def test_a_conversation_with_tools_and_thinking() -> None:
    messages: list[Any] = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "of another server"},
                {"type": "redacted_thinking", "data": "secret"},
                {"type": "text", "text": "Let me "},
                {"type": "text", "text": "see."},
                {"type": "tool_use", "id": "1", "name": "look", "input": {"at": 1}, "cache_control": {}},
                {"type": "tool_use", "id": "2", "name": "time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "2", "content": "noon"},
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "dark"}],
                },
                {"type": "tool_result", "tool_use_id": "3"},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    found = options(messages=messages)["messages"]
    assert found[1] == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "I look.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}},
            {"id": "2", "type": "function", "function": {"name": "time", "arguments": {}}},
        ],
    }
    assert found[2:] == [
        {"role": "tool", "content": "noon", "tool_call_id": "2", "name": "time"},
        {"role": "tool", "content": "Error: dark", "tool_call_id": "1", "name": "look"},
        {"role": "tool", "content": "", "tool_call_id": "3"},
        {"role": "user", "content": "and now?"},
    ]


def test_thinking_that_was_not_shown_comes_back_with_its_signature() -> None:
    for text in ("", "Ich denke: „ja“.\n", "x" * 5000):
        block = {"type": "thinking", "thinking": "", "signature": signature_of(text)}
        (message,) = read_messages(None, [{"role": "assistant", "content": [block]}], Notes())
        assert message.get("reasoning_content", "") == text
    for signature in (
        None,
        "",
        "EqQBCkgIARABGAIiQ",
        "modelctl-reasoning-*",
        "modelctl-reasoning-_w==",
        "modelctl-reasoning-ü",
    ):
        assert reasoning_in(signature) == ""


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    found = options(messages=[USER, {"role": "assistant", "content": "Well,"}])
    assert found["continue_final_message"] is True
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    with pytest.raises(ApiError, match="send its result"):
        options(messages=[USER, {"role": "assistant", "content": [call]}])


def test_tools_and_the_choice_among_them() -> None:
    shown = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
    found = options(tools=[TOOL])
    assert (found["tools"], found["tool_choice"]) == ([shown], "auto")
    assert options(tools=[TOOL], tool_choice={"type": "any"})["tool_choice"] == "required"
    named = options(tools=[TOOL, TOOL | {"name": "see"}], tool_choice={"type": "tool", "name": "see"})
    assert (named["tool_choice"], named["allowed_tools"]) == ("required", ["see"])
    assert "tools" not in options(tools=[TOOL], tool_choice={"type": "none"})
    alone = options(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert alone["parallel_tool_calls"] is False
    assert "tools" not in options(tools=[], tool_choice={"type": "auto", "disable_parallel_tool_use": True})


def test_the_model_sees_a_deferred_tool_when_the_client_has_found_it() -> None:
    deferred = TOOL | {"name": "fetch", "defer_loading": True}
    assert [tool["function"]["name"] for tool in options(tools=[TOOL, deferred])["tools"]] == ["look"]
    found: Any = {"type": "tool_reference", "tool_name": "fetch"}
    messages = [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [found]}]},
    ]
    known = options(tools=[TOOL, deferred], messages=messages)
    assert [tool["function"]["name"] for tool in known["tools"]] == ["look", "fetch"]
    assert known["messages"][-1]["content"] == "The tool fetch is available now."


def test_thinking_effort_and_format() -> None:
    on = {"enable_thinking": True, "thinking": True}
    assert "template_kwargs" not in options()
    assert options(thinking={"type": "adaptive"})["template_kwargs"] == on
    limited = options(thinking={"type": "enabled", "budget_tokens": 2000})
    assert (limited["template_kwargs"], limited["reasoning_budget"]) == (on, 2000)
    assert limited["budget_if_reasoning"] is True
    assert options(thinking={"type": "disabled"})["template_kwargs"] == {"enable_thinking": False, "thinking": False}
    for thinking, shown in (
        ({"type": "adaptive", "display": "omitted"}, "signed"),
        ({"type": "adaptive"}, "shown"),
        ({"type": "disabled"}, "none"),
        (None, "none"),
    ):
        assert read_request(BODY | {"thinking": thinking}, Notes()).thinking == shown
    assert options(output_config={"effort": "high"})["template_kwargs"] == {"reasoning_effort": "high"}
    shape = {"type": "json_schema", "schema": {"type": "object"}}
    assert options(output_config={"format": shape})["json_schema"] == {"type": "object"}
    assert options(output_format=shape)["json_schema"] == {"type": "object"}


def test_an_unknown_option_is_ignored_and_said() -> None:
    notes = Notes()
    read_request(BODY | {"speed": "fast", "unheard_of": {}, "metadata": {"user_id": "x"}, "nothing": None}, notes)
    assert notes.ignored == "speed, unheard_of"


def test_what_cannot_be_served_is_left_out_and_said() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    found = {"type": "search_result", "source": "s", "title": "S", "content": [{"type": "text", "text": "R"}]}
    pdf = {"type": "document", "source": {"type": "base64", "data": "AA=="}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    said = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "1", "name": "look", "input": {}},
    ]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image, pdf, document, {"type": "some\nday"}]}
    messages = [
        {"role": "user", "content": [document, found, {"type": "new_block"}]},
        {"role": "assistant", "content": said},
        {"role": "user", "content": [result]},
    ]
    notes = Notes()
    read: Any = read_request(BODY | {"messages": messages, "tools": [TOOL, SEARCH]}, notes).wanted.options
    assert [message["content"] for message in read["messages"]] == [
        "T\n\nD\n\nS\n\nR", "I look.", f"{OMITTED_IMAGE}\n\n{OMITTED_FILE}\n\nT\n\nD"
    ]  # fmt: skip
    assert [tool["function"]["name"] for tool in read["tools"]] == ["look"]
    assert notes.changed.split(", ") == [
        "messages: new_block", "messages: server_tool_use", "messages: web_search_tool_result", "messages: other",
        "tools: web_search", "images: 1", "files: 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "system", "content": []}]}, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "no space", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"model": 5}, "model"),
    ],
)
def test_a_refusal_names_the_place(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_request(BODY | more, Notes())
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.partition("[")[0].partition(".")[0] in caught.value.message
