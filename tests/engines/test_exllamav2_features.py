"""Options of a request work on the real kernels: alone, together, and compared with the CPU engine.

These tests need a CUDA device. test_exllamav2_generating and others test the engine's own code on the CPU.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from model_worker.engine import Engine, EngineEvent, Finished, Job, Prefilling
from model_worker.engines import build_engine
from protocol.request import SamplingParams
from tests.engines.conftest import demo_spec, need_gpu
from tools.demo_models import directory
from tools.demo_models.corpus import LETTERS_TEST_LONG_ANSWERS, LETTERS_TEST_LONG_PROMPTS, LETTERS_TEST_PROMPTS

pytestmark = pytest.mark.gpu

PROMPT, ANSWER = "count: 7 8 9 ->", " 10 11 12 13 14 15 16 17"
GREEDY = SamplingParams(temperature=0)
Load = Callable[[str, str], Engine]

_ids = itertools.count(1)


@pytest.fixture(autouse=True)
def _gpu() -> None:
    need_gpu("exllamav2")


@pytest.fixture(scope="module")
def engine(load: Load) -> Engine:
    need_gpu("exllamav2")
    return load("exllamav2", "letters")


def run(engine: Engine, *jobs: Job) -> dict[int, list[EngineEvent]]:
    """Run jobs, and return all their events by job."""
    events: dict[int, list[EngineEvent]] = {job.id: [] for job in jobs}
    for job in jobs:
        engine.submit(job)
    while not all(own and isinstance(own[-1], Finished) for own in events.values()):
        for event in engine.step():
            if not isinstance(event, Prefilling):
                events[event.job].append(event)
    return events


def answer(
    engine: Engine, prompt: str, size: int = 60, sampling: SamplingParams = GREEDY, **fields: Any
) -> tuple[str, list[int], Finished, list[EngineEvent]]:
    job = Job(next(_ids), tuple(engine.encode(prompt)), size, sampling, **fields)
    events = run(engine, job)[job.id]
    last = events[-1]
    assert isinstance(last, Finished)
    return "".join(e.text for e in events), [i for e in events for i in e.token_ids], last, events


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5}, {"top_p": 0.6}, {"top_a": 0.5}, {"min_p": 0.3}, {"typical_p": 0.5}, {"tfs": 0.5},
        {"smoothing_factor": 2.0}, {"temperature_last": True}, {"min_temp": 0.5, "max_temp": 1.5},
        {"mirostat_mode": 2}, {"skew": -2.0}, {"repetition_penalty": 1.5, "penalty_range": 64, "repetition_decay": 32},
        {"dry_multiplier": 5.0, "dry_sequence_breakers": (" ",)}, {"xtc_probability": 0.5},
        {"logit_bias": {5: -100.0}}, {"frequency_penalty": 0.5},
    ],
)  # fmt: skip
def test_every_parameter_is_computed_and_reproducible(engine: Engine, options: dict[str, Any]) -> None:
    sampling = SamplingParams(temperature=3.0, seed=4, **options)
    first = answer(engine, PROMPT, sampling=sampling)[1]
    assert answer(engine, PROMPT, sampling=sampling)[1] == first


def test_extreme_parameters_spare_the_others(engine: Engine) -> None:
    extreme = [
        {"temperature": 0.011, "temperature_last": True}, {"min_temp": 0.0, "max_temp": 0.01, "temp_exponent": 10.0},
        {"repetition_penalty": 1e-30}, {"mirostat_mode": 2, "mirostat_tau": 0.0, "mirostat_eta": 1.0},
        {"tfs": 1e-30, "typical_p": 1e-30, "top_a": 1.0, "skew": 10.0}, {"temperature": 10.0, "smoothing_factor": 1e-9},
        {"dry_multiplier": 100.0, "dry_base": 10.0, "dry_allowed_length": 1},
    ]  # fmt: skip
    ids = tuple(engine.encode(PROMPT))
    kept = Job(next(_ids), ids, 60, GREEDY)
    events = run(engine, kept, *(Job(next(_ids), ids, 60, SamplingParams(seed=1, **o)) for o in extreme))
    assert "".join(e.text for e in events[kept.id]) == ANSWER


def test_logprobs_are_those_of_the_cpu_engine(engine: Engine, load: Load) -> None:
    for prompt, text in LETTERS_TEST_PROMPTS[:4]:
        sampling = SamplingParams(temperature=0, logit_bias={5: -1.0})
        got = answer(engine, prompt, sampling=sampling, top_logprobs=3)
        true = answer(load("transformers", "letters"), prompt, sampling=sampling, top_logprobs=3)
        assert got[0] == true[0] == text
        ours, theirs = ([one for event in result[3] for one in event.logprobs] for result in (got, true))
        assert [one.token_id for one in ours] == [one.token_id for one in theirs] == got[1]
        for one, reference in zip(ours, theirs, strict=True):
            assert one.logprob == pytest.approx(reference.logprob, abs=0.03)
            assert one.top[0][0] == reference.top[0][0]


def test_min_tokens_stop_tokens_and_ignore_eos(engine: Engine) -> None:
    ids = answer(engine, PROMPT)[1]
    assert len(answer(engine, PROMPT, 80, min_new_tokens=50)[1]) > 50
    assert len(answer(engine, PROMPT, 80, SamplingParams(temperature=0, ignore_eos=True))[1]) == 80
    text, stopped, last, _ = answer(engine, PROMPT, stop_token_ids=(ids[6],))
    assert stopped == ids[: ids.index(ids[6]) + 1]
    assert (text, last.finish_reason) == (engine.decode(stopped[:-1]), "stop")


def test_guidance_with_the_same_prompt_changes_nothing(engine: Engine) -> None:
    negative = tuple(engine.encode(PROMPT))
    guided = answer(engine, PROMPT, sampling=SamplingParams(temperature=0, cfg_scale=3.0), negative_ids=negative)
    assert guided[0] == ANSWER
    other = tuple(engine.encode("sort: b a ->"))
    assert answer(engine, PROMPT, sampling=SamplingParams(temperature=0, cfg_scale=1.5), negative_ids=other)[1]


def test_banned_strings_and_healing(engine: Engine) -> None:
    text = answer(engine, PROMPT, banned_strings=("13", "2 1"))[0]
    assert text.startswith(" 10 11 1")
    assert "13" not in text
    assert "2 1" not in text, "it is the 2 of 12 with which it began"
    healed, ids, *_ = answer(engine, PROMPT[:-1], token_healing=True)
    assert ids
    assert healed


@pytest.mark.parametrize("options", [{"ngram_draft": True}, {"draft_model": str(directory("letters"))}])
def test_speculation_changes_no_greedy_answer(options: dict[str, Any], load: Load) -> None:
    speculating = build_engine(
        demo_spec("exllamav2", "letters", options={"cache_size": 8 * 2304, "chunk_size": 256, **options})
    )
    speculating.load(lambda *_: None)
    pairs = [*LETTERS_TEST_PROMPTS[:8], *LETTERS_TEST_LONG_PROMPTS[:2], *LETTERS_TEST_LONG_ANSWERS[:2]]
    jobs = [Job(next(_ids), tuple(speculating.encode(prompt)), 100, GREEDY) for prompt, _ in pairs]
    events = run(speculating, *jobs)
    accepted = 0
    for job, (_, text) in zip(jobs, pairs, strict=True):
        got = "".join(e.text for e in events[job.id])
        assert got == text[: len(got)]
        last = events[job.id][-1]
        assert isinstance(last, Finished)
        assert last.finish_reason == "stop" or last.completion_tokens == 100
        accepted += last.draft_accepted
    assert accepted > 0
    for size in (1, 2, 7):
        assert len(answer(speculating, LETTERS_TEST_LONG_ANSWERS[1][0], size)[1]) == size
    assert speculating.stats().extra["draft_accepted"] > 0
    one = answer(speculating, "s", 5)  # shorter than any n-gram
    assert len(one[1]) <= 5


def test_the_package_rewrites_nothing_of_a_shared_page(engine: Engine) -> None:
    """After an answer to a wholly cached prompt, a later prompt is answered as with an empty cache."""
    engine.reset()
    long, _ = LETTERS_TEST_LONG_PROMPTS[-1]
    ids = engine.encode(long)
    assert len(ids) > 257
    fresh = Job(next(_ids), tuple(ids[:257]), 30, GREEDY)
    first = [i for e in run(engine, fresh)[fresh.id] for i in e.token_ids]
    again = Job(next(_ids), tuple(ids[:257]), 30, GREEDY)
    assert [i for e in run(engine, again)[again.id] for i in e.token_ids] == first
    middle = (ids[256], *first[:20])
    cached = Job(next(_ids), middle, 20, GREEDY)
    with_cache = [i for e in run(engine, cached)[cached.id] for i in e.token_ids]
    engine.reset()
    clean = Job(next(_ids), middle, 20, GREEDY)
    assert [i for e in run(engine, clean)[clean.id] for i in e.token_ids] == with_cache
