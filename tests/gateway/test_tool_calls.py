"""Clients of OpenAI's API get calls of tools and reasoning, from an engine in a real worker that replays answers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamEvent
from pydantic import BaseModel, Field, SecretStr

from tests.gateway.test_forced_calls import HARMONY
from tests.keyed import free_port
from tests.replaying_engine import ANSWERS, CITY, TOOLS
from tests.serving import WITHIN, Serving

SIZES = (1, 2, 3, 7, 1000)
"""Characters of a token, one model for each."""
CUT = ANSWERS["weather"][: ANSWERS["weather"].index("dź")]
"""The beginning of a call, up to the middle of a string."""


class get_weather(BaseModel):
    """Tell the weather."""

    city: str
    days: int = Field(ge=1)


def replaying(**options: Any) -> dict[str, Any]:
    return {"model_dir": ".", "engine": "tests.replaying_engine:ReplayingEngine", "options": options}


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def serving(port: int) -> Iterator[Serving]:
    models = {f"size-{size}": replaying(size=size) for size in SIZES}
    models["told"] = replaying() | {"tool_format": "off", "reasoning": "off"}
    with Serving(models, gateway={"listen": port, "auth": "none"}) as serving:
        yield serving


@pytest.fixture(scope="module")
def url(serving: Serving, port: int) -> str:
    return f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", timeout=WITHIN, max_retries=0) as client:
        yield client


def say(name: str) -> list[Any]:
    return [{"role": "user", "content": f"say {name}"}]


def called(message: Any) -> list[tuple[str, Any]]:
    """Return (name, arguments) of the calls of a message. Check their ids."""
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.type == "function" for call in calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.mark.parametrize("size", SIZES)
def test_whole_answers(client: openai.OpenAI, size: int) -> None:
    told = client.chat.completions.create(model=f"size-{size}", messages=say("both"), tools=TOOLS)
    (choice,) = told.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert called(choice.message) == [("get_weather", CITY), ("get_time", {})]
    told = client.chat.completions.create(model=f"size-{size}", messages=say("weather"), tools=TOOLS)
    assert told.choices[0].message.content is None


@pytest.mark.parametrize("size", SIZES)
def test_streamed_answers(client: openai.OpenAI, size: int) -> None:
    chunks = list(
        client.chat.completions.create(
            model=f"size-{size}", messages=say("thought"), tools=TOOLS, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    reasoning = content = arguments = ""
    names = []
    for chunk in chunks[:-1]:
        delta = chunk.choices[0].delta
        assert not (delta.content and delta.tool_calls), "some clients lose such calls"
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        for call in delta.tool_calls or ():
            assert call.index == 0
            assert call.function is not None
            if call.id is not None:
                assert (call.type, call.function.arguments) == ("function", "")
                names.append(call.function.name)
            else:
                assert call.function.name is None
            arguments += call.function.arguments or ""
    assert (reasoning, content, names) == ("The user wants weather.", "Let me see.", ["get_weather"])
    assert json.loads(arguments) == CITY
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "tool_calls"]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens == -(-len(ANSWERS["thought"]) // size)
    counted = usage.completion_tokens_details.reasoning_tokens or 0
    assert counted * size <= len("<think>\nThe user wants weather.\n</think>") + size or size > 100
    assert counted >= len("The user wants weather.") // size or size > 100


def test_the_stream_helper(client: openai.OpenAI) -> None:
    seen: list[ChatCompletionStreamEvent[None]] = []
    with client.chat.completions.stream(model="size-2", messages=say("both"), tools=TOOLS) as stream:
        seen.extend(stream)
        final = stream.get_final_completion()
    assert called(final.choices[0].message) == [("get_weather", CITY), ("get_time", {})]
    done = [event for event in seen if event.type == "tool_calls.function.arguments.done"]
    assert [event.name for event in done] == ["get_weather", "get_time"]
    assert done[0].parsed_arguments == CITY
    assert final.choices[0].finish_reason == "tool_calls"


def test_parse(client: openai.OpenAI) -> None:
    told = client.chat.completions.parse(
        model="size-3", messages=say("weather"), tools=[openai.pydantic_function_tool(get_weather)]
    )
    (call,) = told.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == get_weather(**CITY)


def test_langchain(url: str) -> None:
    def model(size: int) -> ChatOpenAI:
        return ChatOpenAI(base_url=url, api_key=SecretStr("none"), model=f"size-{size}", max_retries=0, timeout=WITHIN)

    for size in SIZES:
        bound = model(size).bind_tools(TOOLS)
        told = bound.invoke("say both")
        assert [(call["name"], call["args"]) for call in told.tool_calls] == [("get_weather", CITY), ("get_time", {})]
        joined: Any = None
        for chunk in bound.stream("say both"):
            joined = chunk if joined is None else joined + chunk
        assert [(call["name"], call["args"]) for call in joined.tool_calls] == [
            ("get_weather", CITY), ("get_time", {}),
        ]  # fmt: skip


def test_answers_of_several_choices_stay_apart(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(model="size-2", messages=say("thought"), tools=TOOLS, n=3, stream=True)
    arguments = ["", "", ""]
    ids = set()
    for chunk in chunks:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                arguments[choice.index] += call.function.arguments or ""  # type: ignore[union-attr]
                ids |= {call.id} - {None}
    assert [json.loads(each) for each in arguments] == [CITY] * 3
    assert len(ids) == 3


def test_a_template_that_begins_inside_the_reasoning(client: openai.OpenAI) -> None:
    inside: Any = {"chat_template_kwargs": {"begin_inside": True}}
    for size in SIZES:
        told = client.chat.completions.create(model=f"size-{size}", messages=say("inside"), extra_body=inside)
        message = told.choices[0].message
        assert message.content == "It is Tuesday."
        assert message.reasoning_content == "So I think."  # type: ignore[attr-defined]
        chunks = client.chat.completions.create(
            model=f"size-{size}", messages=say("inside"), extra_body=inside, stream=True
        )
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == "It is Tuesday."
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "So I think."


def test_without_tools_a_call_is_text(client: openai.OpenAI) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        told = client.chat.completions.create(model="size-3", messages=say("weather"), **more)  # type: ignore[call-overload]
        assert told.choices[0].message.content == ANSWERS["weather"]
        assert told.choices[0].message.tool_calls is None
        assert told.choices[0].finish_reason == "stop"


def test_tools_that_are_not_allowed_are_not_called(client: openai.OpenAI) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    told = client.chat.completions.create(
        model="size-3", messages=say("both"), tools=TOOLS,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},  # type: ignore[arg-type]
    )  # fmt: skip
    assert called(told.choices[0].message) == [("get_time", {})]


def test_a_plain_answer_and_a_model_whose_format_is_switched_off(client: openai.OpenAI) -> None:
    for model, name in (("size-2", "plain"), ("told", "plain"), ("told", "thought")):
        told = client.chat.completions.create(model=model, messages=say(name), tools=TOOLS)
        assert told.choices[0].message.content == ANSWERS[name]
        chunks = client.chat.completions.create(model=model, messages=say(name), tools=TOOLS, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWERS[name]


def test_stop_strings_act_in_the_text_only(client: openai.OpenAI) -> None:
    told = client.chat.completions.create(model="size-2", messages=say("thought"), tools=TOOLS, stop=["weather", "ad"])
    assert called(told.choices[0].message) == [("get_weather", CITY)]
    told = client.chat.completions.create(model="size-2", messages=say("thought"), tools=TOOLS, stop=["me s"])
    assert told.choices[0].message.content == "Let "
    assert told.choices[0].finish_reason == "stop"


def test_an_answer_that_is_cut_in_a_call_has_what_was_written(client: openai.OpenAI) -> None:
    for size in (1, 2):
        told = client.chat.completions.create(
            model=f"size-{size}", messages=say("weather"), tools=TOOLS, max_tokens=-(-len(CUT) // size)
        )
        (choice,) = told.choices
        assert choice.finish_reason == "length"
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == (
            "get_weather", ANSWERS["weather"][len(CUT) - len('{"city": "Łó') : -(-len(CUT) // size) * size],
        )  # fmt: skip


def test_a_conversation_with_calls_reaches_the_template(client: openai.OpenAI) -> None:
    told = client.chat.completions.create(model="size-3", messages=say("thought"), tools=TOOLS)
    message = told.choices[0].message
    (call,) = message.tool_calls or []
    history: list[Any] = [
        {"role": "developer", "content": "be brief"},
        *say("thought"),
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "rain"}]},
        *say("plain"),
    ]
    assert client.chat.completions.create(model="size-3", messages=history).choices[0].message.content == "Hello there."


def test_status_shows_the_format_and_the_markers(serving: Serving, client: openai.OpenAI) -> None:
    with serving.client() as own:
        shown = {model["name"]: (model["tool_format"], model["reasoning"]) for model in own.status()["models"]}
    assert shown.pop("told") == (None, None)
    assert set(shown) == {f"size-{size}" for size in SIZES}
    assert all(each == ("hermes", {"start": "<think>", "end": "</think>"}) for each in shown.values())


HARMONY_ANSWERS = {
    "harmony": "<|channel|>analysis<|message|>I think.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Hello there.<|return|>",
    "call": "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo", "days": 1}<|call|>',
}


def test_without_calls_the_channels_of_harmony_are_told_apart() -> None:
    port = free_port()
    options: dict[str, Any] = {"size": 3, "template": HARMONY, "answers": HARMONY_ANSWERS}
    models = {"off": {**replaying(**options), "tool_format": "off"}}
    with (
        Serving(models, gateway={"listen": port, "auth": "none"}),
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=WITHIN) as client,
    ):
        for more in ({}, {"tools": TOOLS}):
            message: Any = (
                client.chat.completions.create(model="off", messages=say("harmony"), **more).choices[0].message
            )
            assert (message.reasoning_content, message.content) == ("I think.", "Hello there.")
        message = client.chat.completions.create(model="off", messages=say("call"), tools=TOOLS).choices[0].message
        assert (message.reasoning_content, message.tool_calls) == ("I think.", None)
        assert "Oslo" in message.content


@pytest.mark.long
@pytest.mark.parametrize(("name", "die_at"), [("weather", 21), ("thought", 9), ("long", 60), ("thought", 24)])
def test_a_worker_that_dies_in_the_middle_loses_and_doubles_nothing(tmp_path: Path, name: str, die_at: int) -> None:
    port = free_port()
    models = {"m": replaying(size=3, die_at=die_at, flag=str(tmp_path / "died"))}

    async def stream() -> tuple[str, str, list[str], Any]:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=WITHIN, max_retries=0
        ) as client:
            reasoning = content = ""
            arguments: list[str] = []
            reason = None
            chunks = await client.chat.completions.create(model="m", messages=say(name), tools=TOOLS, stream=True)
            async for chunk in chunks:
                delta = chunk.choices[0].delta
                reasoning += getattr(delta, "reasoning_content", None) or ""
                content += delta.content or ""
                for call in delta.tool_calls or ():
                    if call.id is not None:
                        arguments.append("")
                    arguments[call.index] += call.function.arguments or ""  # type: ignore[union-attr]
                reason = chunk.choices[0].finish_reason or reason
            return reasoning, content, arguments, reason

    with Serving(models, gateway={"listen": port, "auth": "none"}, restart={"initial": "100ms"}):
        reasoning, content, arguments, reason = asyncio.run(stream())
        assert (tmp_path / "died").exists(), "the worker has died once"
    if name == "long":
        assert reasoning == ("I think on and on. " * 20).strip()
        assert content == "And so I say it. " * 20
        assert reason == "stop"
        return
    assert reasoning == ("The user wants weather." if name == "thought" else "")
    assert content == ("Let me see." if name == "thought" else "")
    assert [json.loads(each) for each in arguments] == [CITY]
    assert reason == "tool_calls"
