"""Engine exllamav2's additions to the drawing of tokens work, with the package's own Python and an oracle."""

import dataclasses
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from model_worker.engines.exllamav2.ngram import NGrams
from model_worker.engines.exllamav2.sampling import settings_of
from protocol.errors import ErrorCode, RequestError
from protocol.request import SamplingParams
from tests.engines.exllamav2_cpu.harness import VOCAB, Harness
from tests.engines.exllamav2_cpu.oracle import OracleLogits
from tests.engines.exllamav2_cpu.package import import_package

pytestmark = pytest.mark.usefixtures("decoding")

PROMPT = list(range(40, 60))
SPECULATION = [None, "ngram", "draft"]


def sampling(**options: Any) -> SamplingParams:
    """Return parameters without the checks of the wire, since the engine must refuse invalid values itself."""
    return SamplingParams.made(**options)


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    result: np.ndarray[Any, Any] = torch.from_numpy(logits).double().log_softmax(0).numpy()
    return result


# settings


def test_every_setting_of_the_package_is_given_and_neutral() -> None:
    fields = {field.name for field in dataclasses.fields(import_package().generator.ExLlamaV2Sampler.Settings)}
    state = {"mirostat_mu", "ngram_trie", "ngram_index", "ngram_history", "post_sampling_hooks"}
    unused = {"xtc_threshold", "xtc_ignore_tokens"}  # unused, since xtc_probability is 0
    unused |= {name for name in fields if name.startswith("dry_")} - {"dry_multiplier"}
    neutral = settings_of(SamplingParams())
    assert set(neutral) == fields - state - unused - {"token_bias"}
    assert neutral["temperature"] == 1.0
    assert neutral["token_repetition_penalty"] == 1.0
    assert neutral["top_k"] == neutral["top_a"] == neutral["min_p"] == neutral["skew"] == neutral["dry_multiplier"] == 0
    assert neutral["top_p"] == 0
    assert neutral["tfs"] == neutral["typical"] == 0
    assert neutral["max_temp"] <= neutral["min_temp"]


@pytest.mark.parametrize(
    ("name", "value", "setting"),
    [
        ("temperature", 0.7, "temperature"), ("top_k", 9, "top_k"), ("skew", 0.5, "skew"),
        ("smoothing_factor", 0.3, "smoothing_factor"), ("temperature_last", True, "temperature_last"),
        ("repetition_penalty", 1.2, "token_repetition_penalty"), ("penalty_range", 64, "token_repetition_range"),
        ("repetition_decay", 32, "token_repetition_decay"),

        ("mirostat_tau", 3.0, "mirostat_tau"), ("mirostat_eta", 0.2, "mirostat_eta"), ("cfg_scale", 1.5, "cfg_scale"),
    ],
)  # fmt: skip
def test_a_parameter_reaches_its_setting(name: str, value: Any, setting: str) -> None:
    changed = settings_of(sampling(**{name: value}))
    assert changed[setting] == value
    assert {k for k, v in changed.items() if v != settings_of(SamplingParams())[k]} == {setting}


def test_parameters_that_go_together() -> None:
    assert settings_of(sampling(mirostat_mode=2))["mirostat"] is True
    dynamic = settings_of(sampling(min_temp=0.5, max_temp=2.0, temp_exponent=1.5))
    assert (dynamic["min_temp"], dynamic["max_temp"], dynamic["temp_exponent"]) == (0.5, 2.0, 1.5)
    assert settings_of(sampling(min_temp=2.0, max_temp=1.0))["max_temp"] == 0.0
    for sorts in ({"mirostat_mode": 2}, {"xtc_probability": 0.5}):
        assert settings_of(sampling(skew=1.0, **sorts))["skew"] == 0.0, "the package would sort what is sorted"
    for greedy in ({"temperature": 0.0}, {"temperature": 0.009}, {"top_k": 1}, {"min_p": 1.0}):
        options = {"temperature_last": True, "mirostat_mode": 2, "max_temp": 3.0, "skew": 1.0, "tfs": 0.5} | greedy
        settings = settings_of(sampling(**options))
        assert (settings["top_k"], settings["temperature"], settings["temperature_last"]) == (1, 1.0, False)
        assert not settings["mirostat"]
        assert settings["skew"] == settings["max_temp"] == settings["tfs"] == 0.0


