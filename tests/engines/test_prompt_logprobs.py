"""Log-probabilities of prompts are those of transformers' own logits, on every engine, whatever else is computed."""

import math
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from model_worker.engine import Engine, Job, PromptScoring
from model_worker.engines.prompt_scores import PromptPieces, score
from protocol.errors import ErrorCode, RequestError
from tests.engines.driver import GREEDY, Driver, Outcome, answer
from tools.demo_models import directory


@cache
def reference(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory(model), dtype=torch.float32).eval()


def log_softmax(model: str, ids: Sequence[int]) -> torch.Tensor:
    """Return what transformers says of the tokens behind each of ``ids``: [ids, vocab]."""
    with torch.inference_mode():
        logprobs: torch.Tensor = reference(model)(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
    return logprobs


def rounding(model: str, ids: Sequence[int], true: torch.Tensor) -> float:
    """Return how far transformers in 16 bits on the GPU is from itself in float32, at most over the likelier tokens.

    The prompts are random, so some logits are large, and their last bits in 16 bits are worth much.
    """
    from transformers import AutoModelForCausalLM

    half = AutoModelForCausalLM.from_pretrained(directory(model), dtype=torch.float16).eval().cuda()
    with torch.inference_mode():
        logprobs = half(torch.tensor([list(ids)], device="cuda")).logits[0].float().log_softmax(-1).cpu()
    return float((logprobs - true).abs()[true > -30].max())


def check(engine: Engine, model: str, outcome: Outcome) -> None:
    """Compare all log-probabilities of a prompt with those of transformers in float32.

    On a GPU they may be as far from them as twice the distance of transformers in 16 bits.
    """
    job, scoring = outcome.job, outcome.job.prompt_logprobs
    assert scoring is not None
    true = log_softmax(model, job.prompt_ids)
    on_cpu = engine.capabilities.device.startswith("cpu")
    close = 1e-3 if on_cpu else 2 * rounding(model, job.prompt_ids, true)
    print(f"may differ by {close:.4f}")
    found = outcome.prompt_logprobs
    assert [one.token_id for one in found] == list(job.prompt_ids[scoring.first :])
    for number, one in enumerate(found, scoring.first):
        row = true[number - 1]
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=close)
        assert len(one.top) == scoring.top
        best = row.topk(scoring.top).values.tolist()
        assert [value for _, value in one.top] == pytest.approx(best, abs=close)
        assert [value for _, value in one.top] == pytest.approx([float(row[token]) for token, _ in one.top], abs=close)


def assert_same(engine: Engine, outcome: Outcome, other: Outcome) -> None:
    """Check that two answers are the same. On a GPU, answers to random ids have near ties, which chunks decide."""
    if engine.capabilities.device.startswith("cpu"):
        assert outcome.ids == other.ids
    assert outcome.finished is not None


def ids_of(seed: int, size: int) -> list[int]:
    """Return random ids for a prompt, without special tokens."""
    draw = random.Random(seed)
    return [draw.randrange(3, 400) for _ in range(size)]


@pytest.mark.parametrize(("size", "first", "top"), [
    (1, 1, 3), (2, 1, 0), (5, 1, 20), (256, 1, 2), (257, 1, 2), (258, 1, 2), (700, 1, 5), (700, 400, 5), (700, 512, 1),
    (700, 513, 1), (700, 699, 1),
])  # fmt: skip
def test_log_probabilities_of_a_prompt(letters: Engine, size: int, first: int, top: int) -> None:
    prompt = ids_of(size, size)
    plain = answer(letters, prompt, 4)
    for _ in range(2):  # the second time the prompt is in the cache of an engine that has one
        outcome = answer(letters, prompt, 4, prompt_logprobs=PromptScoring(top, first))
        check(letters, "letters", outcome)
        assert_same(letters, outcome, plain)


