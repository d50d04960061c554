"""The transformers engine draws correctly, and both engines apply frequency and presence penalty alike."""

from typing import Any

import pytest
import torch

from model_worker.engine import Job
from model_worker.engines.embedded.sampling import AnswerPenalty, Sampler, log_probability
from model_worker.engines.exllamav2.sampling import TokenBias
from protocol.request import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])


class Draws:
    """A sampler, and the number of tokens so far."""

    def __init__(self, prompt: tuple[int, ...] = (0,), vocab: int = len(LOGITS), **fields: Any) -> None:
        self.sampler = Sampler(Job(1, prompt, 5000, SamplingParams(**fields)), vocab, eos_ids=(4,))
        self.plain = self.sampler.plain
        self.length = len(prompt)

    def draw(self, logits: torch.Tensor, **limits: Any) -> int | None:
        token = self.sampler.draw(logits, self.length, **limits)
        self.length += token is not None
        return token


def sampler(prompt: tuple[int, ...] = (0,), **fields: Any) -> Draws:
    return Draws(prompt, **fields)


def shares(fields: dict[str, float], draws: int = 4000) -> list[float]:
    """Return how often each token is drawn."""
    drawing = sampler((0,), **({"seed": 1} | fields))
    counts = torch.bincount(torch.tensor([drawing.draw(LOGITS) or 0 for _ in range(draws)]), minlength=len(LOGITS))
    return [count / draws for count in counts.tolist()]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, LOGITS.softmax(0)),
        ({"temperature": 2.0}, (LOGITS / 2).softmax(0)),
        ({"top_k": 2}, LOGITS[:2].softmax(0)),
        ({"top_p": 0.7}, LOGITS[:2].softmax(0)),  # 0.64 + 0.24
        ({"min_p": 0.3}, LOGITS[:2].softmax(0)),  # e^-1 is more than 0.3, e^-2 less
        ({"temperature": 2.0, "min_p": 0.3}, (LOGITS[:3] / 2).softmax(0)),  # temperature comes first
        ({"temperature": 2.0, "min_p": 0.3, "temperature_last": True}, (LOGITS[:2] / 2).softmax(0)),
        ({"typical_p": 0.5}, LOGITS[:2].softmax(0)),  # 1.44 and 0.44 nats of surprise, where 0.95 are expected
        ({"logit_bias": {1: 1.0, 4: 100.0}, "ignore_eos": True}, (LOGITS + torch.tensor([0, 1, 0, 0, -99])).softmax(0)),
        ({"banned_tokens": (1, 2)}, (LOGITS - torch.tensor([0, 99, 99, 0, 0])).softmax(0)),
        ({"allowed_tokens": (0, 2)}, (LOGITS - torch.tensor([0, 99, 0, 99, 99])).softmax(0)),
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
    for fields in (
        {"presence_penalty": 1.0}, {"logit_bias": {3: 0.5}}, {"banned_tokens": (3,)}, {"allowed_tokens": (3,)},
        {"ignore_eos": True}, {"repetition_penalty": 1.1},
    ):  # fmt: skip
        assert not sampler(temperature=0.0, **fields).plain
    assert sampler(temperature=0.0, repetition_penalty=2.0, penalty_range=0).plain
    assert not sampler().plain


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    drawing = sampler(prompt=(0,), temperature=0.0, repetition_penalty=4.0)
    # 2.0 / 4 for the prompt's token, then 1.0 / 4 for the answer's token, then the others
    assert [drawing.draw(LOGITS) for _ in range(3)] == [1, 0, 0]


def test_answer_penalties_count_the_answer_only() -> None:
    drawing = sampler(prompt=(0, 0, 0), temperature=0.0, presence_penalty=1.5)
    assert [drawing.draw(LOGITS) for _ in range(4)] == [0, 1, 0, 0]
    drawing = sampler(prompt=(0, 0, 0), temperature=0.0, frequency_penalty=0.6)
    assert [drawing.draw(LOGITS) for _ in range(5)] == [0, 0, 1, 0, 1]


def test_penalty_range_forgets() -> None:
    drawing = sampler(prompt=(0,), temperature=0.0, repetition_penalty=4.0, penalty_range=1)
    assert [drawing.draw(LOGITS) for _ in range(4)] == [1, 0, 1, 0]
    drawing = sampler(prompt=(0, 3), temperature=0.0, repetition_penalty=4.0, penalty_range=1)
    assert drawing.draw(LOGITS) == 0