ALONE = {
    "top_k": 5, "top_p": 0.6, "top_a": 0.5, "min_p": 0.3, "typical_p": 0.5, "tfs": 0.5, "smoothing_factor": 5.0,
    "temperature_last": True, "max_temp": 1.5, "mirostat_mode": 2, "skew": -2.0, "repetition_penalty": 1.5,
    "dry_multiplier": 5.0, "xtc_probability": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_every_sampling_parameter_runs_and_is_reproducible(name: str) -> None:
    h = Harness()
    options = {"temperature": 1.5, "seed": 4, name: ALONE[name]}
    first = h.answer(PROMPT, 40, sampling(**options))
    assert h.answer(PROMPT, 40, sampling(**options)).ids == first.ids
    assert len(first.ids) == 40 or first.ids[-1] in h.eos_ids


def test_settings_of_one_job_do_not_reach_another() -> None:
    h = Harness()
    hot = sampling(temperature=1.5, seed=4, mirostat_mode=2, dry_multiplier=2.0)
    alone = h.answer(PROMPT, 40, hot)
    together = [h.submit(PROMPT, 40, hot) for _ in range(3)]
    h.driver.run()
    assert all(outcome.ids == alone.ids for outcome in together)


# bias


def test_answer_penalties_count_each_token_also_within_a_speculated_step() -> None:
    options = {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.9}
    answers = [Harness(OracleLogits(VOCAB, habit=1.0), speculate=s).answer(PROMPT, 80, sampling(**options)).ids
               for s in SPECULATION]  # fmt: skip
    logits, ids = OracleLogits(VOCAB, habit=1.0), list(PROMPT)
    for _ in range(80):
        scores = logits(np.array(ids)).astype(np.float64)
        for token, seen in Counter(ids[len(PROMPT) :]).items():
            scores[token] -= 0.9 + 0.7 * seen
        ids.append(int(scores.argmax()))
        if ids[-1] == 2:
            break
    assert answers == [ids[len(PROMPT) :]] * 3
    assert answers[0] != logits.expected(PROMPT, 80, ends=(2,))


def test_bias_exclusion_and_permission() -> None:
    h = Harness()
    plain = h.answer(PROMPT, 12).ids
    banned = h.answer(PROMPT, 12, sampling(temperature=0.0, banned_tokens=(plain[0],))).ids
    assert plain[0] not in banned
    assert set(h.answer(PROMPT, 12, sampling(allowed_tokens=(7, 8, 9), temperature=2.0)).ids) <= {7, 8, 9}
    assert h.answer(PROMPT, 5, sampling(temperature=0.0, logit_bias={33: 100.0})).ids == [33] * 5
    never = sampling(temperature=0.0, logit_bias={33: 100.0}, banned_tokens=(33,))
    assert 33 not in h.answer(PROMPT, 5, never).ids


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 1}, {"temperature": 0.0, "cfg_scale": 3.0}])
def test_excluded_tokens_are_never_drawn_whatever_the_way(options: dict[str, Any]) -> None:
    h = Harness()
    fields = {"negative_ids": (5, 6)} if "cfg_scale" in options else {}
    for repetition in (1.0, 1.2):
        extra = {"banned_tokens": tuple(range(3, 440)), "repetition_penalty": repetition}
        outcome = h.answer(PROMPT, 20, sampling(**(options | extra)), **fields)
        assert not set(outcome.ids) & set(range(3, 440))


def test_ignore_eos_and_stop_token_ids() -> None:
    logits = OracleLogits(VOCAB, eos_id=2, eos_every=10)
    h = Harness(logits)
    assert h.answer(PROMPT, 200).ids[-1] == 2
    forever = h.answer(PROMPT, 200, sampling(temperature=0.0, ignore_eos=True))
    assert (len(forever.ids), forever.reason, 2 in forever.ids) == (200, "length", False)
    stop = forever.ids[50]
    stopped = h.answer(PROMPT, 200, sampling(temperature=0.0, ignore_eos=True), stop_token_ids=(stop,))
    assert stopped.ids == forever.ids[: forever.ids.index(stop) + 1]
    assert stopped.reason == "stop"
    assert stopped.text == h.engine.decode(stopped.ids[:-1])


