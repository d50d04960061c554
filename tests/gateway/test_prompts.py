"""Prompts in answers: ``echo``, ``max_tokens: 0`` and ``prompt_logprobs``, as OpenAI's and vLLM's clients read them."""

import http.client
import json
import os
import signal
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from gateway.openai.prompts import EchoedPrompt, PromptPlace, TextOffset, completion_logprobs, spelled, vllm_logprobs
from protocol.client.answers import PromptLogprobs, TokenLogprob
from tests.deterministic_engine import answer, prompt_logprob
from tests.gateway.asking import ask
from tests.keyed import free_port
from tests.serving import WITHIN, Serving, engine, wait_until

PROMPT = "".join(chr(97 + number % 23) for number in range(600))


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Serving, int]]:
    port = free_port()
    with Serving({"m": engine(context=40_000)}, gateway={"listen": port, "auth": "none"}) as serving:
        yield serving, port


@pytest.fixture
def port(served: tuple[Serving, int]) -> int:
    return served[1]


def refused(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        assert response.status == 400
        error: dict[str, Any] = json.loads(response.read())["error"]
        return error


def complete(port: int, prompt: Any, **options: Any) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = ask(port, "/v1/completions", {"model": "m", "prompt": prompt, **options})["choices"]
    return choices


def streamed(port: int, prompt: Any, **options: Any) -> list[dict[str, Any]]:
    """Return the choices of all chunks."""
    text = ask(port, "/v1/completions", {"model": "m", "prompt": prompt, "stream": True, **options})
    events = text.decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [choice for event in events[:-1] for choice in json.loads(event.removeprefix("data: "))["choices"]]


def check(logprobs: dict[str, Any], prompt: str, tokens: int, top: int) -> None:
    """Check the ``logprobs`` of a prompt and the ``tokens`` of its answer."""
    text = prompt + answer(prompt, tokens)
    assert logprobs["tokens"] == list(text)
    assert logprobs["text_offset"] == list(range(len(text)))
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for number in range(1, len(prompt)):
        assert logprobs["token_logprobs"][number] == pytest.approx(prompt_logprob(number))
        likely = logprobs["top_logprobs"][number]
        assert list(likely)[:top] == [chr(token) for token in range(top)]
        assert list(likely)[top:] == [prompt[number]], "the prompt's own token is there, too"
        assert list(likely.values())[-1] == logprobs["token_logprobs"][number]
    assert logprobs["token_logprobs"][len(prompt) :] == [0.0] * tokens


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("size", [1, 2, 300])
def test_echo_with_log_probabilities(port: int, size: int, top: int, tokens: int) -> None:
    prompt = PROMPT[:size]
    for given in (prompt, list(prompt.encode())):
        (choice,) = complete(port, given, echo=True, logprobs=top, max_tokens=tokens)
        assert (choice["text"], choice["finish_reason"]) == (prompt + answer(prompt, tokens), "length")
        check(choice["logprobs"], prompt, tokens, top)
        assert "prompt_logprobs" not in choice


def test_echo_of_several_prompts_in_one_request(port: int) -> None:
    """lm-eval sends many prompts as token ids, with one token of an answer each."""
    prompts = [PROMPT[n : n + 5 + n] for n in range(20)]
    choices = complete(port, [list(p.encode()) for p in prompts], echo=True, logprobs=1, max_tokens=1, seed=1234)
    assert [choice["index"] for choice in choices] == list(range(20))
    for prompt, choice in zip(prompts, choices, strict=True):
        assert choice["text"] == prompt + answer(prompt, 1)
        check(choice["logprobs"], prompt, 1, 1)


@pytest.mark.parametrize("tokens", [0, 3])
def test_echo_without_log_probabilities(port: int, tokens: int) -> None:
    for options in ({}, {"n": 3}, {"stream": False}):
        choices = complete(port, ["abc", [100, 101]], echo=True, max_tokens=tokens, **options)
        wanted = [text + answer(text, tokens) for text in ("abc", "de") for _ in range(int(options.get("n", 1)))]
        assert [choice["text"] for choice in choices] == wanted
        assert all(choice["logprobs"] is None for choice in choices)


def test_the_end_may_be_read_together_with_the_last_piece_of_the_prompt(served: tuple[Serving, int]) -> None:
    """A gateway that was slow finds both at once. The chunk with the reason of the end was missing then."""
    serving, port = served
    (gateway,) = serving.overview()["supervisor"]["gateway"]["pids"]
    worker = serving.status("m")["pid"]

    def count() -> int:
        with serving.client() as client:
            return len(client.requests()["requests"])

    with ThreadPoolExecutor(1) as pool:
        os.kill(worker, signal.SIGSTOP)
        try:
            asked = pool.submit(streamed, port, PROMPT, echo=True, max_tokens=0, logprobs=2)
            wait_until(lambda: count() == 1, what="the request")
            os.kill(gateway, signal.SIGSTOP)
            os.kill(worker, signal.SIGCONT)
            wait_until(lambda: count() == 0, what="the end of the request")
        finally:
            os.kill(worker, signal.SIGCONT)
            os.kill(gateway, signal.SIGCONT)
        chunks = asked.result(WITHIN)
    assert "".join(chunk["text"] for chunk in chunks) == PROMPT
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["length"]


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("top", [None, 2])
def test_echo_in_a_stream(port: int, top: int | None, tokens: int) -> None:
    more = {} if top is None else {"logprobs": top}
    chunks = streamed(port, ["abc", list(PROMPT.encode())], echo=True, max_tokens=tokens, **more)
    for index, prompt in enumerate(("abc", PROMPT)):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in own) == prompt + answer(prompt, tokens)
        assert own[-1]["finish_reason"] == "length"
        if top is None:
            assert own[0]["text"] == prompt
            continue
        parts = [chunk["logprobs"] for chunk in own if chunk["logprobs"]]
        assert len(parts[0]["tokens"]) <= 257, "a long prompt comes in pieces"
        check({key: [each for part in parts for each in part[key]] for key in parts[0]}, prompt, tokens, top)


