"""The whole product gives the right answers of the shipped models on the embedded engine, with real processes."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from modelctl import Client
from protocol.errors import ErrorCode, WireError
from tests.serving import Serving, wait_until
from tools.demo_models import corpus

CLIENTS = 8
LONG_PROMPT, LONG_ANSWER = corpus.LETTERS_TEST_LONG_ANSWERS[0]
LETTERS = corpus.LETTERS_TEST_PROMPTS[:48]
STORIES = corpus.TEST_PROMPTS["stories"][:16]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    models = {
        name: {"model_dir": f"demo:{name}", "engine": "transformers", "gpu": "cpu", "max_batch_size": 32}
        for name in ("letters", "stories")
    }
    # a load imports torch, which takes long if the files are not in the page cache
    with Serving(models, wait=False) as serving:
        for name in models:
            serving.wait_state(name, "ready", within=90)
        yield serving


def greedy(client: Client, model: str, prompt: str) -> str:
    return client.complete(model, prompt, temperature=0, max_tokens=1000).text


@pytest.mark.long
def test_64_concurrent_requests_over_8_processes_equal_the_same_ones_alone(serving: Serving) -> None:
    questions = [("letters", *pair) for pair in LETTERS] + [("stories", *pair) for pair in STORIES]
    shares = [questions[i::CLIENTS] for i in range(CLIENTS)]
    processes = [serving.spawn_client([[model, prompt, 1000] for model, prompt, _ in share]) for share in shares]
    for process, share in zip(processes, shares, strict=True):
        out, _ = process.communicate(timeout=90)
        report = json.loads(out.splitlines()[-1])
        assert report["ignored"] == 0, "events followed a terminal event, or were for another"
        assert report["answers"] == [[answer, "stop"] for _, _, answer in share]
    with serving.client() as client:
        for model, prompt, answer in [*questions[: len(LETTERS)], *questions[-4:]]:
            assert greedy(client, model, prompt) == answer
    for model in ("letters", "stories"):
        serving.wait_idle(model)


def test_a_conversation_keeps_its_history(serving: Serving) -> None:
    messages, answer = corpus.STORIES_TEST_CONVERSATIONS[0]
    assert len(messages) > 1
    with serving.client() as client:
        assert client.complete("stories", messages=messages, temperature=0).text == answer


def test_leaving_early_frees_the_engine(serving: Serving) -> None:
    with serving.client() as client:
        for _ in client.generate("letters", LONG_PROMPT, temperature=0):
            break
        serving.wait_idle("letters")
        stream = client.generate("letters", LONG_PROMPT, temperature=0)
        next(stream)
        stream.cancel()
        for _ in stream:
            pass
        assert stream.finish_reason == "cancelled"
        serving.wait_idle("letters")


def test_a_killed_client_frees_the_engine(serving: Serving) -> None:
    process = serving.spawn_client([["letters", LONG_PROMPT, 1000], ["stories", STORIES[0][0], 1000]])
    assert process.stdout is not None
    assert process.stdout.readline() == "streaming\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()
    for model in ("letters", "stories"):
        serving.wait_idle(model)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"prompt": "note: " + "river " * 3000}, "prompt", "2048"),
        ({"prompt": "sort: b a ->", "max_tokens": -1}, "max_tokens", "-1"),
        ({"prompt": "sort: b a ->", "max_tokens": 2048}, "max_tokens", "2048"),
        ({"prompt": "sort: b a ->", "temprature": 1.0}, "temprature", "temperature"),
        ({"prompt": "sort: b a ->", "temperature": float("nan")}, "temperature", "nan"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "messages", "template"),
        ({"token_ids": [1, 99999]}, "token_ids", "448"),
    ],
)
def test_bad_input_names_field_value_and_limit(
    serving: Serving, fields: dict[str, object], field: str, message: str
) -> None:
    with serving.client() as client:
        with pytest.raises(WireError) as caught:
            client.complete("letters", **fields)  # type: ignore[arg-type]
        assert caught.value.field == field
        assert message in caught.value.message
        assert caught.value.code in (ErrorCode.INVALID_REQUEST, ErrorCode.CONTEXT_OVERFLOW)
        assert greedy(client, *("letters", LETTERS[0][0])) == LETTERS[0][1]


@pytest.mark.long
def test_stop_of_one_model_does_not_touch_the_other(serving: Serving) -> None:
    with serving.client() as client:
        stream = client.generate("letters", LONG_PROMPT, temperature=0)
        first = next(stream).text
        assert serving.modelctl("stop", "stories").returncode == 0
        with pytest.raises(WireError, match="stopped") as caught:
            client.complete("stories", "hello")
        assert caught.value.code is ErrorCode.MODEL_NOT_RUNNING
        assert first + "".join(delta.text for delta in stream) == LONG_ANSWER
        assert serving.modelctl("start", "stories").returncode == 0
        assert greedy(client, "stories", STORIES[0][0]) == STORIES[0][1]


def test_streams_of_a_killed_worker_go_on_and_others_notice_nothing(serving: Serving) -> None:
    pid = serving.status("stories")["pid"]
    with serving.client() as client:
        doomed = [client.generate("stories", prompt, temperature=0) for prompt, _ in STORIES[:3]]
        other = client.generate("letters", LONG_PROMPT, temperature=0)
        parts = [next(other).text]
        for stream in doomed:
            next(stream)
        os.kill(pid, signal.SIGKILL)
        parts += [delta.text for delta in other]
        assert "".join(parts) == LONG_ANSWER
        # the streams wait while the model loads again
        for stream, (_, answer) in zip(doomed, STORIES, strict=False):
            assert stream.complete().text == answer
            assert stream.usage["resumes"] == 1
    status = serving.status("stories")
    assert status["pid"] != pid
    assert status["restarts"] == 1
    assert status["last_exit"]["reason"] == "killed"


def test_the_supervisor_stayed_small_and_without_torch(serving: Serving) -> None:
    maps = Path(f"/proc/{serving.pid}/maps").read_text()
    assert not [line for line in maps.splitlines() if "torch" in line or "tokenizers" in line or "safetensors" in line]
    assert psutil.Process(serving.pid).memory_info().rss < 80e6
    torch_in_worker = "libtorch" in Path(f"/proc/{serving.status('letters')['pid']}/maps").read_text()
    assert torch_in_worker, "the look at the maps would see torch if it were there"


def test_what_a_request_may_ask_for_comes_through(serving: Serving) -> None:
    prompt, answer = corpus.LETTERS_TEST_PROMPTS[1]
    with serving.client() as client:
        reported = client.complete("letters", prompt, temperature=0, logprobs=True, top_logprobs=2)
        assert b"".join(each.bytes for each in reported.logprobs[:-1]).decode() == reported.text == answer
        assert [each.token_id for each in reported.logprobs] == list(reported.token_ids)
        assert all(each.top[0].token_id == each.token_id and len(each.top) == 2 for each in reported.logprobs)
        healed = client.complete("letters", prompt + " ", temperature=0, token_healing=True)
        assert healed.text == answer.removeprefix(" ")
        led_away = client.complete("letters", prompt, temperature=0, max_tokens=60, banned_strings=("12", "13 14"))
        assert "12" not in led_away.text
        assert led_away.text.startswith(" 10 11")
        first = reported.token_ids[0]
        biased = client.complete("letters", prompt, temperature=0, max_tokens=4, logit_bias={first: 100, first + 1: -1})
        assert biased.token_ids == (first,) * 4
        stopped = client.complete("letters", prompt, temperature=0, stop_token_ids=[reported.token_ids[3]])
        assert (stopped.finish_reason, stopped.token_ids) == ("stop", reported.token_ids[:4])
        for name in ("cfg_scale", "mirostat_mode", "dry_multiplier"):
            with pytest.raises(WireError) as refused:
                client.complete("letters", prompt, **{name: 2})
            assert (refused.value.code, refused.value.field) == (ErrorCode.UNSUPPORTED, name)
    serving.wait_idle("letters")


def test_killing_the_supervisor_leaves_nothing(serving: Serving) -> None:
    """This test must be the last in this file, since it ends the supervisor that all tests share."""
    processes = serving.processes()
    assert len(processes) >= 4
    serving.kill()
    wait_until(lambda: not [p for p in serving.processes() if p.pid != os.getpid()], what="the end of every process")