def test_a_text_and_its_answer(stories: Engine) -> None:
    text = "Once upon a time there was a red fox called Mia. Mia lived in a quiet forest"
    outcome = answer(stories, text, 5, top_logprobs=2, prompt_logprobs=PromptScoring(2))
    check(stories, "stories", outcome)
    assert len(outcome.logprobs) == len(outcome.ids)


def test_beside_other_answers_and_prompts(letters: Engine) -> None:
    driver = Driver(letters)
    shared = ids_of(1, 600)
    others = [driver.submit(ids_of(50 + n, 30), 60) for n in range(2)]
    for _ in range(3):
        driver.step()
    scored = [
        driver.submit(shared, 8, prompt_logprobs=PromptScoring(3)),
        driver.submit(shared + ids_of(2, 300), 8, prompt_logprobs=PromptScoring(1, 500)),
    ]
    others += [driver.submit(shared + ids_of(3, 20), 12), driver.submit(shared, 8)]
    driver.run()
    for outcome in scored:
        check(letters, "letters", outcome)
    for outcome in others + scored:
        alone = answer(letters, outcome.job.prompt_ids, outcome.job.max_new_tokens)
        assert_same(letters, outcome, alone)
    driver.assert_idle()


def test_cancelled_while_its_prompt_is_read(letters: Engine) -> None:
    driver = Driver(letters)
    gone = driver.submit(ids_of(4, 900), 5, prompt_logprobs=PromptScoring(2))
    kept = driver.submit(ids_of(5, 900), 5, prompt_logprobs=PromptScoring(2))
    driver.step()
    driver.cancel(gone)
    driver.run()
    check(letters, "letters", kept)
    driver.assert_idle()


def test_what_another_worker_has_delivered_is_not_reported_again(letters: Engine) -> None:
    prompt = ids_of(6, 800)
    whole = answer(letters, prompt, 12, prompt_logprobs=PromptScoring(2))
    rest = answer(letters, prompt, 12, prompt_logprobs=PromptScoring(2, 513))
    assert [one.token_id for one in rest.prompt_logprobs] == prompt[513:]
    check(letters, "letters", rest)
    assert_same(letters, rest, whole)


@pytest.mark.parametrize("size", [1, 2, 3, 256, 257, 600])
def test_pieces_of_any_steps(size: int) -> None:
    """However a prompt is cut into chunks, the pieces are the same."""
    prompt = tuple(ids_of(size, size))
    logits = torch.randn(size, 400)

    def pieces(chunk: int) -> list[Any]:
        collected = PromptPieces(1, prompt, PromptScoring(2))
        found = collected.alone()
        for begin in range(0, size, chunk):
            places = collected.wanted(begin, min(begin + chunk, size))
            if places:
                scored = score(logits[places.start : places.stop], collected.behind(places), 2)
                found += collected.add(scored[0].numpy(), scored[1].numpy())
        return found

    assert pieces(size) == pieces(7) == pieces(256)
    assert [piece.first for piece in pieces(size)] == list(range(1, max(size, 2), 256))


def test_a_token_beyond_the_vocabulary() -> None:
    ids, logprobs = score(torch.zeros(2, 4, dtype=torch.half), [9, 3], 20)
    assert ids[:, 0].tolist() == [9, 3]
    assert logprobs[:, 0].tolist() == [-math.inf, pytest.approx(-math.log(4))]
    assert ids.shape == (2, 5)


def test_an_engine_without_them_refuses_by_name(letters: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    offered = letters.capabilities.offered - {"prompt_logprobs"}
    monkeypatch.setattr(letters, "_capabilities", replace(letters.capabilities, offered=offered))
    with pytest.raises(RequestError, match="prompt_logprobs is not offered") as refused:
        letters.submit(Job(9_000_001, (5, 6), 4, GREEDY, prompt_logprobs=PromptScoring(1)))
    assert (refused.value.code, refused.value.field) == (ErrorCode.UNSUPPORTED, "prompt_logprobs")
