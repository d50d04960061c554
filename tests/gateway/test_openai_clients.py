"""Common OpenAI clients reach the demo models over HTTP, and get the right answers."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from tests.keyed import free_port
from tests.serving import WITHIN, Serving
from tools.demo_models.corpus import (
    LETTERS_TEST_LONG_ANSWERS,
    LETTERS_TEST_PROMPTS,
    STORIES_TEST_CONVERSATIONS,
    STORIES_TEST_REQUESTS,
)

STORY, TOLD = STORIES_TEST_REQUESTS[1]
"""A request and its story, with letters outside of ASCII."""
SORT, SORTED = LETTERS_TEST_PROMPTS[0]


class Count(BaseModel):
    """A shape of answers: a number, and a word for it."""

    number: int = Field(ge=0, le=99)
    word: Literal["few", "many"]
    even: bool | None = None


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve the demo models through a gateway. Return its base URL."""
    demo = {"engine": "transformers", "gpu": "cpu", "max_batch_size": 32}
    models = {name: {"model_dir": f"demo:{name}", **demo} for name in ("letters", "stories")}
    port = free_port()
    with Serving(models, gateway={"listen": port, "auth": "none"}):
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", timeout=WITHIN, max_retries=0) as client:
        yield client


@pytest.mark.long
def test_streams_of_demo_prompts_are_the_computed_answers(url: str) -> None:
    letters = [*LETTERS_TEST_PROMPTS[:24], *LETTERS_TEST_LONG_ANSWERS[1:3]]
    chats: list[tuple[Any, str]] = [
        ([{"role": "user", "content": asked}], told) for asked, told in STORIES_TEST_REQUESTS[:6]
    ]
    chats += STORIES_TEST_CONVERSATIONS[:4]

    async def completion(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model="letters", prompt=prompt, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def chat(client: openai.AsyncOpenAI, messages: list[ChatCompletionMessageParam]) -> str:
        stream = await client.chat.completions.create(model="stories", messages=messages, temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=WITHIN, max_retries=0) as client:
            asked = [completion(client, prompt) for prompt, _ in letters] + [chat(client, given) for given, _ in chats]
            return await asyncio.gather(*asked)

    assert asyncio.run(ask()) == [text for _, text in (*letters, *chats)]


def test_whole_answers(client: openai.OpenAI) -> None:
    told = client.chat.completions.create(
        model="stories", messages=[{"role": "user", "content": [{"type": "text", "text": STORY}]}], temperature=0
    )
    (choice,) = told.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TOLD, "stop")
    assert told.usage is not None
    assert told.usage.total_tokens == told.usage.prompt_tokens + told.usage.completion_tokens
    sorted_ = client.completions.create(model="letters", prompt=SORT, temperature=0, logprobs=2)
    assert sorted_.choices[0].text == SORTED
    logprobs = sorted_.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []).startswith(SORTED)
    assert all(len(top) == 2 for top in logprobs.top_logprobs or [])
    assert (logprobs.text_offset or [])[:2] == [0, len((logprobs.tokens or [""])[0])]


def test_the_stream_helper_puts_the_same_answer_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="stories",
        messages=[
            {"role": "developer", "content": "You are Luna, a storyteller."},
            {"role": "user", "content": "Who are you?"},
        ],
        temperature=0,
        logprobs=True,
        top_logprobs=1,
        stream_options={"include_usage": True},
    ) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        whole = stream.get_final_completion()
    assert deltas == whole.choices[0].message.content == "I am Luna, a storyteller."
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 3
    content = whole.choices[0].logprobs and whole.choices[0].logprobs.content
    assert content
    assert b"".join(bytes(entry.bytes or ()) for entry in content).decode().startswith("I am Luna")
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)


def test_an_answer_is_parsed_into_a_model_of_pydantic(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="stories", messages=[{"role": "user", "content": "Hello!"}], response_format=Count, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Count)