def test_max_tokens_of_0_without_echo_is_an_empty_answer(port: int) -> None:
    (choice,) = complete(port, "abc", max_tokens=0)
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("", "length", None)
    assert [chunk["text"] for chunk in streamed(port, "abc", max_tokens=0)] == [""]
    error = refused(
        port, "/v1/chat/completions", {"model": "m", "max_tokens": 0, "messages": [{"role": "user", "content": "x"}]}
    )
    assert error["param"] == "max_tokens"
    assert "at least 1" in error["message"]


def vllm(prompt: str, top: int) -> list[Any]:
    entries: list[Any] = [None]
    for number in range(1, len(prompt)):
        own = ord(prompt[number])
        entry = {str(own): {"logprob": prompt_logprob(number), "rank": None, "decoded_token": prompt[number]}}
        for rank in range(top):
            entry[str(rank)] = {"logprob": prompt_logprob(number, rank), "rank": rank + 1, "decoded_token": chr(rank)}
        entries.append(entry)
    return entries


@pytest.mark.parametrize("top", [0, 3])
def test_prompt_logprobs_in_vllms_shape(port: int, top: int) -> None:
    (choice,) = complete(port, PROMPT[:300], prompt_logprobs=top, max_tokens=2)
    assert choice["prompt_logprobs"] == vllm(PROMPT[:300], top)
    assert (choice["text"], choice["logprobs"]) == (answer(PROMPT[:300], 2), None)
    (both,) = complete(port, "abc", prompt_logprobs=top, echo=True, logprobs=1, max_tokens=1)
    assert both["prompt_logprobs"] == vllm("abc", top)
    check(both["logprobs"], "abc", 1, 1)
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt_logprobs": top, "max_tokens": 2}
    found = ask(port, "/v1/chat/completions", chat)
    assert found["prompt_logprobs"] == vllm("user: x", top)
    assert "prompt_logprobs" not in found["choices"][0]
    assert "prompt_logprobs" not in ask(port, "/v1/chat/completions", chat | {"prompt_logprobs": None})


