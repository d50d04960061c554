"""The batch is fair to running answers, large jobs and small jobs, and does not slow down after thousands of jobs."""

import gc
import random
import statistics
import sys
import time
import weakref

import pytest

from model_worker.engines.exllamav2.answer_jobs import PASSES
from protocol.errors import RequestError
from protocol.request import SamplingParams
from tests.engines.driver import Outcome
from tests.engines.exllamav2_cpu.harness import PAGE, Harness

pytestmark = pytest.mark.usefixtures("decoding")

SHORT = list(range(40, 50))


def begun(h: Harness) -> set[int]:
    """Return the ids of the jobs in the generator."""
    return {job.identifier for job in h.generator.active_jobs}


def test_a_crowd_of_long_prompts_costs_running_answers_one_chunk_a_step() -> None:
    h, rng = Harness(pages=64, batch=8), random.Random(1)
    running = h.submit(SHORT, 200)
    while not running.ids:
        h.driver.step()
    crowd = [h.submit(h.random_ids(rng, 3 * PAGE + 7), 5) for _ in range(6)]
    while any(outcome.finished is None for outcome in crowd):
        h.model.forwards.clear()
        before = len(running.ids)
        h.driver.step()
        assert len(running.ids) == before + 1
        assert sum(size for _, size, prefill in h.model.forwards if prefill) <= PAGE
    h.driver.run()
    h.check()


def test_short_prompts_begin_together() -> None:
    h = Harness(pages=64, batch=16, chunk=2 * PAGE)
    for n in range(16):
        h.submit([50 + n, *SHORT], 5)
    h.driver.step()
    assert h.engine.stats().active == 16


@pytest.mark.parametrize("drawn", [0, 7])
def test_prompts_that_come_one_by_one_begin_together(drawn: int, decoding: str) -> None:
    """Resumed answers, with first tokens from another worker, also begin together."""
    h, rng = Harness(pages=64, batch=8, chunk=2 * PAGE), random.Random(4)
    crowd = []
    for _ in range(5):
        prompt = h.random_ids(rng, 60)
        crowd.append(h.submit(prompt, drawn + 5, resumed_ids=tuple(h.logits.expected(prompt, drawn))))
        h.driver.step()
        assert not any(outcome.ids for outcome in crowd)
    h.driver.step()
    assert all(len(outcome.ids) == 1 for outcome in crowd)
    late = h.submit(h.random_ids(rng, 60), 5)
    h.driver.step()
    first = int(decoding != "queued ahead")  # there its first step is queued now, and read with the next
    assert [len(outcome.ids) for outcome in (*crowd, late)] == [2, 2, 2, 2, 2, first]
    h.driver.run()
    h.check()


def test_the_first_answer_waits_for_one_chunk_of_later_prompts_at_most() -> None:
    h, rng = Harness(pages=64, batch=32), random.Random(5)
    first = h.submit(h.random_ids(rng, 100), 5)
    steps = 0
    while not first.ids:
        h.driver.step()
        h.submit(h.random_ids(rng, 100), 5)
        steps += 1
    assert steps <= 1 + PAGE // 99 + 1
    h.driver.run()
    h.check()


def test_prompts_found_in_the_cache_begin_at_once() -> None:
    h, rng = Harness(pages=64, batch=8), random.Random(2)
    prompt = h.random_ids(rng, 4 * PAGE + 1)
    h.answer(prompt, 2)
    for n in range(6):
        h.submit([*prompt, n], 2)
    h.driver.step()
    assert h.engine.stats().active == 6


def test_jobs_begin_in_the_order_in_which_they_came() -> None:
    h, order = Harness(pages=8, batch=2), []
    outcomes = [h.submit([50 + n, *SHORT], 9) for n in range(8)]
    while h.driver.unfinished:
        h.driver.step()
        order += [n for n, o in enumerate(outcomes) if o.job.id in begun(h) and n not in order]
    assert order == list(range(8))


@pytest.mark.long
def test_a_large_job_is_passed_by_small_ones_but_not_for_ever() -> None:
    h = Harness(pages=8, batch=8)
    first = h.submit(SHORT, 3 * PAGE)  # takes half of the pages
    h.driver.step()
    large = h.submit(SHORT[1:], 7 * PAGE)
    small: list[Outcome] = []
    while large.job.id not in begun(h):
        small.append(h.submit([60, *SHORT], 4))
        for _ in range(5):
            h.driver.step()
        assert len(small) < 300
    passed = [o for o in small if o.finished is not None]
    assert len(passed) == PASSES
    assert first.finished is not None
    h.driver.run()
    h.check()


def test_what_waits_can_be_cancelled_and_leaves_nothing() -> None:
    h = Harness(pages=4, batch=2)
    outcomes = [h.submit([50 + n, *SHORT], 300) for n in range(6)]
    h.driver.step()
    assert (h.engine.stats().active, h.engine.stats().pending) == (2, 4)
    for outcome in outcomes[1:4]:
        h.driver.cancel(outcome)
    h.driver.run()
    h.check()
    h.driver.assert_idle()
    assert not h.engine._batch._passed


