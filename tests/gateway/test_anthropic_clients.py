"""Anthropic's client package gets answers, calls of tools and errors, from an engine that replays prepared answers."""

import http.client
import json
import select
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import anthropic
import pytest
from anthropic.types.model_capabilities import ModelCapabilities

from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine

SIZES = (1, 3, 1000)
"""Characters of a token, one model for each."""
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "Tell the weather.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
        "cache_control": {"type": "ephemeral"},
    },
    {"name": "get_time", "input_schema": {"type": "object", "properties": {}}, "type": "custom"},
]
CITY = {"city": "Łódź", "days": 3}
CALLS = ["I look.", ("get_weather", CITY), ("get_time", {})]
ANSWERS = [
    ("plain", ["Hello there."], "end_turn"),
    ("weather", [("get_weather", CITY)], "tool_use"),
    ("both", CALLS, "tool_use"),
    ("thought", [{"thinking": "The user wants weather."}, "Let me see.", ("get_weather", CITY)], "tool_use"),
]


def replaying(**options: Any) -> dict[str, Any]:
    return {"model_dir": ".", "engine": "tests.replaying_engine:ReplayingEngine", "options": options}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    models = {f"size-{size}": replaying(size=size) for size in SIZES}
    models |= {
        "agent": replaying() | {"engine": "tests.agent_engine:AgentEngine"},
        "mute": replaying(size=3) | {"reasoning": False},
        "stopped": engine(autostart=False),
        "full": engine(step_s=0.05, context=100_000, max_batch_size=1, max_queue=1),
    }
    port = free_port()
    with Serving(models, gateway={"listen": port, "auth": "none"}):
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{port}", api_key="none", timeout=WITHIN, max_retries=0
    ) as client:
        yield client


def say(name: str) -> list[Any]:
    return [{"role": "user", "content": f"say {name}"}]


