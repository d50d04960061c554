"""The shipped model ``agent`` reasons and calls tools, from the client to the worker and back, without any stand-in."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.keyed import free_port
from tests.serving import ROOT, WITHIN, Serving
from tools.demo_models.agent_cases import Case
from tools.demo_models.agent_prompts import GET_WEATHER, LOCATE, READABLE_CASES, TOOLS, conversation
from tools.demo_models.agent_tasks import Answer
from tools.demo_models.corpus import AGENT_TEST_CASES

READ = len(READABLE_CASES)
CASES = [*READABLE_CASES[: READ // 2 : 4], *READABLE_CASES[READ // 2 + 1 :: 8], *AGENT_TEST_CASES[READ : READ + 2]]
"""Conversations that people can read, with reasoning and without, and some with random tools. ``tests/tools`` measures
the model's answers to all of them."""
CHAIN = "Call locate with name=Ann, then get_weather with city=the result."
RESULTS = {"locate": "Lima", "get_weather": "fog", "multiply": "36", "now": "12:30"}


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def serving(port: int) -> Iterator[Serving]:
    models = {"agent": {"model_dir": "demo:agent", "engine": "transformers", "gpu": "cpu", "max_batch_size": 16}}
    with Serving(models, gateway={"listen": port, "auth": "none"}) as serving:
        yield serving


@pytest.fixture(scope="module")
def url(serving: Serving, port: int) -> str:
    return f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", timeout=WITHIN, max_retries=0) as client:
        yield client


def request(case: Case) -> dict[str, Any]:
    """Return the options of the chat API for a conversation."""
    options: dict[str, Any] = {"model": "agent", "messages": case.messages, "temperature": 0}
    if case.tools:
        options["tools"] = case.tools
    if not case.thinking:
        options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    return options


def said(message: Any) -> Answer:
    """Return the answer in a message of the chat API."""
    calls = [call.function for call in message.tool_calls or ()]
    return Answer(
        getattr(message, "reasoning_content", None) or "",
        message.content or "",
        tuple((call.name, json.loads(call.arguments)) for call in calls),
    )


def expected(case: Case) -> Answer:
    """Return the right answer to a conversation, as the chat API shows it."""
    answer = case.answer
    return answer if case.thinking else Answer("", answer.content, answer.calls)


@pytest.mark.long
def test_the_text_of_an_answer_is_right_alone_and_in_company(serving: Serving) -> None:
    """The protocol's own requests show the text as the model writes it, with its markers."""
    with serving.client() as client:

        def ask(case: Case) -> str:
            return client.complete(
                "agent",
                messages=case.messages,
                tools=case.tools or None,
                template_kwargs={"enable_thinking": case.thinking},
                temperature=0,
                max_tokens=800,
            ).text

        some = CASES[::4]
        with ThreadPoolExecutor(len(some)) as pool:
            together = list(pool.map(ask, some))
        assert together == [case.answer.text(case.thinking) for case in some]
        assert [ask(case) for case in some[:2]] == together[:2]
    serving.wait_idle("agent")


@pytest.mark.long
def test_openai_gets_reasoning_text_and_calls_of_every_conversation_whole_and_streamed(url: str) -> None:
    async def whole(client: openai.AsyncOpenAI, case: Case) -> tuple[Answer, str]:
        choice = (await client.chat.completions.create(**request(case))).choices[0]
        return said(choice.message), choice.finish_reason

    async def streamed(client: openai.AsyncOpenAI, case: Case) -> tuple[Answer, str]:
        async with client.chat.completions.stream(**request(case)) as stream:
            choice = (await stream.get_final_completion()).choices[0]
        return said(choice.message), choice.finish_reason

    async def ask() -> list[tuple[Answer, str]]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=WITHIN, max_retries=0) as client:
            return await asyncio.gather(
                *(whole(client, case) for case in CASES), *(streamed(client, case) for case in CASES)
            )

    right = [(answer := expected(case), "tool_calls" if answer.calls else "stop") for case in CASES]
    assert asyncio.run(ask()) == 2 * right