def test_what_was_taken_back_is_not_penalized() -> None:
    drawing = sampler(prompt=(3,), temperature=0.0, presence_penalty=1.5)
    assert [drawing.draw(LOGITS) for _ in range(2)] == [0, 1]
    drawing.length = 1
    assert drawing.draw(LOGITS, excluded=[1, 2]) == 0
    assert drawing.draw(LOGITS) == 1


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"seed": 1}, {"temperature": 0.0, "presence_penalty": 1.0}])
def test_limits_of_one_draw(fields: dict[str, Any]) -> None:
    drawing = sampler(**fields)
    logits = LOGITS.clone()
    assert drawing.draw(LOGITS, excluded=[0, 1, 2, 4, 99]) == 3
    assert drawing.draw(LOGITS, only=[4]) == 4
    assert drawing.draw(LOGITS, only=[2, 4], excluded=[4]) == 2
    assert drawing.draw(LOGITS, only=[2, 4], excluded=[4, 2]) is None
    assert drawing.draw(LOGITS, excluded=range(5)) is None
    assert torch.equal(LOGITS, logits), "the logits are the batch's"


def test_a_bias_forces_and_forbids_greedy_tokens() -> None:
    assert sampler(temperature=0.0, logit_bias={3: 3.5}).draw(LOGITS) == 3
    assert sampler(temperature=0.0, logit_bias={0: -100.0}).draw(LOGITS) == 1
    assert sampler(temperature=0.0, banned_tokens=(0, 1)).draw(LOGITS) == 2
    assert sampler(temperature=0.0, allowed_tokens=(4,)).draw(LOGITS) == 4
    assert sampler(temperature=0.0, allowed_tokens=(4, 2), logit_bias={4: 100.0}).draw(LOGITS) == 4
    assert sampler(temperature=0.0, logit_bias={4: 100.0}, ignore_eos=True).draw(LOGITS) == 0


def test_log_probabilities() -> None:
    expected = LOGITS.double().log_softmax(0).tolist()
    reported = log_probability(LOGITS, 2, 3)
    assert (reported.token_id, reported.logprob) == (2, pytest.approx(expected[2], abs=1e-5))
    assert [token for token, _ in reported.top] == [0, 1, 2]
    assert [logprob for _, logprob in reported.top] == pytest.approx(expected[:3], abs=1e-5)
    assert log_probability(LOGITS, 4, 0).top == ()
    assert len(log_probability(LOGITS, 4, 20).top) == len(LOGITS)


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 1.5), (-2.0, 2.0), (0.25, 0.5)])
def test_both_engines_penalize_alike(frequency: float, presence: float) -> None:
    torch.manual_seed(0)
    prompt, drawn = [3, 3, 4], torch.randint(32, (40,)).tolist()
    processor = AnswerPenalty(frequency, presence, len(prompt))
    sampling = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    biased = TokenBias(sampling, 32, ())
    logits = torch.randn(1, 32)
    for i, token in enumerate(drawn):
        expected = processor(torch.tensor([prompt + drawn[:i]]), logits)
        torch.testing.assert_close(logits + biased.tensor, expected)
        biased.count(token)


@pytest.mark.parametrize("extreme", [3e38, -3e38, 0.0])
def test_no_options_stop_the_process(extreme: float) -> None:
    """An infinity or NaN caused by an option would raise in the draw and end the process, with all its answers."""
    logits = torch.full((8,), -5.0)
    logits[3] = extreme
    for fields in ({"temperature": 10.0}, {"repetition_penalty": 1e-300}, {"presence_penalty": -2.0, "top_p": 0.5}):
        drawing = Draws((3,), 8, **fields)
        assert all(drawing.draw(logits) in range(8) for _ in range(3))


@pytest.mark.parametrize("vocab", [512, 32_000])
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"temperature": 0.7}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"typical_p": 0.8},
        {"temperature": 1.5, "temperature_last": True, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
    ],
)  # fmt: skip
def test_rows_that_are_drawn_together_get_the_ids_that_they_get_alone(fields: dict[str, Any], vocab: int) -> None:
    logits = torch.randn(17, vocab, generator=torch.Generator().manual_seed(5)) * 3
    samplers = [Sampler(Job(n, (0,), 5000, SamplingParams(**(fields | {"seed": n}))), vocab) for n in range(17)]
    assert len({each.alike for each in samplers}) == 1
    alone = [each.draw(row, 1 + n) for n, (each, row) in enumerate(zip(samplers, logits, strict=True))]
    points = [each.point(1 + n, 0) for n, each in enumerate(samplers)]
    assert samplers[0].draw_together(points, logits) == alone
    assert len(set(alone)) > 1


def test_only_requests_whose_draws_depend_on_nothing_else_are_alike() -> None:
    job = Job(1, (0,), 10, SamplingParams(seed=1))
    assert Sampler(job, 5).alike == Sampler(Job(2, (0, 1), 20, SamplingParams(seed=2)), 5).alike is not None
    for fields in (
        {"presence_penalty": 1.0}, {"logit_bias": {3: 0.5}}, {"repetition_penalty": 1.1}, {"temperature": 0.0},
    ):  # fmt: skip
        assert Sampler(Job(1, (0,), 10, SamplingParams(**fields)), 5).alike is None  # type: ignore[arg-type]
