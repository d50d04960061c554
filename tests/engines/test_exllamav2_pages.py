"""Each answer uses keys and values of the right tokens at the right positions, even with shared or speculated pages.

Each case went wrong or ended the process with the package's own jobs (ExLlamaV2 0.3.2). The oracle of ``exllamav2_cpu``
detects that. Each test fails when its defence in ``exllamav2.job`` is removed.
"""

import os
import random
from unittest import mock

import pytest

from tests.engines.driver import Outcome
from tests.engines.exllamav2_cpu.harness import PAGE, VOCAB, Harness
from tests.engines.exllamav2_cpu.oracle import OracleLogits

pytestmark = pytest.mark.usefixtures("decoding")

EPISODES = int(os.environ.get("EXLLAMAV2_EPISODES", "4"))
"""Number of episodes of the fuzz test, for each kind of speculation. Hundreds take minutes."""


def tokens(outcome: Outcome) -> list[int]:
    return [*outcome.job.prompt_ids, *outcome.ids]


def test_the_page_behind_a_prompt_found_whole_in_the_cache() -> None:
    h, rng = Harness(), random.Random(1)
    prompt = h.random_ids(rng, 2 * PAGE + 1)
    first, again = h.driver.submit(prompt, 40), None
    h.driver.run()
    again = h.driver.submit(prompt, 40)
    h.driver.run()
    assert again.finished is not None
    assert again.finished.cached_tokens >= 2 * PAGE
    assert again.ids == first.ids
    # this prompt begins like the first text's third page, but at another position and after other tokens
    h.driver.submit(tokens(again)[2 * PAGE : 2 * PAGE + 20] + h.random_ids(rng, 5), 20)
    h.driver.run()
    h.check()


def test_what_was_speculated_behind_the_end_is_not_reused() -> None:
    h, rng = Harness(speculate="draft"), random.Random(2)
    ended = h.driver.submit(h.random_ids(rng, PAGE - 5), 5)  # the last step also writes two tokens into the next page
    h.driver.run()
    assert len(ended.ids) == 5
    beyond = h.logits.expected(ended.job.prompt_ids, 20)[5:7]
    h.driver.submit(beyond + h.random_ids(rng, 20), 20)
    h.driver.run()
    h.check()


def test_a_page_that_loses_its_name_is_not_taken_for_the_start_of_a_text() -> None:
    h, rng = Harness(pages=8), random.Random(3)
    prompt = h.random_ids(rng, 2 * PAGE + 80)
    h.driver.submit(prompt, 5)
    h.driver.run()
    h.driver.submit(h.random_ids(rng, 3 * PAGE + 80), 5)
    h.driver.run()
    takes_old_pages = h.driver.submit(h.random_ids(rng, 10), 4 * PAGE - 10)  # it has not written into them yet
    h.driver.step()
    same = h.driver.submit(prompt, 5)
    h.driver.step()
    h.driver.step()
    h.driver.step()
    h.driver.cancel(takes_old_pages)
    h.driver.submit(prompt[PAGE : PAGE + 100] + h.random_ids(rng, 5), 20)
    h.driver.run()
    assert same.finished is not None
    h.check()


def test_a_page_completed_while_another_job_is_going_to_compute_it() -> None:
    h, rng = Harness(pages=12, batch=3), random.Random(4)
    ahead = h.driver.submit(h.random_ids(rng, PAGE), 300)
    while len(tokens(ahead)) < 2 * PAGE:
        h.driver.step()
    # The next step completes the second page of ``ahead``. The package would compute a part of the prompt of
    # ``behind`` first, so the patch prevents that.
    behind = h.driver.submit([*tokens(ahead), *h.random_ids(rng, 2 * PAGE)], 30)
    handle = h.engine._answers[behind.job.id].handle
    with mock.patch.object(handle, "prefill", return_value=None):
        h.driver.step()
    h.driver.run()
    assert behind.finished is not None
    h.check()
    h.driver.assert_idle()


@pytest.mark.parametrize("steps", range(5))
def test_cancelled_while_others_wait_for_its_pages(steps: int) -> None:
    h, rng = Harness(pages=16), random.Random(5)
    prompt = h.random_ids(rng, 3 * PAGE + 50)
    jobs = [h.driver.submit(prompt, 20) for _ in range(3)]
    for _ in range(steps):
        h.driver.step()
    h.driver.cancel(jobs[0])
    h.driver.submit(prompt[: 2 * PAGE + 30], 20)
    h.driver.run()
    h.check()
    h.driver.assert_idle()


