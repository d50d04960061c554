"""Requests of OpenAI's Responses API are read as their senders mean them; what is not offered is refused by name."""

from typing import Any

import jsonschema
import pytest

from gateway.conversation import OMITTED_IMAGE
from gateway.http.answers import Notes
from gateway.http.errors import ApiError
from gateway.openai.schema import document
from gateway.responses.requests import read_request

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "name": "look", "description": "Look.", "parameters": {"type": "object"}, "strict": True}
SEARCH = {"type": "web_search", "external_web_access": False}
PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
AGENTS = {
    "type": "namespace",
    "name": "agents_",
    "description": "Of agents.",
    "tools": [
        {"type": "function", "name": "_wait", "description": "Wait.", "parameters": {"type": "object"}},
        {"type": "function", "name": "end", "parameters": {"type": "object"}},
        PATCH,
    ],
}
BODY: dict[str, Any] = {"model": "m", "input": "hello"}


def options(**more: Any) -> Any:
    return read_request(BODY | more, Notes()).wanted.options


def test_a_text_is_a_conversation() -> None:
    assert options()["messages"] == [USER]
    assert options(instructions="Be kind.")["messages"] == [{"role": "system", "content": "Be kind."}, USER]


def test_items_of_a_longer_conversation() -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {
            "type": "reasoning", "id": "rs_1", "status": "completed", "encrypted_content": None, "summary": [],
            "content": [{"type": "reasoning_text", "text": "I look."}],
        },
        {
            "type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "phase": "commentary",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call", "id": "fc_1", "status": "completed", "call_id": "1", "name": "look",
            "arguments": '{"at":1}',
        },
        {"type": "function_call", "call_id": "2", "name": "time", "arguments": ""},
        {"type": "function_call_output", "call_id": "1", "output": "dark"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "why?"},
    ]  # fmt: skip
    assert options(input=items)["messages"] == [
        {"role": "system", "content": "Be kind."},
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I look.",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}},
                {"id": "2", "type": "function", "function": {"name": "time", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "dark", "tool_call_id": "1", "name": "look"},
        {"role": "tool", "content": "noon", "tool_call_id": "2", "name": "time"},
        {"role": "assistant", "content": "No.", "reasoning_content": "Short."},
        {"role": "user", "content": "why?"},
    ]


def test_options() -> None:
    found = options(
        max_output_tokens=7, temperature=0.5, top_k=3, reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "object"}}},
        store=True, metadata={"a": "b"}, user="u", truncation="disabled", include=["reasoning.encrypted_content"],
        background=False, previous_response_id=None, max_tool_calls=3, parallel_tool_calls=True,
    )  # fmt: skip
    assert (found["max_tokens"], found["temperature"], found["top_k"]) == (7, 0.5, 3)
    assert found["template_kwargs"] == {"reasoning_effort": "low"}
    assert found["json_schema"] == {"type": "object"}
    assert options(text={"format": {"type": "json_object"}})["whitespace_flexible"] is True
    assert "json_schema" not in options(text={"format": {"type": "text"}, "verbosity": "medium"})


def test_tools_are_flat() -> None:
    found = options(tools=[TOOL], tool_choice={"type": "function", "name": "look"}, parallel_tool_calls=False)
    function = {key: value for key, value in TOOL.items() if key != "type"}
    assert found["tools"] == [{"type": "function", "function": function}]
    assert (found["tool_choice"], found["allowed_tools"], found["parallel_tool_calls"]) == ("required", ["look"], False)
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
    assert options(tools=[TOOL], tool_choice=some)["allowed_tools"] == ["look"]
    assert options(tools=[{"type": "function", "name": "time", "parameters": None, "strict": None}])["tools"] == [
        {"type": "function", "function": {"name": "time"}}
    ]


def test_tools_that_cannot_be_served_are_left_out_and_said() -> None:
    notes = Notes()
    asked = read_request(BODY | {"tools": [TOOL, AGENTS, SEARCH, PATCH, {"type": "x\ny"}]}, notes)
    named = [tool["function"] for tool in asked.wanted.options["tools"] or ()]
    assert [tool["name"] for tool in named] == ["look", "agents__wait", "agents__end"]
    assert named[1]["description"] == "Of agents.\n\nWait."
    assert asked.namespaces == {"agents__wait": ("agents_", "_wait"), "agents__end": ("agents_", "end")}
    assert notes.changed == "tools: apply_patch, tools: web_search, tools: other"
    assert "tools" not in options(tools=[SEARCH])


def test_a_choice_among_tools_of_which_some_are_left_out() -> None:
    chosen = options(tools=[AGENTS], tool_choice={"type": "function", "namespace": "agents_", "name": "end"})
    assert chosen["allowed_tools"] == ["agents__end"]
    both = {"type": "allowed_tools", "mode": "required", "tools": [SEARCH, {"type": "function", "name": "look"}]}
    assert options(tools=[TOOL, SEARCH], tool_choice=both)["allowed_tools"] == ["look"]
    none = {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH]}
    assert "tools" not in options(tools=[TOOL, SEARCH], tool_choice=none)


