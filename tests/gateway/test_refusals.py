"""The gateway's refusals name the field, have OpenAI's shape, and say whether to try again."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pytest

from gateway.http.answers import ErrorAnswer
from gateway.http.errors import NAMES, STATUS, error_headers
from protocol.errors import RETRYABLE, ErrorCode, WireError
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine

PROMPT = {"model": "m", "prompt": "secret-prompt", "max_tokens": 3}
NAMED = {"type": "function", "function": {"name": "f"}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "secret-prompt"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    models = {"m": engine(), "stopped": engine(autostart=False), "broken": engine("CannotLoad", autostart=False)}
    port = free_port()
    with Serving(models, gateway={"listen": port, "auth": "none"}):
        yield port


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, http.client.HTTPMessage, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        text = response.read()
        return response.status, response.headers, json.loads(text) if text else None


@pytest.mark.parametrize(
    ("path", "more", "param", "code"),
    [
        ("completions", {"temprature": 1}, "temprature", "invalid_request"),
        ("completions", {"temperature": 99}, "temperature", "invalid_request"),
        ("completions", {"temperature": "hot"}, "temperature", "invalid_request"),
        ("completions", {"n": 0}, "n", "invalid_request"),
        ("completions", {"n": 129}, "n", "invalid_request"),
        ("completions", {"prompt": ["x"] * 600, "n": 2}, "prompt", "invalid_request"),
        ("completions", {"prompt": []}, "prompt", "invalid_request"),
        ("completions", {"prompt": [-1]}, "prompt", "invalid_request"),
        ("completions", {"best_of": 2}, "best_of", "unsupported"),
        ("completions", {"suffix": "x"}, "suffix", "unsupported"),
        ("completions", {"logprobs": 21}, "logprobs", "invalid_request"),
        ("completions", {"stream": "yes"}, "stream", "invalid_request"),
        ("completions", {"stream_options": 1}, "stream_options", "invalid_request"),
        ("completions", {"on_behalf_of": "0" * 64}, "on_behalf_of", "invalid_request"),
        ("completions", {"tools": [NAMED]}, "tools", "invalid_request"),
        ("completions", {"affinity": "x" * 300}, "affinity", "invalid_request"),
        ("completions", {"affinity": {"x": []}}, "affinity", "invalid_request"),
        ("completions", {"priority": "x" * 300}, "priority", "invalid_request"),
        ("completions", {"deadline_ms": {"x": [[]]}}, "deadline_ms", "invalid_request"),
        ("completions", {"seed": 1 << 70}, "seed", "invalid_request"),
        ("completions", {"max_tokens": 10_000, "cut_to_context": False}, "max_tokens", "context_length_exceeded"),
        ("completions", {"max_completion_tokens": 4}, "max_completion_tokens", "invalid_request"),
        ("completions", {"logit_bias": {"1": 1}}, "logit_bias", "unsupported"),
        ("completions", {"model": None}, "model", "invalid_request"),
        ("completions", {"response_format": {"type": "xml"}}, "response_format.type", "invalid_request"),
        ("completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_request"),
        ("completions", {"response_format": {"type": "json_object"}}, "response_format", "unsupported"),
        ("chat/completions", {"audio": {"voice": "x"}}, "audio", "unsupported"),
        ("chat/completions", {"modalities": ["audio"]}, "modalities", "unsupported"),
        ("chat/completions", {"functions": [{}]}, "functions", "unsupported"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice", "invalid_request"),
        ("chat/completions", {"tool_choice": "required", "tools": [NAMED]}, "tools", "unsupported"),
        ("chat/completions", {"tool_choice": "any", "tools": [NAMED]}, "tool_choice", "invalid_request"),
        (
            "chat/completions",
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [NAMED]},
            "tool_choice.function.name",
            "invalid_request",
        ),
        (
            "chat/completions",
            {"tools": [{"type": "custom"}], "tool_choice": {"type": "custom"}},
            "tool_choice",
            "unsupported",
        ),
        ("chat/completions", {"tools": [NAMED, NAMED]}, "tools[1]", "invalid_request"),
        ("chat/completions", {"tools": "f"}, "tools", "invalid_request"),
        ("chat/completions", {"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_request"),
        ("chat/completions", {"reasoning_budget": 5, "thinking_budget": 6}, "thinking_budget", "invalid_request"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "invalid_request"),
        ("chat/completions", {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "invalid_request"),
        ("chat/completions", {"prompt": "x"}, "prompt", "invalid_request"),
        ("chat/completions", {"messages": []}, "messages", "invalid_request"),
        ("chat/completions", {"messages": [{"role": "king"}]}, "messages[0].role", "invalid_request"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "unsupported",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
            "unsupported",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]},
            "messages[0].function_call",
            "unsupported",
        ),
    ],
)
def test_a_refusal_names_the_option(port: int, path: str, more: dict[str, Any], param: str, code: str) -> None:
    for stream in (False, True):
        body = (PROMPT if path == "completions" else CHAT) | {"stream": stream} | more
        status, headers, answer = ask(port, "POST", f"/v1/{path}", body)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code), answer
        assert answer["error"]["type"] == "invalid_request_error"
        assert headers["x-should-retry"] == "false"
        assert "secret-prompt" not in answer["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"echo": False, "best_of": 1, "suffix": "", "stop": [], "logprobs": None, "user": "u", "metadata": {}},
        {"max_tokens": 3, "max_completion_tokens": 3},
        {"stop": "x", "seed": 1, "frequency_penalty": 0, "presence_penalty": 0, "top_p": 1, "n": 2},
    ],
)
def test_what_clients_always_send_is_accepted(port: int, more: dict[str, Any]) -> None:
    status, _, answer = ask(port, "POST", "/v1/completions", PROMPT | more)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == len("secret-prompt")


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("POST", "/v1/audio/speech", 404, "audio is not offered"),
        ("POST", "/v1/images/generations", 404, "images are not offered"),
        ("POST", "/v1/responses/resp_1/cancel", 404, "responses cannot be fetched"),
        ("POST", "/v1/messages/batches", 404, "batches are not offered"),
        ("GET", "/api/tags", 404, "Ollama"),
        ("POST", "/api/chat", 404, "Ollama"),
        ("GET", "/v1/nothing", 404, "Offered are GET /v1/models"),
        ("GET", "/v1/chat/completions", 405, "use POST"),
        ("DELETE", "/v1/models/m", 405, "use GET"),
        ("GET", "/v1/models/none", 404, "no model 'none'"),
        ("GET", "/v1/models/stoped", 404, "no model 'stoped' is configured; did you mean 'stopped'?"),
    ],
)
def test_a_path_or_method_that_is_not_offered_is_refused_by_name(
    port: int, method: str, path: str, status: int, says: str
) -> None:
    got, headers, answer = ask(port, method, path, {"model": "m"} if method == "POST" else None)
    assert got == status
    assert says in answer["error"]["message"]
    assert headers["x-should-retry"] == "false"


def test_paths_with_a_slash_or_another_base_url_are_found(port: int) -> None:
    for path in ("/v1/models", "/v1/models/", "/models", "/v1/v1/models"):
        assert [model["id"] for model in ask(port, "GET", path)[2]["data"]] == ["broken", "m", "stopped"]
    for path in ("/v1/completions/", "/completions", "/v1/v1/completions"):
        assert ask(port, "POST", path, PROMPT)[0] == 200


def test_models_that_are_not_running(port: int) -> None:
    (*_, stopped) = ask(port, "GET", "/v1/models")[2]["data"]
    assert (stopped["state"], stopped["status"], stopped["modelctl"]) == (
        "not-loaded",
        {"value": "unloaded"},
        {"state": "stopped", "model": "stopped", "aliases": [], "variants": [], "default": None},
    )
    status, headers, answer = ask(port, "POST", "/v1/completions", PROMPT | {"model": "stopped"})
    assert (status, answer["error"]["code"], headers["x-should-retry"]) == (503, "model_not_running", "false")
    for name, expected in {
        "none": (404, "model_not_found"),
        "M/..": (404, "model_not_found"),
        "m" * 300: (404, "model_not_found"),
        "": (400, "invalid_request"),  # names no model, and there is no default model
    }.items():
        for path, body in (("/v1/completions", PROMPT | {"stream": True}), ("/tokenize", {"prompt": "x"})):
            status, _, answer = ask(port, "POST", path, body | {"model": name})
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (*expected, "model")


def test_a_token_that_the_model_does_not_have(port: int) -> None:
    status, _, answer = ask(port, "POST", "/detokenize", {"model": "m", "tokens": [97, 256]})
    assert (status, answer["error"]["param"]) == (400, "tokens")


def test_every_answer_has_an_id_of_its_own(port: int) -> None:
    paths = ("/v1/models", "/v1/nothing", "/livez", "/v1/models")
    ids = [ask(port, "GET", path)[1]["x-request-id"] for path in paths if path != "/livez"]
    ids.append(ask(port, "POST", "/v1/completions", PROMPT | {"n": 0})[1]["x-request-id"])
    assert len(set(ids)) == 4
    assert all(each.startswith("req_") for each in ids)


def test_the_openai_package_raises_its_own_errors_and_does_not_try_again(port: int) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=5, timeout=WITHIN) as client:
        with pytest.raises(openai.InternalServerError, match="stopped") as caught:  # a 503, which it would retry
            client.completions.create(model="stopped", prompt="x")
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert caught.value.request.headers["x-stainless-retry-count"] == "0"
        with pytest.raises(openai.BadRequestError, match="this model writes text: it makes no vectors"):
            client.embeddings.create(model="m", input="x")
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="m", prompt="x", temperature=99)
        assert (refused.value.param, refused.value.code) == ("temperature", "invalid_request")


def test_a_prompt_that_is_too_long_is_refused_in_words_that_clients_know(port: int) -> None:
    """LiteLLM looks for the first words or for "prompt is too long", LangChain for the code."""
    for path, more in (("completions", {"prompt": "x" * 4200}), ("chat/completions", {"messages": long_chat()})):
        status, _, answer = ask(port, "POST", f"/v1/{path}", {"model": "m"} | more)
        error = answer["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith("This model's maximum context length is 4096 tokens. However, ")
        assert "prompt is too long" in error["message"]
        assert error["message"].endswith("Please reduce the length of the messages or the prompt.")
    huge = ask(port, "POST", "/v1/completions", {"model": "m", "prompt": "x" * 1_000_000})[2]["error"]
    assert huge["message"].startswith("This model's maximum context length is exceeded: prompt is too long: ")


def long_chat() -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x" * 4200}]


def test_every_code_has_a_status() -> None:
    assert set(STATUS) == set(ErrorCode)
    assert set(NAMES) <= set(ErrorCode)
    for code, status in STATUS.items():
        assert status in range(400, 505)
        headers = error_headers(WireError(code, "x"))
        assert headers["x-should-retry"] == ("true" if code in RETRYABLE else "false")
        assert ("retry-after" in headers) == (code in RETRYABLE)
    assert (STATUS[ErrorCode.POISONED], STATUS[ErrorCode.WORKER_DIED]) == (400, 502)


@pytest.mark.parametrize(("after_ms", "after_s"), [(0, "1"), (1, "1"), (1000, "1"), (1001, "2"), (60_000, "60")])
def test_the_wait_is_told_in_whole_seconds(after_ms: int, after_s: str) -> None:
    response = ErrorAnswer(WireError(ErrorCode.OVERLOADED, "x", retry_after_ms=after_ms))
    assert (response.status_code, response.headers["retry-after"]) == (429, after_s)
    # Even an error with a final code tells when a retry helps, if the GPU had no room for the model.
    assert error_headers(WireError(ErrorCode.MODEL_FAILED, "x", retry_after_ms=after_ms))["x-should-retry"] == "true"