def test_identical_prompts_are_computed_once() -> None:
    h, rng = Harness(pages=16), random.Random(6)
    prompt = h.random_ids(rng, 3 * PAGE)
    h.model.forwards.clear()
    for _ in range(4):
        h.driver.submit(prompt, 3)
    h.driver.run()
    read = sum(size for _, size, prefill in h.model.forwards if prefill)
    assert read < 3 * PAGE + 4 * PAGE  # full pages once, the last page by each job
    h.check()


def test_pages_moved_together_when_idle_keep_their_contents() -> None:
    h, rng = Harness(pages=6), random.Random(7)
    prompts = [h.random_ids(rng, size) for size in (300, 700, 40, 500)]
    moved = 0
    for _ in range(60):
        prompt = rng.choice(prompts)
        before = [page.page_index for page in h.generator.all_pages]
        outcome = h.driver.submit(prompt + h.random_ids(rng, rng.randrange(40)), rng.randrange(1, 60))
        if rng.random() < 0.2:
            h.driver.step()
            h.driver.cancel(outcome)
        h.driver.run()
        moved += before != [page.page_index for page in h.generator.all_pages]
    assert moved, "the generator moved pages"
    assert h.engine.stats().extra["defragmented_s_ago"] >= 0
    h.check()


@pytest.mark.long
@pytest.mark.parametrize("speculate", [None, "ngram", "draft"])
@pytest.mark.parametrize("seed", range(EPISODES))
def test_random_jobs(speculate: str | None, seed: int) -> None:
    """Random prompts with common parts, cancels and few pages give right answers. The test's name has the seed."""
    rng = random.Random(seed)
    logits = OracleLogits(VOCAB, eos_id=2, eos_every=rng.choice([0, 40, 150]), habit=rng.choice([0, 0.5, 0.9]))
    draft = OracleLogits(VOCAB, eos_id=2, eos_every=rng.choice([0, 100]), habit=logits.habit)
    h = Harness(
        logits, pages=rng.choice([6, 8, 12]), batch=rng.choice([2, 4]), chunk=rng.choice([PAGE, 2 * PAGE]),
        speculate=speculate, draft=draft, draft_tokens=rng.choice([1, 3, 6]),
    )  # fmt: skip
    context, texts = h.engine.capabilities.context - 8, [h.random_ids(rng, rng.randrange(1, 600)) for _ in range(3)]
    running: list[Outcome] = []
    for _ in range(30):
        while len(running) < 6 and rng.random() < 0.7:
            running.append(h.driver.submit(*random_prompt(h, rng, texts, context)))
        for _ in range(rng.randrange(1, 40)):
            h.driver.step()
        for outcome in [o for o in running if o.finished is not None]:
            running.remove(outcome)
            texts.append(tokens(outcome)[:1500])
        if running and rng.random() < 0.4:
            cancelled = running.pop(rng.randrange(len(running)))
            texts.append(tokens(cancelled)[:1500])
            h.driver.cancel(cancelled)
        del texts[:-20]
    h.driver.run()
    h.check()
    h.driver.assert_idle()


def random_prompt(h: Harness, rng: random.Random, texts: list[list[int]], context: int) -> tuple[list[int], int]:
    """Return (ids, max_new_tokens) of a text, a part of a text, or a text with a part of its answer."""
    ids = list(rng.choice(texts))
    kind = rng.random()
    if kind < 0.3:
        ids = ids[rng.randrange(len(ids)) :]
    elif kind < 0.4 and len(ids) > PAGE:
        ids = ids[len(ids) // PAGE * PAGE :] or ids
    if rng.random() < 0.4:
        ids = ids + h.logits.expected(ids, rng.randrange(1, 200))
    if rng.random() < 0.3:
        ids = ids[: rng.randrange(1, len(ids) + 1)]
    if rng.random() < 0.3 and len(ids) > PAGE:
        ids = ids[: (len(ids) - 1) // PAGE * PAGE + 1]
    size = rng.randrange(1, 200)
    return ids[: context - size], size