def test_more_pages_than_there_are_is_refused() -> None:
    h = Harness(pages=4, context=2048)
    with pytest.raises(RequestError, match="needs 5 pages of 256 tokens, the cache has 4"):
        h.submit(SHORT, 4 * PAGE)
    assert h.answer(SHORT, 4 * PAGE - len(SHORT)).finished is not None


@pytest.mark.long
def test_a_random_crowd_ends_whatever_its_sizes() -> None:
    for seed in range(2):
        h, rng = Harness(pages=8, batch=3), random.Random(seed)
        for _ in range(15):
            size = rng.choice([1, 30, 300, 900])
            prompt = h.random_ids(rng, size)
            if rng.random() < 0.3:
                scaled = SamplingParams(temperature=0, cfg_scale=2.0)
                h.submit(prompt[:600], rng.randrange(1, 200), scaled, negative_ids=tuple(prompt[:50]))
            else:
                h.submit(prompt, rng.randrange(1, 1000))
        h.driver.run()
        h.driver.assert_idle()


# time


def test_nothing_of_an_answer_stays_and_no_collector_is_needed() -> None:
    h = Harness(pages=16)
    gc.collect()
    gc.disable()
    try:
        handles = []
        for n in range(40):
            outcome = h.submit([50 + n, *SHORT], 10, banned_strings=("a",) if n % 3 == 0 else ())
            handles.append(weakref.ref(h.engine._answers[outcome.job.id].handle))
            if n % 5 == 0:
                h.driver.step()
                h.driver.cancel(outcome)
        h.driver.run()
        assert not [ref for ref in handles if ref() is not None]
    finally:
        gc.enable()


@pytest.mark.long
def test_two_thousand_answers_with_never_an_idle_moment_do_not_slow_down() -> None:
    """A list that grows would increase the processor time per step. Wall time depends on other users of the machine."""
    h, rng = Harness(pages=32, batch=8), random.Random(3)
    texts = [h.random_ids(rng, rng.randrange(5, 300)) for _ in range(20)]
    waiting, ended = 0, 0
    times: list[float] = []
    while ended < 2000:
        for _ in range(16 - waiting):
            h.submit(rng.choice(texts)[: rng.randrange(1, 300)], rng.randrange(1, 5))
        before = time.thread_time()
        h.driver.step()
        times.append(time.thread_time() - before)
        finished = [key for key, outcome in h.driver.outcomes.items() if outcome.finished is not None]
        for key in finished:
            outcome = h.driver.outcomes.pop(key)
            assert outcome.ids == h.expected(outcome)
        ended += len(finished)
        waiting = len(h.driver.outcomes)
        h.recording.events.clear()
        assert waiting, "never idle"
    assert "defragmented_s_ago" not in h.engine.stats().extra, "the package had no chance to move pages"
    assert len(h.generator.referenced_pages) + len(h.generator.unreferenced_pages) == h.generator.max_pages == 32
    tenth = len(times) // 10
    first, last = (statistics.median(times[begin : begin + tenth]) for begin in (tenth, len(times) - tenth))
    assert last < 2 * first + 0.001, f"{first * 1e6:.0f} us a step became {last * 1e6:.0f}"


def test_a_very_long_text_in_the_cache_does_not_overflow_the_defragmenter() -> None:
    h = Harness(pages=8)
    generator = h.generator
    generator.max_pages = 3000  # a chain of this many pages: more than the oracle's positions can address
    generator.reset_page_table()
    for page, before in zip(generator.all_pages[1:], generator.all_pages[:-1], strict=True):
        page.prev_hash = before.phash
    generator.last_defrag_serial = -3000
    limit = sys.getrecursionlimit()
    generator.defrag_cache()
    assert generator.last_defrag_serial == generator.access_serial
    assert sys.getrecursionlimit() == limit


def test_status_says_what_the_generator_does() -> None:
    h, rng = Harness(pages=16, batch=4), random.Random(4)
    outcomes = [h.submit(h.random_ids(rng, 2 * PAGE + 30), 40) for _ in range(5)]
    h.driver.step()
    stats = h.engine.stats()
    assert (stats.active, stats.pending, stats.extra["prefilling"]) == (1, 4, 1)
    assert (stats.extra["pages_used"], stats.extra["pages_total"]) == (3, 16)
    assert stats.extra["prefill_share"] == 1.0
    h.driver.run()
    stats = h.engine.stats()
    assert stats.extra["pages_used"] == 0
    assert stats.extra["pages_cached"] > 0
    assert 0 < stats.extra["prefill_share"] < 1
    assert 1 < stats.extra["jobs_per_step"] <= 4
    assert stats.extra["tokens_per_step"] == stats.extra["jobs_per_step"]
    assert stats.extra["step_ms"] > 0
    assert stats.steps > 40
    assert all(isinstance(value, (int, float)) for value in stats.extra.values())
    assert all(outcome.finished is not None for outcome in outcomes)