def test_json_mode_and_several_answers(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="stories",
        messages=[{"role": "user", "content": "Hello!"}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "strict": True, "schema": {"enum": [1, 2]}},
        },
        n=3,
        seed=7,
    )
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert all(json.loads(choice.message.content or "") in (1, 2) for choice in whole.choices)
    texts = [""] * 4
    for chunk in client.completions.create(
        model="letters", prompt=[SORT, "count: 7 8 9 ->"], n=2, temperature=0, stream=True
    ):
        for each in chunk.choices:
            texts[each.index] += each.text
    assert texts == [SORTED, SORTED, *[" 10 11 12 13 14 15 16 17"] * 2]


def test_stop_bias_and_options_of_our_own(client: openai.OpenAI) -> None:
    stopped = client.completions.create(model="letters", prompt=SORT, temperature=0, stop=" c")
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (SORTED.split(" c")[0], "stop")
    (*_, token) = client.post("/tokenize", body={"model": "letters", "prompt": " a"}, cast_to=object)["tokens"]  # type: ignore[index]
    biased = client.completions.create(
        model="letters", prompt=SORT, temperature=0, max_tokens=1, logit_bias={str(token): -100}
    )
    assert not biased.choices[0].text.startswith(" a")
    chosen = client.completions.create(
        model="letters", prompt=SORT, extra_body={"choice": ["yes", "no"], "top_k": 5, "priority": "batch"}
    )
    assert chosen.choices[0].text in ("yes", "no")


def test_an_answer_that_repeats_itself_ends_with_a_reason_that_clients_know(client: openai.OpenAI) -> None:
    """A model that may draw one token only repeats itself at once. That of stories does so soon beyond its end."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": STORY}]
    options = {"ignore_eos": True, "stop_on_loop": 24}
    for logprobs in (False, True):
        chunks = client.chat.completions.create(
            model="stories", messages=messages, max_tokens=400, stream=True, logprobs=logprobs,
            extra_body=options | {"allowed_tokens": [90]},
        )  # fmt: skip
        last = [chunk.choices[0] for chunk in chunks][-1]
        assert (last.finish_reason, last.model_extra) == ("stop", {"stop_reason": "loop"})
    whole = client.completions.create(
        model="stories", prompt="Once upon a time", max_tokens=400, temperature=0, extra_body=options
    )
    (choice,) = whole.choices
    assert (choice.finish_reason, (choice.model_extra or {})["stop_reason"]) == ("stop", "loop")
    assert whole.usage is not None
    assert 24 <= whole.usage.completion_tokens < 400
    plain = client.completions.create(model="letters", prompt=SORT, temperature=0, extra_body={"stop_on_loop": 24})
    assert (plain.choices[0].text, plain.choices[0].finish_reason) == (SORTED, "stop")
    assert "stop_reason" not in (plain.choices[0].model_extra or {})


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["letters", "stories"]
    described = client.models.retrieve("stories").model_dump()
    context = described["context_length"]
    assert context == described["max_model_len"] == described["max_context_length"] == described["meta"]["n_ctx"] > 0
    assert (described["capabilities"]["chat"], described["capabilities"]["function_calling"]) == (True, True)
    assert (described["state"], described["status"]["value"], described["owned_by"]) == ("loaded", "loaded", "modelctl")


def test_tokens_there_and_back(client: openai.OpenAI) -> None:
    tokens = client.post("/tokenize", body={"model": "letters", "prompt": SORT}, cast_to=object)["tokens"]  # type: ignore[index]
    text = client.post("/detokenize", body={"model": "letters", "tokens": tokens}, cast_to=object)["prompt"]  # type: ignore[index]
    assert text == SORT
    by_ids = client.completions.create(model="letters", prompt=tokens, temperature=0)
    assert by_ids.choices[0].text == SORTED


def test_curl_shows_a_stream(url: str) -> None:
    body = {"model": "letters", "prompt": SORT, "temperature": 0, "stream": True}
    command = ["curl", "-sSN", f"{url}/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN, check=True).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == SORTED
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


@pytest.mark.long
def test_langchain(url: str) -> None:
    chat_openai = pytest.importorskip("langchain_openai").ChatOpenAI
    model = chat_openai(model="stories", base_url=url, api_key="none", temperature=0, timeout=WITHIN, max_retries=0)
    assert model.invoke(STORY).content == TOLD
    chunks = list(model.stream(STORY, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == TOLD
    assert len(chunks) > 10
    assert isinstance(model.with_structured_output(Count).invoke("Hello!"), Count)
