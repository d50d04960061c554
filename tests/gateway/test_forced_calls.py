"""A model that has never seen a tool makes calls that fit, because a request may force it to.

The demo model ``letters`` gets a chat template in Hermes' format, with reasoning. The engine is a real one, so the
grammars of calls, the end of the reasoning and JSON schemas are enforced while tokens are drawn.
"""

import json
import shutil
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from tests.keyed import free_port
from tests.replaying_engine import TEMPLATE
from tests.serving import ROOT, WITHIN, Serving

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Łódź", 'New "York"', "Ulm"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
POINT = {
    "type": "object",
    "properties": {"at": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}},
    "required": ["at"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"get_weather": CITY, "map.point-to": POINT, "stop": {"type": "object", "maxProperties": 0}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
ASK: list[Any] = [{"role": "user", "content": "sort: d b a c ->"}]
NAMED: Any = {"type": "function", "function": {"name": "map.point-to"}}


AT_ONCE: Any = {"chat_template_kwargs": {"enable_thinking": False}}
"""The template ends the reasoning, so that the model does not begin one that it never ends."""


class Verdict(BaseModel):
    """A shape of answers, which is a tool, too."""

    word: Literal["few", "many"]
    count: int = Field(ge=0, le=99)


HARMONY = """\
{%- for m in messages -%}
{%- if m.tool_calls -%}
{%- for c in m.tool_calls -%}
<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>
{{- c.function.arguments | tojson }}<|call|>
{%- endfor -%}
{%- elif m.role == "assistant" -%}
{%- if m.thinking -%}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{%- endif -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else -%}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if tools -%}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{%- endif -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
"""A chat template in the format of gpt-oss. The tokenizer of the model spells its markers with many tokens."""
VERDICT = Verdict.model_json_schema() | {"additionalProperties": False}
PORT = free_port()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    models = {}
    for name, template in (("m", TEMPLATE), ("harmony", HARMONY)):
        directory = tmp_path_factory.mktemp("models") / name
        shutil.copytree(ROOT / "model_worker/demo_models/letters", directory)
        (directory / "chat_template.jinja").write_text(template)
        models[name] = {"model_dir": str(directory), "engine": "transformers", "gpu": "cpu", "max_batch_size": 8}
    with Serving(
        models, gateway={"listen": PORT, "auth": "none"}, restart={"initial": "100ms"}
    ) as serving:  # fmt: skip
        yield serving


@pytest.fixture(scope="module")
def url(serving: Serving) -> str:
    return f"http://127.0.0.1:{PORT}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", timeout=WITHIN, max_retries=0) as client:
        yield client


def checked(message: Any) -> list[str]:
    """Return the names of the calls of a message. Check their arguments."""
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in message.tool_calls]


def force(client: openai.OpenAI, choice: Any, seed: int, **more: Any) -> Any:
    return client.chat.completions.create(
        model="m", messages=ASK, tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=600, extra_body=AT_ONCE, **more
    ).choices[0]


@pytest.mark.long
def test_a_required_call_fits_one_of_the_tools(client: openai.OpenAI) -> None:
    seen = set()
    for seed in range(6):
        choice = force(client, "required", seed, parallel_tool_calls=False)
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (name,) = checked(choice.message)
        seen.add(name)
    assert len(seen) > 1, "the model chooses"


def test_a_named_tool_is_called_once(client: openai.OpenAI) -> None:
    for seed in range(2):
        assert checked(force(client, NAMED, seed).message) == ["map.point-to"]


def test_only_allowed_tools_are_called(client: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [NAMED, {"type": "function", "function": {"name": "stop"}}]}
    for seed in range(3):
        choice = force(client, {"type": "allowed_tools", "allowed_tools": allowed}, seed, parallel_tool_calls=False)
        assert set(checked(choice.message)) <= {"map.point-to", "stop"}


def test_the_deltas_of_a_forced_call_make_the_whole_answer(client: openai.OpenAI) -> None:
    choices: list[Any] = ["required", NAMED]
    for choice in choices:
        with client.chat.completions.stream(
            model="m", messages=ASK, tools=TOOLS, tool_choice=choice, seed=3, max_tokens=600, parallel_tool_calls=False,
            extra_body=AT_ONCE,
        ) as stream:  # fmt: skip
            streamed = stream.get_final_completion().choices[0]
        whole = force(client, choice, 3, parallel_tool_calls=False)
        assert streamed.finish_reason == whole.finish_reason == "tool_calls"
        (told,), (meant,) = streamed.message.tool_calls or [], whole.message.tool_calls
        assert (told.function.name, told.function.arguments) == (meant.function.name, meant.function.arguments)


def test_log_probabilities_tell_every_token_of_an_answer_in_parts(client: openai.OpenAI) -> None:
    """Also tokens of markers, which are no part of the message."""
    asked: dict[str, Any] = {
        "model": "m", "messages": ASK, "tools": TOOLS, "tool_choice": NAMED, "seed": 3, "max_tokens": 600,
        "logprobs": True, "extra_body": AT_ONCE,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert choice.logprobs is not None
    told = choice.logprobs.content or []
    assert whole.usage is not None
    assert len(told) == whole.usage.completion_tokens
    spelled = b"".join(bytes(each.bytes or ()) for each in told).decode()
    (call,) = choice.message.tool_calls or []
    arguments = call.function.arguments  # type: ignore[union-attr]
    written = json.loads(spelled.partition("<tool_call>")[2].partition("</tool_call>")[0])
    assert written == {"name": "map.point-to", "arguments": json.loads(arguments)}
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == told


def test_a_forced_call_comes_behind_the_reasoning(client: openai.OpenAI) -> None:
    """The template begins the reasoning, and the budget ends it."""
    for budget in (0, 1, 25):
        more = {"reasoning_budget": budget, "chat_template_kwargs": {"begin_inside": True}}
        told = client.chat.completions.create(
            model="m", messages=ASK, tools=TOOLS, tool_choice="required", seed=budget, max_tokens=600,
            parallel_tool_calls=False, extra_body=more,
        )  # fmt: skip
        (choice,) = told.choices
        assert choice.finish_reason == "tool_calls"
        checked(choice.message)
        assert told.usage is not None
        details = told.usage.completion_tokens_details
        reasoned = 0 if details is None else details.reasoning_tokens or 0
        assert reasoned <= budget + len("</think>\n\n<tool_call>")
        assert bool(getattr(choice.message, "reasoning_content", None)) == (budget > 0)


def test_a_schema_that_cannot_be_enforced_is_refused_if_it_has_to_be(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}, "required": ["x"]}

    def ask(strict: bool, choice: Any) -> Any:
        function: Any = {"name": "f", "parameters": parameters, "strict": strict}
        return client.chat.completions.create(
            model="m", messages=ASK, tools=[{"type": "function", "function": function}], tool_choice=choice, seed=1,
            max_tokens=20, extra_body=AT_ONCE,
        )  # fmt: skip

    for strict, choice in ((True, "auto"), (True, "required"), (False, "required")):
        with pytest.raises(openai.BadRequestError, match="f: uniqueItems") as refused:
            ask(strict, choice)
        assert refused.value.param == "tools"
    assert ask(False, "auto").choices[0].finish_reason in ("length", "stop")


def test_a_tool_whose_schema_cannot_be_read_takes_any_object_in_auto(client: openai.OpenAI) -> None:
    """Some are found when the request is read, some when the grammar is compiled, and one compiles for minutes."""
    for schema in (
        {"type": "object", "required": None, "properties": None},
        {"type": "object", "properties": {"a": {"type": "STRING", "enum": None}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^{.*}$"}}, "required": ["a"]},
        {"type": "object", "properties": {}, "required": ["a"]},
        {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 1_000_003}}},
    ):
        tool: Any = {"type": "function", "function": {"name": "sloppy", "parameters": schema}}
        asked: dict[str, Any] = {
            "model": "m", "messages": ASK, "tools": [*TOOLS, tool], "seed": 1, "max_tokens": 20, "extra_body": AT_ONCE,
        }  # fmt: skip
        assert client.chat.completions.create(**asked).choices[0].finish_reason in ("length", "stop")
        with pytest.raises(openai.BadRequestError, match="tools") as refused:
            client.chat.completions.create(**asked, tool_choice="required")
        assert refused.value.param == "tools"


def test_tools_and_a_shape_of_the_answer_go_together(client: openai.OpenAI, url: str) -> None:
    """An answer is calls, or else a text of the shape, also behind the reasoning."""
    shape: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}}
    kinds = set()
    for seed in range(8):
        (choice,) = client.chat.completions.create(
            model="m", messages=ASK, tools=TOOLS, response_format=shape, seed=seed, max_tokens=600,
            parallel_tool_calls=False,
            extra_body={"reasoning_budget": 5, "chat_template_kwargs": {"begin_inside": True}} if seed % 2 else AT_ONCE,
        ).choices  # fmt: skip
        assert choice.finish_reason in ("stop", "tool_calls")
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            assert choice.message.content is None
            checked(choice.message)
        else:
            Verdict.model_validate_json(choice.message.content or "")
    assert kinds == {"stop", "tool_calls"}
    (choice,) = client.chat.completions.create(
        model="m", messages=ASK, tools=TOOLS, response_format=shape, tool_choice=NAMED, seed=1, max_tokens=600,
        extra_body=AT_ONCE,
    ).choices  # fmt: skip
    assert checked(choice.message) == ["map.point-to"], "a call that is required has no text beside it"
    flat: Any = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
    text: Any = {"format": {"type": "json_schema", "name": "verdict", "schema": VERDICT}}
    response = client.responses.create(
        model="m", input=ASK, tools=flat, text=text, max_output_tokens=600, extra_body=AT_ONCE | {"seed": 1}
    )
    assert {item.type for item in response.output} in ({"function_call"}, {"message"})
    if response.output_text:
        Verdict.model_validate_json(response.output_text)
    with anthropic.Anthropic(
        base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=WITHIN
    ) as messages_client:
        tools: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
        output: Any = {"format": {"type": "json_schema", "schema": VERDICT}}
        told = messages_client.messages.create(
            model="m", messages=ASK, tools=tools, output_config=output, max_tokens=600, thinking={"type": "disabled"},
            extra_body={"seed": 2},
        )  # fmt: skip
    assert {block.type for block in told.content} in ({"tool_use"}, {"text"})
    for block in told.content:
        if block.type == "text":
            Verdict.model_validate_json(block.text)


def test_the_headers_of_harmony_stand_around_calls_and_shapes(client: openai.OpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}}

    def ask(seed: int, **more: Any) -> Any:
        return client.chat.completions.create(
            model="harmony", messages=ASK, seed=seed, max_tokens=600, extra_body={"reasoning_budget": 20}, **more
        ).choices[0]  # fmt: skip

    for seed in range(3):
        choice = ask(seed, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert len(checked(choice.message)) == 1
    for seed in range(3):
        for more in ({}, {"tools": TOOLS}):
            choice = ask(seed, response_format=shape, **more)
            if choice.finish_reason == "tool_calls":
                checked(choice.message)
            else:
                Verdict.model_validate_json(choice.message.content)


def test_parse_gives_an_object_behind_the_reasoning(client: openai.OpenAI) -> None:
    told = client.chat.completions.parse(
        model="m", messages=ASK, response_format=Verdict, seed=2, max_tokens=600,
        extra_body={"reasoning_budget": 9, "chat_template_kwargs": {"begin_inside": True}},
    )  # fmt: skip
    message = told.choices[0].message
    assert isinstance(message.parsed, Verdict)
    assert message.reasoning_content  # type: ignore[attr-defined]


def test_parse_gives_the_arguments_of_a_tool(client: openai.OpenAI) -> None:
    told = client.chat.completions.parse(
        model="m", messages=ASK, tools=[openai.pydantic_function_tool(Verdict)], tool_choice="required", seed=2,
        max_tokens=600, parallel_tool_calls=False, extra_body=AT_ONCE,
    )  # fmt: skip
    (call,) = told.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Verdict)


@pytest.mark.long
@pytest.mark.parametrize("in_call", [False, True])
def test_a_worker_that_is_killed_in_the_reasoning_or_in_a_call_changes_nothing(
    serving: Serving, client: openai.OpenAI, in_call: bool
) -> None:
    """The next worker goes on at the same place of the reasoning, or of the grammar."""
    flags = {"type": "array", "items": {"type": "boolean"}, "minItems": 50, "maxItems": 50}
    schema = {"type": "object", "properties": {"flags": flags}, "required": ["flags"], "additionalProperties": False}
    asked: dict[str, Any] = {
        "model": "m", "messages": ASK, "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": "required", "parallel_tool_calls": False, "seed": 7, "max_tokens": 1200,
        "extra_body": {"reasoning_budget": 60, "chat_template_kwargs": {"begin_inside": True}},
    }  # fmt: skip
    (meant,) = client.chat.completions.create(**asked).choices
    resumed = serving.status("m")["totals"]["resumed"]
    reasoning = arguments = ""
    reason = None
    killed = False
    for chunk in client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            arguments += call.function.arguments or ""
        reason = choice.finish_reason or reason
        if not killed and (arguments if in_call else reasoning):
            serving.worker("m").kill()
            killed = True
    assert serving.status("m")["totals"]["resumed"] == resumed + 1
    assert reasoning == meant.message.reasoning_content  # type: ignore[attr-defined]
    (call,) = meant.message.tool_calls or []
    assert arguments == call.function.arguments  # type: ignore[union-attr]
    jsonschema.validate(json.loads(arguments), schema)
    assert reason == meant.finish_reason == "tool_calls"


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_gets_structured_output(url: str, method: Literal["function_calling", "json_schema"]) -> None:
    model = ChatOpenAI(
        base_url=url, api_key=SecretStr("none"), model="m", max_retries=0, timeout=WITHIN, seed=4, extra_body=AT_ONCE
    )
    told = model.with_structured_output(Verdict, method=method, strict=True).invoke("sort: d b a c ->")
    assert isinstance(told, Verdict)
    bound = model.bind_tools(TOOLS, tool_choice="required", parallel_tool_calls=False)
    (call,) = bound.invoke("sort: d b a c ->").tool_calls
    jsonschema.validate(call["args"], SCHEMAS[call["name"]])


@pytest.mark.long
def test_the_other_apis_force_calls_and_shapes_too(url: str, client: openai.OpenAI) -> None:
    point = {
        "type": "object",
        "properties": {"at": {"enum": [1, 2]}},
        "required": ["at"],
        "additionalProperties": False,
    }
    shape: Any = {"type": "json_schema", "schema": point}
    off: Any = {"max_tokens": 600, "thinking": {"type": "disabled"}, "extra_body": {"seed": 1}}
    with anthropic.Anthropic(
        base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=WITHIN
    ) as messages_client:
        named: Any = {
            "tools": [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()],
            "tool_choice": {"type": "tool", "name": "map.point-to"},
        }
        told = messages_client.messages.create(model="m", messages=ASK, **off, **named)
        (call,) = told.content
        assert (told.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "map.point-to")  # type: ignore[union-attr]
        jsonschema.validate(call.input, POINT)  # type: ignore[union-attr]
        shaped = messages_client.messages.create(model="m", messages=ASK, output_config={"format": shape}, **off)
        jsonschema.validate(json.loads(shaped.content[0].text), point)  # type: ignore[union-attr]
    flat: Any = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
    response = client.responses.create(
        model="m", input=ASK, tools=flat, tool_choice="required", parallel_tool_calls=False, max_output_tokens=600,
        extra_body=AT_ONCE | {"seed": 1},
    )  # fmt: skip
    (item,) = response.output
    assert item.type == "function_call"
    jsonschema.validate(json.loads(item.arguments), SCHEMAS[item.name])