def shown(content: Any) -> list[Any]:
    """Return the blocks of an answer, without ids, signatures and the line breaks around texts."""
    found: list[Any] = []
    for block in content:
        if block.type == "text":
            found.append(block.text.strip("\n"))
        elif block.type == "thinking":
            assert block.signature
            found.append({"thinking": block.thinking.strip("\n")})
        else:
            assert block.id
            found.append((block.name, block.input))
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "content", "reason"), ANSWERS)
def test_an_answer_is_the_same_whole_and_streamed(
    client: anthropic.Anthropic, size: int, name: str, content: list[Any], reason: str
) -> None:
    asked: Any = {"model": f"size-{size}", "max_tokens": 1000, "messages": say(name), "tools": TOOLS}
    asked |= {"thinking": {"type": "adaptive"}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert shown(whole.content) == shown(streamed.content) == content
    assert whole.stop_reason == streamed.stop_reason == reason
    assert text == "".join(block.text for block in streamed.content if block.type == "text")
    assert whole.usage == streamed.usage
    assert whole.usage.input_tokens > 10
    assert whole.usage.output_tokens > 0
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", f"size-{size}")
    assert whole.id != streamed.id
    details = whole.usage.output_tokens_details
    assert (details is not None) == (name == "thought")


def events_of(port: int, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the data of each event of a streamed answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("POST", "/v1/messages?beta=true", json.dumps(body | {"stream": True}))
        response = connection.getresponse()
        assert response.status == 200
        assert response.headers["request-id"].startswith("req_")
        text = response.read().decode()
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append((event["type"], event))
    return events


def test_the_events_of_a_stream_have_the_order_of_the_api(port: int) -> None:
    body: Any = {"model": "size-3", "max_tokens": 1000, "messages": say("thought"), "tools": TOOLS}
    body["thinking"] = {"type": "adaptive"}
    names = [name for name, _ in events_of(port, body)]
    blocks = [name for i, name in enumerate(names) if name != "content_block_delta" or names[i - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert blocks == ["message_start", "ping", *block, *block, *block, "message_delta", "message_stop"]
    deltas = [(e["index"], e["delta"]["type"]) for name, e in events_of(port, body) if name == "content_block_delta"]
    assert sorted(set(deltas), key=deltas.index) == [
        (0, "thinking_delta"),
        (0, "signature_delta"),
        (1, "text_delta"),
        (2, "input_json_delta"),
    ]
    assert deltas.count((0, "signature_delta")) == 1


def test_thinking_that_is_not_shown_comes_back_in_the_next_request(client: anthropic.Anthropic, port: int) -> None:
    asked: Any = {
        "model": "agent", "max_tokens": 1000, "tools": TOOLS, "thinking": {"type": "adaptive", "display": "omitted"},
        "messages": [{"role": "user", "content": 'call get_weather with {"city": "Ulm"}'}],
    }  # fmt: skip
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    whole = client.messages.create(**asked)
    for answer in (whole, streamed):
        assert shown(answer.content) == [{"thinking": ""}, ("get_weather", {"city": "Ulm"})]
        call = answer.content[1]
        assert call.type == "tool_use"
        results = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        messages = [*asked["messages"], answer.to_param(), {"role": "user", "content": [results]}]
        told = client.messages.create(**asked | {"messages": messages})
        assert shown(told.content) == ["The tool says: rain"]
        forgotten = [{"type": "thinking", "thinking": "", "signature": "another"}, call.model_dump()]
        without = [*asked["messages"], {"role": "assistant", "content": forgotten}, messages[-1]]
        count = client.messages.count_tokens(model="agent", tools=TOOLS, messages=messages)
        shorter = client.messages.count_tokens(model="agent", tools=TOOLS, messages=without)  # type: ignore[arg-type]
        assert count.input_tokens > shorter.input_tokens + len("I need the tool for that.") / 4


def test_tokens_are_counted_as_the_answer_counts_them(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "size-3", "messages": say("plain"), "tools": TOOLS, "system": "Be kind. Żółw."}
    counted = client.messages.count_tokens(**asked)
    told = client.messages.create(**asked, max_tokens=100)
    assert counted.input_tokens == told.usage.input_tokens > 100


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "size-1", "max_tokens": 100, "messages": say("plain")}
    told = client.messages.create(**asked, stop_sequences=["zebra", "lo th", "lo t"])
    assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", "lo t")
    assert shown(told.content) == ["Hel"]
    with client.messages.stream(**asked, stop_sequences=["there"]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence, shown(final.content)) == ("stop_sequence", "there", ["Hello "])
    ended = client.messages.create(**asked, stop_sequences=["zebra"])
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)


def test_an_answer_is_cut_by_max_tokens_or_by_the_context(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "size-1", "messages": say("plain")}
    cut = client.messages.create(**asked, max_tokens=5)
    assert (cut.stop_reason, shown(cut.content), cut.usage.output_tokens) == ("max_tokens", ["Hello"], 5)
    call = client.messages.create(model="size-1", messages=say("weather"), tools=TOOLS, max_tokens=60)
    assert (call.stop_reason, call.content) == ("max_tokens", [])  # a part of a call is nothing that may be run
    complete = client.messages.create(**asked, max_tokens=20_000)
    assert complete.stop_reason == "end_turn"
    # the prompt leaves less room than max_tokens
    prompt = 65_536 - 5 - client.messages.count_tokens(**asked).input_tokens
    long: Any = {"model": "size-1", "messages": [{"role": "user", "content": "x" * prompt + "say plain"}]}
    for whole in (True, False):
        if whole:
            told = client.messages.create(**long, max_tokens=20_000)
        else:
            with client.messages.stream(**long, max_tokens=20_000) as stream:
                told = stream.get_final_message()
        assert (told.stop_reason, shown(told.content)) == ("model_context_window_exceeded", ["Hello"])


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(client: anthropic.Anthropic) -> None:
    long: Any = {"model": "size-1", "messages": [{"role": "user", "content": "x" * 65_536 + "say plain"}]}
    words = r"prompt is too long: 655\d\d tokens > 65535 maximum"
    with pytest.raises(anthropic.BadRequestError, match=words) as caught:
        client.messages.create(**long, max_tokens=5)
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": caught.value.body["error"]["message"]},  # type: ignore[index]
        "request_id": caught.value.request_id,
    }
    with (
        pytest.raises(anthropic.BadRequestError, match=words),
        client.messages.stream(**long, max_tokens=5) as stream,
    ):
        stream.get_final_message()


def test_errors_are_those_of_the_package(client: anthropic.Anthropic, port: int) -> None:
    asked: Any = {"max_tokens": 5, "messages": say("plain")}
    with pytest.raises(anthropic.NotFoundError, match="no model 'none'") as missing:
        client.messages.create(**asked, model="none")
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.APIStatusError, match="stopped") as stopped:
        client.messages.create(**asked, model="stopped")
    assert (stopped.value.status_code, stopped.value.type) == (503, "api_error")
    with pytest.raises(anthropic.BadRequestError, match=r"temperature.*99"):
        client.messages.create(**asked, model="size-3", extra_body={"temperature": 99})
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(**asked, model="size-3", stop_sequences=["x" * 70_000])
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="'image', which is not offered"):
        client.messages.create(model="size-3", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.NotFoundError, match="batches are not offered"):
        client.messages.batches.list()


