"""The draws of the transformers engine, and what both engines make of frequency and presence penalty."""

from typing import Any

import pytest
import torch

from model_worker.engine import Job
from model_worker.engines import exllamav2_engine
from model_worker.engines.sampling import AnswerPenalty, Sampler
from protocol.request import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])


def sampler(prompt: tuple[int, ...] = (0,), **fields: Any) -> Sampler:
    return Sampler(Job(1, prompt, 5000, SamplingParams(**fields)))


def shares(fields: dict[str, float], draws: int = 4000) -> list[float]:
    """How often each token is drawn."""
    drawing = sampler((0,), **({"seed": 1} | fields))
    counts = torch.bincount(torch.tensor([drawing.draw(LOGITS) for _ in range(draws)]), minlength=len(LOGITS))
    return [count / draws for count in counts.tolist()]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, LOGITS.softmax(0)),
        ({"temperature": 2.0}, (LOGITS / 2).softmax(0)),
        ({"top_k": 2}, LOGITS[:2].softmax(0)),
        ({"top_p": 0.7}, LOGITS[:2].softmax(0)),  # 0.64 + 0.24
        ({"min_p": 0.3}, LOGITS[:2].softmax(0)),  # e^-1 is more than 0.3, e^-2 less
        ({"temperature": 2.0, "min_p": 0.3}, (LOGITS[:3] / 2).softmax(0)),  # temperature comes first
    ],
)
def test_draws_follow_the_distribution(fields: dict[str, float], expected: torch.Tensor) -> None:
    got = shares(fields)
    wanted = [*expected.tolist(), *[0.0] * (len(LOGITS) - len(expected))]
    assert got == pytest.approx(wanted, abs=0.03)


def test_plain_requests_are_left_to_the_batch() -> None:
    assert sampler(temperature=0.0).plain
    assert sampler(top_k=1).plain
    assert sampler(min_p=1.0).plain
    assert not sampler(temperature=0.0, presence_penalty=1.0).plain
    assert not sampler().plain


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    drawing = sampler(prompt=(0,), temperature=0.0, repetition_penalty=4.0)
    # 2.0 / 4 for the prompt's token, then 1.0 / 4 for the answer's, then the rest
    assert [drawing.draw(LOGITS) for _ in range(3)] == [1, 0, 0]


def test_answer_penalties_count_the_answer_only() -> None:
    drawing = sampler(prompt=(0, 0, 0), temperature=0.0, presence_penalty=1.5)
    assert [drawing.draw(LOGITS) for _ in range(4)] == [0, 1, 0, 0]
    drawing = sampler(prompt=(0, 0, 0), temperature=0.0, frequency_penalty=0.6)
    assert [drawing.draw(LOGITS) for _ in range(5)] == [0, 0, 1, 0, 1]


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 1.5), (-2.0, 2.0), (0.25, 0.5)])
def test_both_engines_penalize_alike(frequency: float, presence: float) -> None:
    torch.manual_seed(0)
    prompt, drawn = [3, 3, 4], torch.randint(32, (40,)).tolist()
    processor = AnswerPenalty(frequency, presence, len(prompt))
    sampling = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    biased = exllamav2_engine.AnswerPenalty(sampling, 32)
    logits = torch.randn(1, 32)
    for i, token in enumerate(drawn):
        expected = processor(torch.tensor([prompt + drawn[:i]]), logits)
        torch.testing.assert_close(logits + biased.bias, expected)
        biased.count(token)


@pytest.mark.parametrize("extreme", [3e38, -3e38, 0.0])
def test_no_options_stop_the_process(extreme: float) -> None:
    """An infinity or NaN that an option makes would raise in the draw, and end the process for everybody."""
    logits = torch.full((8,), -5.0)
    logits[3] = extreme
    for fields in ({"temperature": 10.0}, {"repetition_penalty": 1e-300}, {"presence_penalty": -2.0, "top_p": 0.5}):
        drawing = sampler((3,), **fields)
        assert all(0 <= drawing.draw(logits) < 8 for _ in range(3))