@pytest.mark.parametrize(
    ("path", "options", "param"),
    [
        ("completions", {"echo": True, "logprobs": 21}, "logprobs"),
        ("completions", {"echo": "yes"}, "echo"),
        ("completions", {"echo": True, "logprobs": 1, "n": 2}, "n"),
        ("completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": True}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": 0, "token_healing": True}, "prompt_logprobs"),
        ("completions", {"echo": True, "logprobs": 0, "token_healing": True}, "logprobs"),
        ("completions", {"echo": True, "logprobs": 20, "prompt": "x" * 100_000}, "prompt"),
        ("completions", {"prompt_logprobs": 20, "prompt": ["x" * 10_000] * 10}, "prompt"),
        ("chat/completions", {"prompt_logprobs": 1, "n": 2}, "n"),
        ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("chat/completions", {"echo": True}, "echo"),
    ],
)
def test_what_is_refused_by_name(port: int, path: str, options: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]} if path.startswith("chat") else {"prompt": "abc"}
    assert refused(port, f"/v1/{path}", {"model": "m", "max_tokens": 2, **body, **options})["param"] == param


def test_a_stream_that_is_left_while_the_prompt_comes_ends(served: tuple[Serving, int]) -> None:
    serving, port = served
    body = {"model": "m", "prompt": PROMPT * 60, "echo": True, "logprobs": 5, "stream": True}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        assert connection.getresponse().readline().startswith(b"data: ")
    serving.wait_idle("m")


# shapes


def test_the_drawn_token_is_among_the_likeliest() -> None:
    other = TokenLogprob(5, -0.5, b"x")
    drawn = TokenLogprob(6, -2.0, b"y", (other,))
    likeliest = TokenLogprob(5, -0.5, b"x", (other,))
    same_text = TokenLogprob(7, -3.0, b"x", (other,))
    impossible = TokenLogprob(8, float("-inf"), b"z", ())
    shown = completion_logprobs([drawn, likeliest, same_text, impossible], TextOffset(10))
    assert shown["top_logprobs"] == [{"x": -0.5, "y": -2.0}, {"x": -0.5}, {"x": -0.5}, {"z": -9999.0}]
    assert shown["text_offset"] == [10, 11, 12, 13]


def test_a_token_within_a_character() -> None:
    assert [spelled(token) for token in (b"caf\xc3", b"\xa9", "é".encode())] == [
        r"bytes:caf\xc3",
        r"bytes:\xa9",
        "é",
    ]
    place = PromptPlace("café au")
    assert [place.add(token) for token in (b"<s>", b" caf\xc3", b"\xa9", b" a", b"u", b"</s>")] == [0, 0, 3, 4, 6, 7]
    assert place.take() == "café au"
    assert place.take(rest=True) == ""


def test_a_text_that_its_tokens_do_not_spell() -> None:
    """A tokenizer may change a text. The text is sent whole all the same."""
    place = PromptPlace("ＡＢ c")
    assert [place.add(token) for token in (b"A", b"B", b" c")] == [0, 0, 0]
    assert (place.take(), place.take(rest=True)) == ("", "ＡＢ c")


def test_a_prompts_own_token_among_the_likeliest() -> None:
    piece = PromptLogprobs(
        1, 2, (0, b"<s>"), array("I", [7, 9, 7]), array("f", [-1.5, -0.5, -1.5]), {0: b"<s>", 7: b"a", 9: b"\xff"}
    )
    shown = EchoedPrompt("a", 1).logprobs(piece)
    assert shown["tokens"] == ["<s>", "a"]
    assert shown["top_logprobs"] == [None, {r"bytes:\xff": -0.5, "a": -1.5}]
    assert list(vllm_logprobs(piece, 1)) == [
        {
            "7": {"logprob": -1.5, "rank": 2, "decoded_token": "a"},
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": "�"},
        }
    ]