def test_a_loop_of_streams_calls_tools_until_the_answer(client: openai.OpenAI) -> None:
    """The client sends back the messages that its helper makes of streams, with reasoning and what the helper adds."""
    messages: list[Any] = [{"role": "user", "content": CHAIN}]
    called = []
    while True:
        with client.chat.completions.stream(model="agent", messages=messages, tools=TOOLS, temperature=0) as events:  # type: ignore[arg-type]
            message: Any = events.get_final_completion().choices[0].message
        assert message.reasoning_content
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            called.append((call.function.name, json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]})
    assert called == [("locate", {"name": "Ann"}), ("get_weather", {"city": "Lima"})]
    assert message.content == "The result of locate is Lima. The result of get_weather is fog."


def test_the_examples_of_the_page_answer_as_they_show(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = url.split(":")[2].removesuffix("/v1")
    page = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8").replace("localhost:8000", f"127.0.0.1:{port}")
    tools, reasoning = page[page.index("\n## Tools\n") :].split("\n## Reasoning\n")
    (code,) = re.findall(r"```python\n(.+?)```", tools, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "http-api.md", "exec"), names)
    names["client"].close()
    (shown,) = re.findall(r"```console\n(.+?)```", tools, re.DOTALL)
    assert capsys.readouterr().out == shown
    ((address, body, *lines),) = re.findall(r"\$ curl -s (\S+) -d '(.+)' \| jq .+\n(.+)\n(.+)\n```", reasoning)
    answer = httpx2.post(f"http://{address}", content=body, timeout=WITHIN).json()
    assert [answer["choices"][0]["message"], answer["usage"]["completion_tokens_details"]] == list(
        map(json.loads, lines)
    )


def test_the_deltas_of_a_stream_come_in_their_order(client: openai.OpenAI) -> None:
    """Reasoning, text and two calls: each call begins with its id and name, and goes on with pieces of arguments."""
    case = conversation(("Please tell me the weather in Paris and Rome.",))
    chunks = list(client.chat.completions.create(**request(case), stream=True, stream_options={"include_usage": True}))
    kinds = []
    for chunk in chunks[:-1]:
        delta = chunk.choices[0].delta
        present = [getattr(delta, name, None) for name in ("reasoning_content", "content", "tool_calls")]
        kinds += [
            name
            for name, value in zip(("reasoning", "text", "calls"), present, strict=True)
            if value and kinds[-1:] != [name]
        ]
    assert kinds == ["reasoning", "text", "calls"]
    pieces = [piece for chunk in chunks[:-1] for piece in chunk.choices[0].delta.tool_calls or ()]
    first = [piece for piece in pieces if piece.id]
    assert [(piece.index, piece.function and piece.function.name) for piece in first] == [
        (0, "get_weather"),
        (1, "get_weather"),
    ]
    assert len({piece.id for piece in first}) == 2
    arguments = [
        "".join(piece.function.arguments or "" for piece in pieces if piece.index == i and piece.function)
        for i in (0, 1)
    ]
    assert [json.loads(text) for text in arguments] == [{"city": "Paris"}, {"city": "Rome"}]
    assert len(pieces) > 4, "the arguments come in pieces, and not at the end of the call"
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert 10 < (usage.completion_tokens_details.reasoning_tokens or 0) < usage.completion_tokens


def test_a_choice_of_tools_is_kept_to(client: openai.OpenAI) -> None:
    """The model would not call a tool by itself here, or another one."""
    tools: list[Any] = [{**tool, "function": {**tool["function"], "strict": True}} for tool in (GET_WEATHER, LOCATE)]
    hello: list[Any] = [{"role": "user", "content": "Hello!"}]
    weather: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: dict[str, Any] = {"model": "agent", "tools": tools, "temperature": 0, "max_tokens": 200}
    forced = ask_twice(client, messages=hello, tool_choice="required", **options)
    assert forced.calls
    assert {name for name, _ in forced.calls} <= {"get_weather", "locate"}
    locate = {"type": "function", "function": {"name": "locate"}}
    ((name, given),) = ask_twice(client, messages=weather, tool_choice=locate, **options).calls
    assert (name, set(given)) == ("locate", {"name"})
    (called,) = ask_twice(client, messages=weather, tool_choice="required", **options).calls
    assert called == ("get_weather", {"city": "Paris"})
    untold = conversation(("What is the weather in Paris?",), tools=[]).answer
    assert ask_twice(client, messages=weather, tool_choice="none", **options) == untold


