"""Log-probabilities, guidance and draws of engine exllamav2 are right, with the package's own code on the CPU."""

import math
import random
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest

from model_worker.engine import PromptScoring
from model_worker.engines.exllamav2.options import offered
from model_worker.engines.exllamav2.sampling import PieceSearch, TokenBias
from protocol.errors import RequestError
from tests.engines.driver import Outcome
from tests.engines.exllamav2_cpu.harness import PAGE, VOCAB, Harness
from tests.engines.exllamav2_cpu.oracle import OracleLogits
from tests.engines.test_exllamav2_generating import PROMPT, SPECULATION, log_softmax, sampling

pytestmark = pytest.mark.usefixtures("decoding")


@pytest.mark.parametrize("speculate", SPECULATION)
def test_logprobs_are_those_of_the_model_itself(speculate: str | None) -> None:
    h = Harness(speculate=speculate)
    options = {
        "temperature": 1.3, "seed": 5, "top_k": 40, "repetition_penalty": 1.3, "frequency_penalty": 0.5,
        "logit_bias": {9: 3.0},
    }  # fmt: skip
    drawn, greedy = h.submit(PROMPT, 25, sampling(**options), top_logprobs=3), h.submit(PROMPT, 25, top_logprobs=0)
    h.driver.run()
    for outcome, top in ((drawn, 3), (greedy, 0)):
        reported = h.logprobs(outcome)
        assert [one.token_id for one in reported] == outcome.ids
        ids = list(PROMPT)
        for one in reported:
            true = log_softmax(h.logits(np.array(ids)))
            assert one.logprob == pytest.approx(true[one.token_id], abs=1e-5)
            best = np.argsort(-true)[:top]
            assert [token for token, _ in one.top] == best.tolist()
            assert [value for _, value in one.top] == pytest.approx(true[best], abs=1e-5)
            ids.append(one.token_id)
    assert not h.logprobs(h.answer(PROMPT, 5))


# guidance


def guided(logits: OracleLogits, prompt: list[int], negative: list[int], scale: float, size: int) -> list[int]:
    answer: list[int] = []
    for _ in range(size):
        ahead, away = (log_softmax(logits(np.array(ids + answer))) for ids in (prompt, negative))
        answer.append(int((scale * ahead + (1 - scale) * away).argmax()))
        if answer[-1] == 2:
            break
    return answer


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
def test_guidance(scale: float) -> None:
    h, rng = Harness(pages=16), random.Random(1)
    pairs = [(h.random_ids(rng, a), h.random_ids(rng, b)) for a, b in ((5, 300), (270, 1), (600, 256))]
    pairs.append((pairs[2][0], pairs[2][0][:300]))  # both prompts share a page, also with another pair
    greedy = sampling(temperature=0.0, cfg_scale=scale)
    outcomes = [h.submit(a, 40, greedy, negative_ids=tuple(b)) for a, b in pairs]
    plain = h.submit(PROMPT, 40)
    h.driver.run()
    for outcome, (a, b) in zip(outcomes, pairs, strict=True):
        assert outcome.ids == guided(h.logits, a, b, scale, 40)
    assert plain.ids == h.logits.expected(PROMPT, 40)
    h.driver.assert_idle()


def test_a_pair_that_could_never_start_is_refused() -> None:
    h = Harness(pages=4, batch=2)
    scaled = sampling(temperature=0.0, cfg_scale=2.0)
    prompt, other = [5] * 600, [6] * 400
    with pytest.raises(RequestError, match="needs 5 pages"):
        h.submit(prompt, 50, scaled, negative_ids=tuple(other))
    same = h.submit(prompt, 50, scaled, negative_ids=tuple(prompt))  # both prompts share two pages
    h.driver.run()
    assert same.finished is not None
    with pytest.raises(RequestError, match="two sequences"):
        Harness(batch=1).submit(prompt[:5], 5, scaled, negative_ids=(5,))


@pytest.mark.parametrize("speculate", ["ngram", "draft"])
def test_guidance_and_speculation_exclude_each_other(speculate: str) -> None:
    h = Harness(speculate=speculate)
    assert not {"cfg_scale", "negative_prompt"} & h.engine.capabilities.offered
    with pytest.raises(RequestError) as e:
        h.submit(PROMPT, 5, sampling(cfg_scale=2.0), negative_ids=(5,))
    assert e.value.field == "cfg_scale"


# draws that go wrong