def test_an_overloaded_model_is_asked_again(port: int) -> None:
    asked: Any = {"model": "full", "max_tokens": 50_000, "messages": [{"role": "user", "content": "hello"}]}
    with ExitStack() as open_ones:
        connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN) for _ in range(12)]
        for connection in connections:
            open_ones.enter_context(closing(connection))
            connection.request("POST", "/v1/messages", json.dumps(asked))
        answered, _, _ = select.select([connection.sock for connection in connections], [], [], WITHIN)
        assert answered  # by a refusal, since the others wait: the queue is full
        client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", timeout=WITHIN, max_retries=1)
        with client, pytest.raises(anthropic.OverloadedError) as caught:
            client.messages.create(**asked, stream=True)
    assert (caught.value.status_code, caught.value.type) == (529, "overloaded_error")
    assert caught.value.response.headers["x-should-retry"] == "true"
    assert caught.value.request.headers["x-stainless-retry-count"] == "1"


def test_the_first_event_has_the_tokens_of_the_prompt(port: int) -> None:
    body = {"model": "size-3", "max_tokens": 1000, "messages": say("plain")}
    events = dict(events_of(port, body))
    began, ended = events["message_start"]["message"]["usage"], events["message_delta"]["usage"]
    assert began["input_tokens"] + began["cache_read_input_tokens"] > 10
    assert ended["input_tokens"] + ended["cache_read_input_tokens"] == began["input_tokens"]


def test_reasoning_that_nobody_asked_for_is_left_out(client: anthropic.Anthropic, port: int) -> None:
    asked: Any = {"model": "size-3", "max_tokens": 1000, "messages": say("thought"), "tools": TOOLS}
    for more in ({}, {"thinking": {"type": "disabled"}}):
        whole = client.messages.create(**asked, **more)
        with client.messages.stream(**asked, **more) as stream:
            streamed = stream.get_final_message()
        for answer in (whole, streamed):
            assert [block.type for block in answer.content] == ["text", "tool_use"]
    assert whole.usage.output_tokens_details is not None  # the tokens were computed
    indices = [event["index"] for name, event in events_of(port, asked) if name == "content_block_start"]
    assert indices == [0, 1]


def test_a_budget_that_cannot_be_kept_is_left_out_and_said(client: anthropic.Anthropic) -> None:
    """The model "mute" does not reason, and the engine of both offers no budget."""
    thinking: Any = {"type": "enabled", "budget_tokens": 31_999}
    said = {}
    for model in ("size-3", "mute"):
        for stream in (False, True):
            got = client.messages.with_raw_response.create(
                model=model, max_tokens=1000, messages=say("plain"), thinking=thinking, stream=stream
            )
            said[model, stream] = got.headers.get("x-modelctl-ignored")
    assert said == {
        (model, stream): "thinking.budget_tokens" for model in ("size-3", "mute") for stream in (False, True)
    }


def test_the_list_of_models_suits_both_packages(client: anthropic.Anthropic) -> None:
    names = ["agent", "full", "mute", "size-1", "size-1000", "size-3", "stopped"]
    models = list(client.models.list())
    assert [model.id for model in models] == names
    assert {model.type for model in models} == {"model"}
    assert [model.display_name for model in models] == names
    assert models[3].created_at.year >= 2026
    assert models[3].max_input_tokens == 65_536
    assert [model.id for model in client.models.list(limit=2)] == names  # it asks for all pages
    page = client.models.list(limit=2, after_id="full")
    assert ([model.id for model in page.data], page.has_more) == (["mute", "size-1"], True)
    before = client.models.list(limit=2, before_id="size-1")
    assert [model.id for model in before.data] == ["full", "mute"]
    known: Any = client.models.retrieve("size-3")
    assert known.display_name == "size-3"
    able = ModelCapabilities.model_validate(known.capabilities.to_dict())  # a key that is missing is an error
    assert (able.structured_outputs.supported, able.image_input.supported) == (True, False)
    assert able.thinking.types.enabled.supported
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("none")
    with pytest.raises(anthropic.BadRequestError, match="limit"):
        client.models.list(limit=5000)