def ask_twice(client: openai.OpenAI, **options: Any) -> Answer:
    """Return the answer to a chat, which is the same whole and streamed."""
    whole = said(client.chat.completions.create(**options).choices[0].message)
    with client.chat.completions.stream(**options) as stream:
        assert said(stream.get_final_completion().choices[0].message) == whole
    return whole


def test_calls_come_one_by_one_if_the_request_says_so(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris and Rome?"}]
    cities = []
    for result in ("sunny", "rain"):
        message = (
            client.chat.completions.create(
                model="agent", messages=messages, tools=[GET_WEATHER], parallel_tool_calls=False, temperature=0
            )
            .choices[0]
            .message
        )  # type: ignore[call-overload]
        (call,) = message.tool_calls
        cities.append(json.loads(call.function.arguments))
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert cities == [{"city": "Paris"}, {"city": "Rome"}]
    last = client.chat.completions.create(model="agent", messages=messages, tools=[GET_WEATHER], temperature=0)
    assert last.choices[0].message.content == "The weather in Paris is sunny. The weather in Rome is rain."


def test_without_a_budget_of_reasoning_the_calls_are_right(client: openai.OpenAI) -> None:
    called = conversation(("What is the weather in Paris and Rome?",))
    chat = client.chat.completions.create(**request(called), extra_body={"reasoning_budget": 0})
    assert said(chat.choices[0].message) == Answer("", "", called.answer.calls)


def test_the_package_anthropic_calls_tools_until_the_answer(port: int) -> None:
    """Two calls at once, whole and streamed. The client sends the thinking back with the results."""
    tools: list[Any] = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
        for f in (tool["function"] for tool in (GET_WEATHER, LOCATE))
    ]
    case = conversation(("Please tell me the weather in Paris and Rome.",))
    with anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{port}", api_key="none", timeout=WITHIN, max_retries=0
    ) as client:
        for streamed in (False, True):
            messages: list[Any] = list(case.messages)
            options: Any = {"model": "agent", "max_tokens": 500, "messages": messages, "tools": tools}
            options |= {"thinking": {"type": "adaptive"}, "extra_body": {"temperature": 0}}
            first = create(client, streamed, options)
            thinking, text, *calls = first.content
            assert (thinking.thinking.strip(), text.text.strip()) == (case.answer.reasoning, case.answer.content)
            assert [(call.name, call.input) for call in calls] == list(case.answer.calls)
            assert first.stop_reason == "tool_use"
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": told}
                for call, told in zip(calls, ("sunny", "rain"), strict=True)
            ]
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
            last = create(client, streamed, options)
            assert [block.type for block in last.content] == ["thinking", "text"]
            assert last.content[1].text.strip() == "The weather in Paris is sunny. The weather in Rome is rain."
            assert last.stop_reason == "end_turn"
        forced = client.messages.create(
            **options | {"messages": [{"role": "user", "content": "Hello!"}], "tool_choice": {"type": "any"}}
        )
        assert forced.stop_reason == "tool_use"


def create(client: anthropic.Anthropic, streamed: bool, options: Any) -> Any:
    """Return a whole message of Anthropic's API, or the one that its client makes of a stream."""
    if not streamed:
        return client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        return stream.get_final_message()


@pytest.mark.long
def test_the_example_agent_runs(serving: Serving, url: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "agent.py"), CHAIN],
        env={**os.environ, "OPENAI_BASE_URL": url},
        capture_output=True,
        text=True,
        timeout=3 * WITHIN,  # it imports the package openai, on a machine that may be busy
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "thinks: The user wants me to call locate, then get_weather.",
        'calls:  locate({"name": "Ann"}) -> Lima',
        "thinks: Next, I call get_weather.",
        'calls:  get_weather({"city": "Lima"}) -> fog',
        "thinks: Every tool has answered.",
        "The result of locate is Lima. The result of get_weather is fog.",
    ]