def test_the_shortcut_for_greedy_draws_what_the_sampler_draws() -> None:
    """A tiny penalty disables the shortcut, so that the package's sampler draws."""
    h = Harness()
    for seed in range(20):
        bias = {random.Random(seed).randrange(VOCAB): 8.0 for _ in range(3)}
        shortcut = h.answer(PROMPT, 20, sampling(temperature=0.0, logit_bias=bias))
        longer = h.answer(PROMPT, 20, sampling(temperature=0.0, logit_bias=bias, repetition_penalty=1.0 + 1e-9))
        assert shortcut.ids == longer.ids


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.011, "temperature_last": True},
        {"min_temp": 0.0, "max_temp": 0.01, "temp_exponent": 10.0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 10.0, "frequency_penalty": -2.0, "presence_penalty": -2.0},
        {"temperature": 10.0, "top_p": 1e-300, "min_p": 1e-300, "smoothing_factor": 1e-300},
        {"mirostat_mode": 2, "mirostat_tau": 0.0, "mirostat_eta": 1.0},
        {"dry_multiplier": 100.0, "dry_base": 10.0, "dry_allowed_length": 1},
        {"tfs": 1e-300, "typical_p": 1e-300, "top_a": 1.0, "skew": 10.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01, "skew": -10.0},
    ],
)
def test_extreme_parameters_draw_tokens_and_spare_the_others(options: dict[str, Any]) -> None:
    h = Harness(OracleLogits(VOCAB, habit=1.0))
    kept = h.submit(PROMPT, 60)
    extreme = h.submit(PROMPT, 60, sampling(**({"seed": 1} | options)))
    h.driver.run()
    assert all(0 <= token < VOCAB for token in extreme.ids)
    assert kept.ids == h.logits.expected(PROMPT, 60)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.1}, {"temperature": 1.0}])
def test_logits_that_are_no_numbers_end_the_process(options: dict[str, float]) -> None:
    h = Harness()
    h.submit(PROMPT, 60, sampling(**({"temperature": 0.0} | options)))
    h.driver.step()
    with (
        mock.patch.object(OracleLogits, "__call__", return_value=np.full(VOCAB, np.nan, np.float32)),
        pytest.raises(RuntimeError, match="not numbers"),
    ):
        h.driver.step()


def test_an_exception_of_a_step_is_not_survived() -> None:
    """After the exception, keys that were never written count as cached, so the engine must not go on."""
    h = Harness()
    h.submit(PROMPT, 60)
    h.driver.step()
    h.model.fail_at = len(h.model.forwards)
    with pytest.raises(RuntimeError, match="CUDA error"):
        h.engine.step()


# XTC


@pytest.mark.long
def test_xtc_leaves_out_all_likely_tokens_but_the_least_likely() -> None:
    logits = np.full(VOCAB, -4.0, np.float32)
    logits[[10, 11, 12, 13]] = 5.0, 4.5, 4.0, 2.0
    newline = next(i for i, piece in enumerate(pieces()) if "\n" in piece and i > 2)
    logits[newline] = 4.2
    probs = np.exp(log_softmax(logits))
    h = Harness(pages=16, batch=8)
    counts: Counter[int] = Counter()
    with mock.patch.object(OracleLogits, "__call__", return_value=logits):
        for seed in range(4):
            counts.update(h.answer(PROMPT, 500, sampling(xtc_probability=1.0, xtc_threshold=0.12, seed=seed)).ids)
    assert [i for i in (10, 11, 12, newline) if probs[i] >= 0.12] == [10, 11, 12, newline]
    assert not counts[10]
    assert not counts[11]
    left = probs.copy()
    left[[10, 11]] = 0
    left /= left.sum()
    total = sum(counts.values())
    for token in (12, 13, newline):
        sigma = math.sqrt(left[token] * (1 - left[token]) / total)
        assert counts[token] / total == pytest.approx(left[token], abs=5 * sigma)


def pieces() -> list[str]:
    result: list[str] = Harness().engine._loaded.tokenizer.get_id_to_piece_list(True)
    return result


@pytest.mark.long
def test_xtc_is_tried_as_often_as_asked() -> None:
    logits = np.full(VOCAB, -9.0, np.float32)
    logits[[10, 11]] = 5.0, 4.0
    h = Harness(pages=16)
    with mock.patch.object(OracleLogits, "__call__", return_value=logits):
        ids = h.answer(PROMPT, 2000, sampling(xtc_probability=0.5, xtc_threshold=0.1, seed=1)).ids
    likely = 1 / (1 + math.exp(-1))
    assert Counter(ids)[10] / len(ids) == pytest.approx(likely / 2, abs=0.05)


# DRY


def test_sequence_breakers_are_the_tokens_that_hold_them() -> None:
    search = PieceSearch(["a", "b\n", "", "\n", "xyz", "yz!", "\n\n"])
    assert search.holding("\n") == {1, 3, 6}
    assert search.holding("yz") == {4, 5}
    assert search.holding("az") == frozenset()
    h = Harness(OracleLogits(VOCAB, habit=1.0))
    loop = h.answer(PROMPT * 3, 40).ids
    dry = sampling(temperature=0.0, dry_multiplier=3.0)
    assert h.answer(PROMPT * 3, 40, dry).ids != loop
    breakers = tuple({piece for i in set(loop) if (piece := pieces()[i])})
    broken = dry.but(dry_sequence_breakers=breakers)
    assert h.answer(PROMPT * 3, 40, broken).ids == loop


def test_token_bias_is_undone_for_tokens_taken_back() -> None:
    bias = TokenBias(sampling(frequency_penalty=0.5, presence_penalty=1.0), 64, (2,))
    for token in (5, 6, 5):
        bias.count(token)
    bias.count_only([5])
    assert bias.tensor.tolist() == [-1.5 if i == 5 else 0.0 for i in range(64)]
    assert PAGE == 256


