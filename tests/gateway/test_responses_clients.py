"""OpenAI's client package gets responses, calls of functions and errors from an engine that replays answers."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine

SIZES = (1, 3, 1000)
"""Characters of a token, one model for each."""
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Tell the weather.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
    {"type": "function", "name": "get_time", "parameters": None, "strict": None},
]
CITY = {"city": "Łódź", "days": 3}
ANSWERS = [
    ("plain", ["Hello there."]),
    ("weather", [("get_weather", CITY)]),
    ("both", ["I look.", ("get_weather", CITY), ("get_time", {})]),
    ("thought", [{"reasoning": "The user wants weather."}, "Let me see.", ("get_weather", CITY)]),
]


class Person(BaseModel):
    name: str
    age: int


def replaying(**options: Any) -> dict[str, Any]:
    return {"model_dir": ".", "engine": "tests.replaying_engine:ReplayingEngine", "options": options}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    models = {f"size-{size}": replaying(size=size) for size in SIZES}
    dies = engine("RaisesAtToken", step_s=0.01)
    dies["options"]["template"] = "{{ messages[0].content }}"
    models |= {
        "agent": replaying() | {"engine": "tests.agent_engine:AgentEngine"},
        "dies": dies,
        "stopped": engine(autostart=False),
    }
    port = free_port()
    with Serving(models, gateway={"listen": port, "auth": "none"}):
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=WITHIN, max_retries=0) as client:
        yield client


def shown(output: Any) -> list[Any]:
    """Return the items of a response, without ids and the line breaks around texts."""
    found: list[Any] = []
    for item in output:
        assert item.status == "completed"
        if item.type == "message":
            (part,) = item.content
            found.append(part.text.strip("\n"))
        elif item.type == "reasoning":
            assert item.summary == []
            found.append({"reasoning": item.content[0].text.strip("\n")})
        else:
            assert item.id.startswith("fc_")
            assert item.call_id.startswith("call_")
            found.append((item.name, json.loads(item.arguments)))
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "output"), ANSWERS)
def test_a_response_is_the_same_whole_and_streamed(
    client: openai.OpenAI, size: int, name: str, output: list[Any]
) -> None:
    asked: Any = {"model": f"size-{size}", "input": f"say {name}", "tools": TOOLS}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert shown(whole.output) == shown(streamed.output) == output
    assert whole.status == streamed.status == "completed"
    assert whole.output_text.strip("\n") == "".join(each for each in output if isinstance(each, str))
    assert whole.usage is not None
    assert whole.usage == streamed.usage
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens > 10
    assert (whole.usage.output_tokens_details.reasoning_tokens > 0) == (name == "thought")
    assert whole.model_dump(include={"object", "model", "store", "error", "previous_response_id"}) == {
        "object": "response", "model": f"size-{size}", "store": True, "error": None, "previous_response_id": None,
    }  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == streamed.output_text


def raw_events(port: int, body: dict[str, Any]) -> list[dict[str, Any]]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("POST", "/v1/responses", json.dumps(body | {"stream": True}))
        response = connection.getresponse()
        assert response.status == 200
        events = []
        for block in response.read().decode().split("\n\n")[:-1]:
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        return events


def test_the_events_of_a_stream_have_the_order_of_the_api(port: int) -> None:
    events = raw_events(port, {"model": "size-3", "input": "say thought", "tools": TOOLS})
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for i, kind in enumerate(kinds) if not kind.endswith("delta") or kinds[i - 1] != kind] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [(item["id"], item["status"]) for item in added] == [(item["id"], "in_progress") for item in done]
    indices = [event["output_index"] for event in events if "output_index" in event]
    assert indices == sorted(indices)


def test_a_function_is_called_and_its_result_is_told(client: openai.OpenAI) -> None:
    asked: Any = {"model": "agent", "tools": TOOLS, "include": ["reasoning.encrypted_content"], "store": False}
    items: list[Any] = [{"role": "user", "content": 'call get_weather with {"city": "Ulm", "days": 1}'}]
    for streamed in (False, True):
        if streamed:
            with client.responses.stream(**asked, input=items) as stream:
                response: Any = stream.get_final_response()
        else:
            response = client.responses.create(**asked, input=items)
        reasoning, call = response.output
        assert (reasoning.type, call.name, json.loads(call.arguments)) == (
            "reasoning", "get_weather", {"city": "Ulm", "days": 1},
        )  # fmt: skip
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        replayed = [item.to_dict() for item in response.output]
        told = client.responses.create(**asked, input=[*items, *replayed, result])
        assert told.output_text == "The tool says: rain"


def test_langchain(port: int) -> None:
    function = {"type": "function", "function": {key: TOOLS[0][key] for key in ("name", "parameters")}}
    model = ChatOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key=SecretStr("none"), model="agent", max_retries=0, timeout=WITHIN,
        use_responses_api=True,
    ).bind_tools([function])  # fmt: skip
    asked: list[Any] = [{"role": "user", "content": 'call get_weather with {"city": "Ulm", "days": 1}'}]
    streamed: Any = None
    for chunk in model.stream(asked):
        streamed = chunk if streamed is None else streamed + chunk
    for told in (model.invoke(asked), streamed):
        (call,) = told.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Ulm", "days": 1})
        result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        assert model.invoke([*asked, told, result]).text == "The tool says: rain"


def test_a_response_is_parsed_into_a_model_of_pydantic(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="agent", input="hello", instructions="shape", text_format=Person)
    assert parsed.output_parsed == Person(name="Ada", age=36)
    with client.responses.stream(model="agent", input="hello", instructions="shape", text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == Person(name="Ada", age=36)


def test_a_response_that_was_cut_is_incomplete(client: openai.OpenAI, port: int) -> None:
    asked: Any = {"model": "size-1", "input": "say plain", "max_output_tokens": 5}
    cut = client.responses.create(**asked)
    assert (cut.status, cut.output_text, cut.max_output_tokens) == ("incomplete", "Hello", 5)
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].status == "incomplete"  # type: ignore[union-attr]
    last = raw_events(port, asked)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")


def test_an_error_within_a_stream_is_a_failed_response(port: int) -> None:
    body = {"model": "dies", "input": "x", "max_output_tokens": 50, "resume": False}
    *_, last = raw_events(port, body | {"input": [{"role": "user", "content": "bad"}]})
    assert last["type"] == "response.failed", last
    failed = last["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "worker_died")
    assert failed["output"][0]["status"] == "incomplete"


def test_errors_before_the_first_event_have_a_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="send the items themselves") as caught:
        client.responses.create(model="size-3", input="x", previous_response_id="resp_1")
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "not_found")
    with pytest.raises(openai.BadRequestError, match="web_search"):
        client.responses.create(
            model="size-3",
            input="x",
            tools=[{"type": "web_search"}],
            tool_choice={"type": "web_search"},  # type: ignore[call-overload]
        )
    with pytest.raises(openai.NotFoundError, match="no model 'none'"):
        client.responses.create(model="none", input="x", stream=True)
    with pytest.raises(openai.InternalServerError, match="stopped"):
        client.responses.create(model="stopped", input="x")
    long = client.responses.with_raw_response.create(model="size-3", input="say plain", max_output_tokens=100_000)
    assert long.headers["x-modelctl-changed"].startswith("max_output_tokens=")
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="responses cannot be fetched"):
            ask("resp_1")