def test_the_history_of_a_coding_tool_is_taken() -> None:
    """Codex sends such items, also those of a session that OpenAI's models have begun."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    items: list[Any] = [
        {"type": "message", "id": "m", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "compaction", "encrypted_content": "secret"},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "foreign"},
        {"type": "function_call", "call_id": "1", "namespace": "agents_", "name": "_wait", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "local_shell_call", "call_id": "3", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "tool_search_call", "call_id": "4", "execution": "client", "arguments": {"query": "x"}},
        {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {}},
        {"type": "function_call_output", "call_id": "1", "output": [image, {"type": "input_text", "text": "seen"}]},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "Done."},
        {"type": "local_shell_call_output", "id": "3", "output": '{"output":"a"}'},
        {"type": "tool_search_output", "call_id": "4", "tools": [TOOL]},
        {"type": "shell_call_output", "call_id": "5", "output": [{"stdout": "b", "stderr": ""}]},
    ]
    notes = Notes()
    found: Any = read_request(BODY | {"input": items}, notes).wanted.options
    _, called, *results = found["messages"]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in called["tool_calls"]] == [
        ("agents__wait", {}),
        ("apply_patch", {"input": "*** Begin Patch"}),
        ("local_shell", {"type": "exec", "command": ["ls"]}),
        ("tool_search", {"query": "x"}),
    ]
    assert [result["content"] for result in results] == [
        f"{OMITTED_IMAGE}\n\nseen", "Done.", '{"output":"a"}', "look", '{"stdout":"b","stderr":""}'
    ]  # fmt: skip
    assert [tool["function"]["name"] for tool in found["tools"]] == ["look"]
    for said in ("input: web_search_call", "input: compaction", "reasoning.encrypted_content", "images: 1"):
        assert said in notes.changed.split(", ")


def test_options_that_ask_for_nothing_are_accepted_and_said() -> None:
    notes = Notes()
    body = {"truncation": "auto", "text": {"verbosity": "high"}, "client_metadata": {"a": "b"}, "prompt_cache_key": "k"}
    include = ["web_search_call.results", "reasoning.encrypted_content", 7]
    assert read_request(BODY | body | {"include": include, "max_tool_calls": 2}, notes).seals
    assert notes.changed == "include: web_search_call.results, include: other, truncation=disabled, text.verbosity"
    assert notes.ignored == ""


def test_the_response_repeats_the_request_and_says_whether_it_is_stored() -> None:
    body = BODY | {"store": True, "tools": [TOOL], "metadata": {"a": "b"}, "instructions": "x"}
    echoed = read_request(body, Notes()).echoed
    assert (echoed["store"], echoed["previous_response_id"], echoed["tools"]) == (False, None, [TOOL])
    assert (echoed["metadata"], echoed["instructions"], echoed["tool_choice"]) == ({"a": "b"}, "x", "auto")
    assert (echoed["parallel_tool_calls"], echoed["text"]) == (True, {"format": {"type": "text"}})


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"conversation": {"id": "conv_1"}}, "conversation", "unsupported"),
        ({"background": True}, "background", "unsupported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported"),
        ({"top_logprobs": 2}, "top_logprobs", "unsupported"),
        ({"include": "reasoning"}, "include", "invalid_request"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_request"),
        ({"tools": ["web_search"]}, "tools[0]", "invalid_request"),
        ({"tools": [{"type": "function", "name": "no space"}]}, "tools[0].name", "invalid_request"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", "unsupported"),
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice", "unsupported"),
        ({"tools": [TOOL, SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice", "unsupported"),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}}, "tool_choice", "unsupported"),
        ({"tools": [AGENTS, AGENTS]}, "tools[1].tools[0]", "invalid_request"),
        ({"input": []}, "input", "invalid_request"),
        ({"input": None}, "input", "invalid_request"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "unsupported"),
        ({"input": [{"type": "web_search_call"}]}, "input", "invalid_request"),
        ({"input": [{"type": "compaction_trigger"}]}, "input[0]", "unsupported"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input[0].call_id", "invalid_request"),
        ({"instructions": 5}, "instructions", "invalid_request"),
        ({"max_output_tokns": 5}, "max_output_tokns", "invalid_request"),
        ({"max_tokens": 5, "n_predict": 6}, "n_predict", "invalid_request"),
        ({"n": 2}, "n", "unsupported"),
        ({"n_cmpl": 2}, "n", "unsupported"),
        ({"temprature": 5}, "temprature", "invalid_request"),
        ({"model": 5}, "model", "invalid_request"),
    ],
)
def test_a_refusal_names_the_place(more: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_request(BODY | more, Notes())
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


@pytest.mark.parametrize(
    ("more", "valid"),
    [
        ({"temperature": 0.5, "top_k": 5, "seed": None, "max_output_tokens": 5, "stream": True}, True),
        ({"input": [USER, {"type": "function_call_output", "call_id": "1", "output": "x"}], "tools": [TOOL]}, True),
        ({"text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}}, True),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "look"}}, True),
        ({"input": []}, False),
        ({"nosuch": 1}, True),
        ({"n": 2}, False),
        ({"logprobs": True}, False),
        ({"stream": "yes"}, False),
        ({"tools": [SEARCH]}, True),
        ({"truncation": "auto", "include": ["code_interpreter_call.outputs"], "text": {"verbosity": "low"}}, True),
    ],
)
def test_the_document_and_the_gateway_agree(more: dict[str, Any], valid: bool) -> None:
    schema = document()["paths"]["/v1/responses"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert jsonschema.Draft202012Validator(schema).is_valid(BODY | more) == valid
    if valid:
        read_request(BODY | more, Notes())
    else:
        with pytest.raises(ApiError):
            read_request(BODY | more, Notes())