# log-probabilities of prompts


def check_prompt(h: Harness, outcome: Outcome) -> None:
    scoring, prompt = outcome.job.prompt_logprobs, outcome.job.prompt_ids
    assert scoring is not None
    found = outcome.prompt_logprobs
    assert [one.token_id for one in found] == list(prompt[scoring.first :])
    for number, one in enumerate(found, scoring.first):
        true = log_softmax(h.logits(np.array(prompt[:number])))
        assert one.logprob == pytest.approx(true[one.token_id], abs=1e-5)
        best = np.argsort(-true)[: scoring.top]
        assert [token for token, _ in one.top] == best.tolist()
        assert [value for _, value in one.top] == pytest.approx(true[best], abs=1e-5)


def computed(h: Harness) -> int:
    """Return the number of prompt tokens that were computed, and forget them."""
    tokens = sum(size for _, size, _ in h.model.forwards if size > 1)
    h.model.forwards.clear()
    return tokens


@pytest.mark.parametrize("speculate", SPECULATION)
@pytest.mark.parametrize("chunk", [PAGE, 3 * PAGE])
def test_log_probabilities_of_prompts(speculate: str | None, chunk: int) -> None:
    h, rng = Harness(pages=32, chunk=chunk, speculate=speculate), random.Random(3)
    for size, first, top in ((1, 1, 2), (2, 1, 0), (256, 1, 20), (257, 1, 1), (258, 1, 1), (900, 1, 2), (900, 300, 2),
                             (900, 513, 0), (900, 899, 1)):  # fmt: skip
        ids = h.random_ids(rng, size)
        for _ in range(2):  # the second time the prompt is in the cache
            check_prompt(h, h.answer(ids, 20, prompt_logprobs=PromptScoring(top, first)))
            h.answer(ids, 20)
    h.check()
    h.driver.assert_idle()


def test_only_what_is_asked_for_is_computed_again() -> None:
    h, rng = Harness(pages=16), random.Random(4)
    ids = h.random_ids(rng, 1000)
    h.model.forwards.clear()
    h.answer(ids, 5)
    assert computed(h) == 999
    h.answer(ids, 5)
    assert computed(h) == 0
    check_prompt(h, h.answer(ids, 5, prompt_logprobs=PromptScoring(1)))
    assert computed(h) == 999
    outcome = h.answer(ids, 5, prompt_logprobs=PromptScoring(1, 600))
    check_prompt(h, outcome)
    assert computed(h) == 999 - 512
    assert outcome.finished is not None
    assert outcome.finished.cached_tokens == 512
    h.answer(ids, 5)
    assert computed(h) == 0, "the pages that others know were left as they are"
    h.check()


def test_prompts_with_log_probabilities_beside_others() -> None:
    """Equal prompts, prompts that begin alike, and running answers: none reads what belongs to another."""
    for seed in range(6):
        h, rng = Harness(pages=40, batch=6, chunk=PAGE * (1 + seed % 3)), random.Random(seed)
        shared = h.random_ids(rng, 600)
        running = [h.submit(h.random_ids(rng, 20), 60) for _ in range(2)]
        scored = []
        for _ in range(8):
            for _ in range(rng.randrange(4)):
                h.driver.step()
            ids = shared[: rng.randrange(1, 600)] + h.random_ids(rng, rng.randrange(300))
            if rng.random() < 0.5:
                first = rng.randrange(1, max(2, len(ids)))
                scored.append(h.submit(ids, 9, prompt_logprobs=PromptScoring(rng.randrange(3), first)))
            else:
                running.append(h.submit(ids, 9))
            if rng.random() < 0.2:
                h.driver.cancel(rng.choice(scored + running))
        h.driver.run()
        for outcome in scored:
            if outcome.finished is not None:
                check_prompt(h, outcome)
        h.check()
        h.driver.assert_idle()


def test_an_answer_that_goes_back_reports_its_prompt_once() -> None:
    h, rng = Harness(pages=16), random.Random(5)
    ids = h.random_ids(rng, 700)
    plain = h.answer(ids, 12)
    outcome = h.answer(ids, 12, banned_strings=(plain.text[2:4],), prompt_logprobs=PromptScoring(1))
    check_prompt(h, outcome)
    assert outcome.finished is not None


def test_all_log_probabilities_are_forgotten_by_a_reset() -> None:
    h, rng = Harness(pages=16), random.Random(6)
    gone = h.submit(h.random_ids(rng, 900), 9, prompt_logprobs=PromptScoring(1))
    h.driver.step()
    h.engine.reset()
    gone.cancelled = True
    check_prompt(h, h.answer(h.random_ids(rng, 300), 9, prompt_logprobs=PromptScoring(1)))
    h.driver.assert_idle()


def test_a_model_in_tensor_parallel_does_not_offer_them() -> None:
    assert "prompt_logprobs" in offered(speculates=True, tensor_parallel=False)
    assert "prompt_logprobs" not in offered(speculates=False, tensor_parallel=True)
