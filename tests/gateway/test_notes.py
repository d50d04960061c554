"""What became of a request's options is said: in headers, in the request's story, and in the gateway's log."""

import http.client
import json
import logging
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from gateway.conversation import OMITTED_IMAGE, image_text
from gateway.http.answers import MOST_NAMED, IgnoredLog, Notes, named
from gateway.http.errors import ApiError
from tests.gateway.running import Gateway
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine, wait_until

CONTEXT = 64
PROMPT = "secret"
MESSAGES = [{"role": "user", "content": PROMPT}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 5000},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 5000},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 5000},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5000},
}


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    gateway = {"listen": free_port(), "auth": "none"}
    forced = {"max_tokens": 7, "temperature": 0.7, "stop": ["secret end"]}
    variants = {"cold": {"forced": {"temperature": 0}}}
    models = {
        "m": engine(context=CONTEXT), "lazy": engine(context=CONTEXT, lazy=True),
        "strict": engine(context=CONTEXT, forced=forced, variants=variants, lazy=True),
    }  # fmt: skip
    with Serving(models, gateway=gateway) as serving:
        wait_until(lambda: serving.overview()["supervisor"]["gateway"]["ready"])
        yield serving


def ask(
    serving: Serving, path: str, body: dict[str, Any], port: int | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    port = port or int(serving.overview()["supervisor"]["gateway"]["listen"].rpartition(":")[2])
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("POST", path, json.dumps({"model": "m"} | body))
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def story(serving: Serving, headers: http.client.HTTPMessage) -> list[str]:
    with serving.client() as client:
        (told,) = client.story(headers["x-request-id"])["requests"]
        return list(told["notes"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_max_tokens_that_does_not_fit_is_cut_and_said(serving: Serving, path: str, stream: bool) -> None:
    body = PATHS[path] | {"stream": stream}
    status, headers, answer = ask(serving, path, body)
    assert status == 200, answer
    rendered = PROMPT if path == "/v1/completions" else f"user: {PROMPT}"
    left = CONTEXT - len(rendered)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    assert headers["x-modelctl-changed"] == f"{limit}={left}"
    assert headers["x-modelctl-ignored"] is None
    assert story(serving, headers) == [f"changed max_tokens={left}"]
    fits = {name: 5 for name in body if name.startswith("max_")}
    assert ask(serving, path, body | fits)[1]["x-modelctl-changed"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_value_that_a_model_forces_counts_and_is_said(serving: Serving, path: str, stream: bool) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = PATHS[path] | {"stream": stream, "model": "strict", "temperature": 1.5, limit: 3}
    status, headers, answer = ask(serving, path, asked)
    assert status == 200, answer
    assert headers["x-modelctl-changed"] == f"{limit}=7, temperature=0.7"
    assert story(serving, headers) == ["changed max_tokens=7", "changed temperature=0.7"]
    if not stream:
        usage = json.loads(answer)["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == 7
    same = {"temperature": 0.7, limit: 7}
    assert ask(serving, path, asked | same)[1]["x-modelctl-changed"] is None
    assert ask(serving, path, asked | same | {"model": "strict:cold"})[1]["x-modelctl-changed"] == "temperature=0"


def test_texts_that_a_model_forces_are_not_repeated(serving: Serving) -> None:
    status, headers, answer = ask(serving, "/v1/completions", {"model": "strict", "prompt": "a", "stop": "x"})
    assert (status, headers["x-modelctl-changed"]) == (200, "stop"), answer
    asked = {"model": "strict", "messages": MESSAGES, "max_tokens": 7, "stop_sequences": ["x"]}
    assert ask(serving, "/v1/messages", asked)[1]["x-modelctl-changed"] == "stop_sequences"


def test_several_answers_have_one_line(serving: Serving) -> None:
    status, headers, _ = ask(serving, "/v1/completions", {"prompt": ["a", "bcd"], "n": 2, "max_tokens": 5000})
    assert (status, headers["x-modelctl-changed"]) == (200, f"max_tokens={CONTEXT - 3}")


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_ignored_is_said(serving: Serving, stream: bool) -> None:
    options = {"include_usage": True, "brand_new": 1, PROMPT + " as a name": 2, "none": None}
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": stream, "stream_options": options}
    status, headers, answer = ask(serving, "/v1/completions", body)
    assert status == 200, answer
    assert headers["x-modelctl-ignored"] == "stream_options.brand_new, 1 more"
    assert story(serving, headers) == ["ignored stream_options.brand_new"]
    for _ in range(3):
        ask(serving, "/v1/completions", body)
    assert serving.log("gateway").count("unknown option stream_options.brand_new,") == 1
    assert PROMPT not in serving.log("gateway")


THINKING = {"type": "enabled", "budget_tokens": 2000}
SHORT: dict[str, dict[str, Any]] = {
    path: body | {name: 5 for name in body if name.startswith("max_")} for path, body in PATHS.items()
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "budget", "name"),
    [
        ("/v1/chat/completions", {"reasoning_budget": 9}, "reasoning_budget"),
        ("/v1/chat/completions", {"thinking_budget": 9}, "thinking_budget"),
        ("/v1/chat/completions", {"reasoning": {"max_tokens": 9}}, "reasoning.max_tokens"),
        ("/v1/responses", {"reasoning_budget": 9}, "reasoning_budget"),
        ("/v1/messages", {"thinking": THINKING, "max_tokens": 2001}, "thinking.budget_tokens"),
    ],
)
def test_a_budget_is_ignored_by_a_model_that_does_not_reason(
    serving: Serving, path: str, budget: dict[str, Any], name: str, stream: bool
) -> None:
    status, headers, answer = ask(serving, path, SHORT[path] | budget | {"stream": stream})
    assert status == 200, answer
    assert headers["x-modelctl-ignored"] == name
    assert "ignored reasoning_budget" in story(serving, headers)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stay", [{"keep_alive": "5m"}, {"keep_alive": 0}, {"ttl": 60}])
def test_how_long_a_model_stays_is_ignored_if_it_is_never_unloaded(
    serving: Serving, path: str, stay: dict[str, Any]
) -> None:
    status, headers, answer = ask(serving, path, SHORT[path] | stay)
    assert status == 200, answer
    (name,) = stay
    assert headers["x-modelctl-ignored"] == name
    assert story(serving, headers) == [f"ignored {name}"]
    status, headers, answer = ask(serving, path, SHORT[path] | stay | {"model": "lazy"})
    assert (status, headers["x-modelctl-ignored"]) == (200, None), answer


def test_what_asks_for_nothing_is_refused_with_unknown_options(serving: Serving) -> None:
    with Gateway(serving, unknown_options="refuse") as gateway:
        wait_until(lambda: ask(serving, "/v1/completions", SHORT["/v1/completions"], gateway.port)[0] == 200)
        for more, name in (({"keep_alive": 5}, "keep_alive"), ({"reasoning_budget": 5}, "reasoning_budget")):
            status, _, answer = ask(serving, "/v1/chat/completions", SHORT["/v1/chat/completions"] | more, gateway.port)
            error = json.loads(answer)["error"]
            assert status == 400
            assert name in error["param"]


def test_unknown_options_can_be_refused(serving: Serving) -> None:
    with Gateway(serving, unknown_options="refuse") as gateway:
        body = {"prompt": PROMPT, "max_tokens": 2, "stream_options": {"brand_new": 1}}
        status, _, answer = ask(serving, "/v1/completions", body, gateway.port)
        error = json.loads(answer)["error"]
        assert (status, error["param"]) == (400, "stream_options.brand_new")
        assert "unknown option 'stream_options.brand_new': leave it out" in error["message"]


def test_names_are_written_only_if_they_look_like_names_and_are_few() -> None:
    notes = Notes()
    for i in range(MOST_NAMED + 3):
        notes.ignore(f"option{i}")
        notes.ignore(f"option{i}")
    notes.ignore("line\r\nx-evil: 1")
    notes.ignore("x" * 65)
    ((name, value),) = notes.headers()
    assert name == b"x-modelctl-ignored"
    assert value.startswith(b"option0, option1, ")
    assert value.endswith(b"option15, 5 more")
    assert len(notes.for_story()) == MOST_NAMED
    assert [named(each) for each in ("web_search", "a b", "", 5)] == ["web_search", "other", "other", "other"]
    notes = Notes()
    notes.change("tools: web_search")
    notes.change("tools: web_search")
    assert image_text({"type": "input_image", "image_url": "data:"}, notes) == OMITTED_IMAGE
    assert image_text({"type": "image_url", "image_url": {}}, notes) == OMITTED_IMAGE
    assert image_text({"type": "text", "text": "x"}, notes) is None
    assert notes.headers() == [(b"x-modelctl-changed", b"tools: web_search, images: 2")]
    assert notes.for_story() == ["changed tools: web_search", "changed images: 2"]
    with pytest.raises(ApiError, match="unknown option"):
        Notes(refuse=True).ignore("brand_new")


def test_the_log_says_each_name_once_a_minute_and_remembers_only_so_many(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = IgnoredLog(lambda: now)
    with caplog.at_level(logging.INFO):
        for i in range(10 * IgnoredLog.MOST):
            log.tell(f"o{i}")
        assert len(caplog.records) == IgnoredLog.MOST
        now = 30.0
        log.tell("o0")
        assert len(caplog.records) == IgnoredLog.MOST
        now = 61.0
        log.tell("o0")
        log.tell("new")
        assert [record.getMessage().split()[5] for record in caplog.records[IgnoredLog.MOST :]] == ["o0,", "new,"]
    assert len(log._told) == IgnoredLog.MOST


def test_what_is_left_out_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            Notes().change("tools: never_seen_before")
            Notes().omit("pictures of this test")
    said = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert said == ["never_seen_before", "pictures of this test"]