@pytest.mark.parametrize(
    ("options", "fields", "field"),
    [
        ({"allowed_tokens": (5,), "banned_tokens": (5,)}, {}, "allowed_tokens"),
        ({"allowed_tokens": (2,), "ignore_eos": True}, {}, "allowed_tokens"),
        ({"allowed_tokens": (2,)}, {"min_new_tokens": 3}, "allowed_tokens"),
        ({"banned_tokens": tuple(range(VOCAB))}, {}, "banned_tokens"),
        ({"banned_tokens": (VOCAB,)}, {}, "banned_tokens"),
        ({"allowed_tokens": (-1,)}, {}, "allowed_tokens"),
        ({"logit_bias": {VOCAB: 1.0}}, {}, "logit_bias"),
        ({}, {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ({"cfg_scale": 2.0}, {}, "negative_prompt"),
        ({"cfg_scale": 2.0}, {"negative_ids": (VOCAB,)}, "negative_prompt"),
        ({"cfg_scale": 2.0}, {"negative_ids": (5,) * 2040}, "negative_prompt"),
        ({"cfg_scale": 2.0}, {"negative_ids": (5,), "token_healing": True}, "token_healing"),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.001}, {}, "xtc_threshold"),
        ({"xtc_probability": 0.5, "mirostat_mode": 2}, {}, "xtc_probability"),
    ],
)
def test_what_would_break_the_batch_is_refused_by_name(
    options: dict[str, Any], fields: dict[str, Any], field: str
) -> None:
    h = Harness()
    with pytest.raises(RequestError) as e:
        h.submit(PROMPT, 30, sampling(**options), **fields)
    assert e.value.field == field
    h.driver.assert_idle()
    assert h.answer(PROMPT, 5).ids == h.logits.expected(PROMPT, 5)


# limits


@pytest.mark.parametrize("speculate", SPECULATION)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17])
def test_the_maximum_is_exact(speculate: str | None, size: int) -> None:
    h = Harness(speculate=speculate)
    outcome = h.answer(PROMPT, size)
    assert outcome.ids == h.logits.expected(PROMPT, size)
    assert outcome.reason == "length"
    h.driver.assert_idle()


@pytest.mark.parametrize("speculate", SPECULATION)
@pytest.mark.parametrize("minimum", [1, 6, 23])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.0001}])
def test_the_minimum_is_exact(speculate: str | None, minimum: int, options: dict[str, float]) -> None:
    h = Harness(OracleLogits(VOCAB, eos_id=2, eos_every=1), speculate=speculate)  # the model always wants to end
    outcome = h.answer(PROMPT, 40, sampling(**options), min_new_tokens=minimum)
    assert len(outcome.ids) == minimum + 1
    assert outcome.ids.index(2) == minimum


def test_stop_strings_are_looked_for_from_the_minimum_on() -> None:
    h = Harness()
    ids = h.logits.expected(PROMPT, 30)
    stop = h.engine.decode(ids[2:3])
    assert stop
    assert len(h.answer(PROMPT, 30, stop=(stop,)).ids) <= 3
    later = h.answer(PROMPT, 30, stop=(stop,), min_new_tokens=5)
    assert len(later.ids) > 5
    assert later.ids == ids[: len(later.ids)]


@pytest.mark.parametrize("speculate", SPECULATION)
def test_positions_stay_within_their_tables(speculate: str | None) -> None:
    """The oracle raises for a position beyond the tables, where the kernel would read invalid memory."""
    h = Harness(pages=4, context=700, speculate=speculate)
    context = h.engine.capabilities.context
    assert context == (698 if speculate else 700)
    prompt = h.random_ids(random.Random(1), 600)
    assert len(h.answer(prompt, context - 600).ids) == context - 600
    with pytest.raises(RequestError) as e:
        h.submit(prompt, context - 599)
    assert e.value.code == ErrorCode.CONTEXT_OVERFLOW


def test_prompts_too_short_for_the_packages_guesses() -> None:
    h = Harness(speculate="ngram")
    outcomes = [h.submit([7] * size, 20) for size in (1, 2, 3)]
    h.driver.run()
    assert all(len(outcome.ids) == 20 for outcome in outcomes)
    h.check()


def test_speculation_is_counted_and_pays() -> None:
    h = Harness(OracleLogits(VOCAB, habit=1.0), speculate="ngram")  # the answer repeats itself
    h.model.forwards.clear()
    outcome = h.answer(PROMPT, 300)
    assert outcome.finished is not None
    assert outcome.finished.draft_accepted > 100
    assert sum(not prefill for *_, prefill in h.model.forwards) < 150
    assert outcome.ids == h.logits.expected(PROMPT, 300)
    assert 0 < h.engine.stats().extra["draft_accepted"] <= 1


def test_guesses_from_the_past() -> None:
    past = NGrams([1, 2, 3, 4, 1, 2])
    assert past.propose(3) == [3, 4, 1]
    past.push(9)
    assert past.propose(2) == [9, 9]
    past.push(2)
    assert past.propose(1) == [9]
    assert NGrams([5]).propose(2) == [5, 5]
