"""Resumed answers of real models equal undisturbed answers, byte for byte."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelctl import AsyncClient
from tests.serving import Serving, wait_until
from tools.demo_models import corpus

pytestmark = pytest.mark.long

QUESTIONS = {"letters": corpus.LETTERS_TEST_PROMPTS[:24], "stories": corpus.TEST_PROMPTS["stories"][:8]}
LOAD_S = 90


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    models = {
        name: {
            "model_dir": f"demo:{name}",
            "engine": "transformers",
            "gpu": "cpu",
            "max_batch_size": 16,
            "replicas": 2 if name == "letters" else 1,
        }
        for name in QUESTIONS
    }
    limits = {"poison": {"limit": 100}, "restart": {"limit": 100, "initial": "10ms"}}
    with Serving(models, wait=False, **limits) as serving:
        for worker in ("letters:1", "letters:2", "stories"):
            serving.wait_state(worker, "ready", within=LOAD_S)
        yield serving


async def ask(runtime_dir: Path, model: str, halfway: asyncio.Event, **fields: Any) -> list[tuple[str, int]]:
    """Return (text, times resumed) of each answer. ``halfway`` is set when half of them have begun."""
    async with AsyncClient(runtime_dir=runtime_dir) as client:
        begun = 0

        async def one(prompt: str) -> tuple[str, int]:
            nonlocal begun
            stream = client.generate(model, prompt, **{"temperature": 0, "max_tokens": 1000, **fields})
            first = True
            async for _ in stream:
                begun, first = begun + first, False
                if begun >= len(QUESTIONS[model]) // 2:
                    halfway.set()
            return stream.text, stream.usage.get("resumes", 0)

        return await asyncio.gather(*(one(prompt) for prompt, _ in QUESTIONS[model]))


async def disturbed(serving: Serving, model: str, pid: int, **fields: Any) -> list[tuple[str, int]]:
    halfway = asyncio.Event()
    answers = asyncio.create_task(ask(serving.runtime_dir, model, halfway, **fields))
    await halfway.wait()
    os.kill(pid, signal.SIGKILL)
    return await answers


@pytest.mark.parametrize("worker", ["letters:1", "letters:2", "stories"])
def test_the_whole_text_is_the_models(serving: Serving, worker: str) -> None:
    """The answer resumes in another replica at once, or in the successor of the only worker."""
    model = worker.partition(":")[0]
    answers = asyncio.run(disturbed(serving, model, serving.wait_state(worker, "ready", LOAD_S)["pid"]))
    assert [text for text, _ in answers] == [answer for _, answer in QUESTIONS[model]]
    assert sum(resumes for _, resumes in answers) > 0, "nothing was disturbed"
    for name in ("letters:1", "letters:2", "stories"):
        serving.wait_state(name, "ready", LOAD_S)


def test_a_loop_is_found_across_a_death(serving: Serving) -> None:
    """The model of stories, greedy and without an end token, repeats itself soon."""
    options = {"temperature": 0, "max_tokens": 900, "ignore_eos": True, "stop_on_loop": 800}
    with serving.client() as client:
        calm = client.complete("stories", "Once upon a time", **options)
        assert (calm.finish_reason, len(calm.token_ids) >= 800) == ("loop", True)
        pid = serving.wait_state("stories", "ready", LOAD_S)["pid"]
        stream = client.generate("stories", "Once upon a time", **options)
        next(stream)  # a loop over the stream would cancel the request at its end
        os.kill(pid, signal.SIGKILL)
        whole = stream.complete()
    assert whole.usage.pop("resumes") > 0
    assert (whole.token_ids, whole.text, whole.finish_reason) == (calm.token_ids, calm.text, "loop")
    assert whole.usage == calm.usage
    serving.wait_state("stories", "ready", LOAD_S)


def test_seeded_draws_and_penalties_go_on_too(serving: Serving) -> None:
    """The temperature does not change the demo models' answers, but needs a draw for each token."""
    fields = {"temperature": 0.2, "seed": 7, "frequency_penalty": 0.01, "repetition_penalty": 1.01}
    calm = asyncio.run(ask(serving.runtime_dir, "letters", asyncio.Event(), **fields))
    pid = serving.wait_state("letters:1", "ready", LOAD_S)["pid"]
    answers = asyncio.run(disturbed(serving, "letters", pid, **fields))
    assert [text for text, _ in answers] == [text for text, _ in calm]
    assert sum(resumes for _, resumes in answers) > 0
    wait_until(lambda: serving.status("letters:1")["state"] == "ready", LOAD_S)
