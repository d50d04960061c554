"""The decode loop that queues a step before it reads the last, around an oracle that computes queued steps late.

The tests of pages, batches and answers run with this loop, too (fixture ``decoding``). Here are the cases that only it
has: a row whose answer has ended, or was cancelled, while its next step is queued.
"""

import itertools
import random
from typing import Any

import pytest

from model_worker.engine import PromptScoring
from model_worker.engines.exllamav2.decode.buckets import fitting, most_captured, page_sizes, row_sizes
from model_worker.engines.exllamav2.decode.loop import ChunkSizer
from protocol.request import SamplingParams
from tests.engines.driver import GREEDY
from tests.engines.exllamav2_cpu.harness import PAGE, Harness
from tests.engines.exllamav2_cpu.oracle import OracleLogits


def harness(**options: object) -> Harness:
    return Harness(queues_ahead=True, **options)  # type: ignore[arg-type]


def check_claims(h: Harness) -> None:
    """Every token that a page claims to hold has been computed there, and is the one that the oracle wrote."""
    written = h.cache.key_states[0].view(-1, PAGE)
    for page in h.generator.all_pages:
        claimed = page.kv_position
        assert written[page.page_index, :claimed].tolist() == page.sequence[0, :claimed].tolist(), page.page_index


def test_steps_are_queued_before_the_last_one_is_read() -> None:
    h = harness()
    h.submit(range(40, 60), 30)
    h.submit(range(60, 90), 30)
    h.driver.run()
    h.check()
    assert h.steps is not None
    assert h.steps.queued_ahead > 20


@pytest.mark.parametrize("length", range(PAGE - 6, PAGE + 3))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_answers_that_end_around_the_end_of_a_page(length: int, size: int) -> None:
    h, rng = harness(pages=6), random.Random(length)
    ended = h.submit(h.random_ids(rng, length), size)
    other = h.submit(h.random_ids(rng, 20), 30)
    h.driver.run()
    h.check()
    check_claims(h)
    h.submit([*ended.job.prompt_ids, *ended.ids, *h.random_ids(rng, 3)], 10)  # uses the pages of the answer that ended
    h.driver.run()
    h.check()
    assert len(other.ids) == 30


@pytest.mark.parametrize("seed", range(4))
def test_answers_that_end_with_an_end_token_drop_the_row_that_is_queued(seed: int) -> None:
    h, rng = harness(logits=OracleLogits(448, eos_every=12), pages=8), random.Random(seed)
    for _ in range(12):
        h.submit(h.random_ids(rng, rng.randrange(3, 300)), 60)
    while h.driver.unfinished:
        h.driver.step()
        check_claims(h)
    h.check()


@pytest.mark.parametrize("step", range(1, 9))
def test_cancelled_while_its_next_token_is_computed(step: int) -> None:
    h, rng = harness(pages=4, context=3 * PAGE), random.Random(step)
    cancelled = h.submit(h.random_ids(rng, PAGE - 4), 2 * PAGE)  # three pages of four
    h.submit(h.random_ids(rng, 20), 30)
    waiting = h.submit(h.random_ids(rng, PAGE + 40), 200)
    for _ in range(step):
        h.driver.step()
    assert not waiting.ids
    h.driver.cancel(cancelled)
    h.driver.run()
    h.check()
    check_claims(h)
    assert waiting.finished is not None


def test_reset_while_a_step_is_queued() -> None:
    h, rng = harness(), random.Random(5)
    h.submit(h.random_ids(rng, 30), 100)
    for _ in range(4):
        h.driver.step()
    h.engine.reset()
    h.driver.outcomes.clear()
    h.submit(h.random_ids(rng, 30), 40)
    h.driver.run()
    h.check()


def test_an_answer_that_the_host_draws_beside_others() -> None:
    h, rng = harness(), random.Random(6)
    plain = h.submit(h.random_ids(rng, 30), 60)
    shown = h.submit(h.random_ids(rng, 30), 10, SamplingParams(temperature=0, mirostat_mode=2))
    h.driver.run()
    h.check()
    assert len(plain.ids) == 60
    assert len(shown.ids) == 10
    assert h.steps is not None
    assert h.steps.queued_ahead > 40, "once the host draws nothing, steps are queued ahead again"


def test_a_page_that_a_queued_step_overwrites_does_not_get_its_old_name_back() -> None:
    h, rng = harness(pages=4), random.Random(7)
    h.submit(h.random_ids(rng, 10), 200)
    for _ in range(3):
        h.driver.step()
    old = h.submit(h.random_ids(rng, 2 * PAGE + 20), 5)
    while old.finished is None:
        h.driver.step()
    # The first page is found in the cache. The second is taken from ``old``, and nothing of the prompt goes there.
    takes_its_page = h.submit([*old.job.prompt_ids[:PAGE], 77], 50)
    h.driver.step()
    assert not takes_its_page.ids, "its first step is queued"
    h.driver.cancel(takes_its_page)
    again = h.submit(old.job.prompt_ids, 5)
    while again.finished is None:
        h.driver.step()
    assert again.ids == old.ids


def test_no_row_is_computed_behind_the_last_token_of_a_limit() -> None:
    h, rng = harness(), random.Random(9)
    h.model.forwards.clear()  # those of the warm-up
    for size in (1, 2, 9, 30):
        h.submit(h.random_ids(rng, 12), size)
    h.driver.run()
    assert sum(rows for rows, _, prompt in h.model.forwards if not prompt) == 1 + 2 + 9 + 30


def test_more_rows_than_were_captured_go_the_package_s_way() -> None:
    h, rng = harness(batch=6), random.Random(8)
    assert h.steps is not None
    h.steps.most = 2
    for size in (10, 20, 30, 40):
        h.submit(h.random_ids(rng, 12), size, GREEDY)
    h.driver.run()
    h.check()
    assert h.steps.queued_ahead > 5


def test_a_prompt_is_read_in_pieces_between_the_steps_of_an_answer() -> None:
    """Without a measurement the pace allows a page, and once pages are too slow, a page again: never nothing."""
    h, rng = harness(chunk=4 * PAGE, pages=24), random.Random(10)
    h.pace.tokens = lambda running, scored: PAGE if running else 4 * PAGE  # type: ignore[method-assign]
    running = h.submit(h.random_ids(rng, 10), 100)
    for _ in range(3):
        h.driver.step()
    h.model.forwards.clear()
    prompts = [h.submit(h.random_ids(rng, 5 * PAGE + start), 5) for start in (0, 1, 255)]
    h.driver.run()
    h.check()
    read = [tokens for _, tokens, prompt in h.model.forwards if prompt]
    assert max(read) <= PAGE
    assert sum(read) >= 3 * 5 * PAGE
    between = [prompt for _, _, prompt in h.model.forwards]
    assert not any(a and b for a, b in itertools.pairwise(between[: between.index(False) + 30])), "a step between two"
    assert len(running.ids) == 100
    assert all(outcome.finished for outcome in prompts)


def test_a_gap_is_counted_for_the_chunk_that_was_read_in_it() -> None:
    """A step is accepted when the next chunk and step have been queued. Its gap holds the chunk before it."""
    h, rng = harness(chunk=4 * PAGE, pages=24), random.Random(12)
    sizes = iter([PAGE, 2 * PAGE, PAGE, PAGE])
    measured: list[int] = []
    h.pace.tokens = lambda running, scored: next(sizes) if running else 4 * PAGE  # type: ignore[method-assign]
    h.pace.measured = lambda gap_s, tokens, scored: measured.append(tokens)  # type: ignore[method-assign]
    h.submit(h.random_ids(rng, 10), 60)
    for _ in range(3):
        h.driver.step()
    quiet = len(measured)
    prompt = h.submit(h.random_ids(rng, 5 * PAGE + 1), 5)
    h.driver.step()
    assert measured[quiet:] == [], "the step before was accepted: a chunk is behind it, so it is no measure of a step"
    h.driver.run()
    assert measured[quiet : quiet + 4] == [PAGE, 2 * PAGE, PAGE, PAGE]
    assert not any(measured[quiet + 4 :])
    assert prompt.finished


def test_the_pace_follows_what_was_measured() -> None:
    pace = ChunkSizer(2048, limit_s=0.030)
    assert pace.tokens(running=False) == 2048
    assert pace.tokens(running=True) == 256, "nothing is known yet"
    for _ in range(20):
        pace.measured(0.006, 0)
    pace.measured(0.006 + 256 * 20e-6, 256)  # 20 microseconds a token: 975 of them fit into 0.85 * 30 ms
    assert pace.tokens(running=True) == 768
    pace.measured(0.006 + 768 * 60e-6, 768)
    assert pace.tokens(running=True) < 768, "a chunk that took longer makes the next one smaller at once"
    for _ in range(200):
        pace.measured(0.006 + 256 * 20e-6, 256)
    assert pace.tokens(running=True) == 768, "and it grows again"
    for _ in range(50):
        pace.measured(0.050, 0)
    assert pace.tokens(running=True) == 256, "steps alone are beyond the limit: prompts still go on"


def test_tokens_with_log_probabilities_have_a_pace_of_their_own() -> None:
    pace = ChunkSizer(2048, limit_s=0.030)
    pace.measured(0.006, 0)
    pace.measured(0.006 + 256 * 5e-6, 256)
    assert pace.tokens(running=True) == 2048
    assert pace.tokens(running=True, scored=True) == 256, "nothing is known yet"
    pace.measured(0.006 + 256 * 30e-6, 256, scored=True)
    assert pace.tokens(running=True, scored=True) == 512
    assert pace.tokens(running=True) == 2048


def test_a_prompt_with_log_probabilities_is_read_at_its_own_pace() -> None:
    h, rng = harness(chunk=4 * PAGE, pages=24), random.Random(14)
    measured: list[tuple[int, bool]] = []
    h.pace.tokens = lambda running, scored: PAGE if scored else 4 * PAGE  # type: ignore[method-assign]
    h.pace.measured = lambda gap_s, tokens, scored: measured.append((tokens, scored))  # type: ignore[method-assign]
    running = h.submit(h.random_ids(rng, 10), 60)
    for _ in range(3):
        h.driver.step()
    h.submit(h.random_ids(rng, 4 * PAGE + 1), 5, prompt_logprobs=PromptScoring(1))
    while len(measured) < 20:
        h.driver.step()
    h.submit(h.random_ids(rng, 4 * PAGE + 1), 5)
    h.driver.run()
    h.check()
    assert [each for each in measured if each[0]] == [(PAGE, True)] * 4 + [(4 * PAGE, False)]
    assert len(running.ids) == 60


def some_sampling(rng: random.Random) -> SamplingParams:
    """Return parameters that the rule for draws covers, many of them with tables."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.5]),
        seed=rng.randrange(1 << 40),
        top_k=rng.choice([0, 0, 5, 40]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        penalty_range=rng.choice([-1, 12]),
        repetition_decay=rng.choice([0, 8]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        presence_penalty=rng.choice([0.0, 0.5]),
        logit_bias=rng.choice([None, {7: 4.0, 9: -3.0}]),
        banned_tokens=rng.choice([(), (5, 6, 8)]),
        ignore_eos=rng.random() < 0.2,
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_answers_drawn_ahead_are_those_that_the_host_draws(seed: int) -> None:
    """Tables of penalties and biases follow the answers through company, cancelled neighbours and slots used again.
    Answers with a constraint are drawn under its mask."""
    ahead, by_host = (harness(logits=OracleLogits(448, eos_every=40), pages=24, batch=4) for _ in range(2))
    assert by_host.steps is not None
    by_host.steps.most, warm_up = 0, by_host.steps.drawn_here  # every step goes the package's way
    rng = random.Random(seed)
    asked = []
    for _ in range(14):
        job = some_job(rng, ahead)
        asked.append((ahead.submit(*job[0], **job[1]), by_host.submit(*job[0], **job[1])))
    for step in range(5):
        ahead.driver.step()
        if step == 3:
            ahead.driver.cancel(asked[0][0])
            by_host.driver.cancel(asked[0][1])
    ahead.driver.run()
    by_host.driver.run()
    for mine, theirs in asked[1:]:
        assert mine.ids == theirs.ids, mine.job
        assert [drawn.token_id for drawn in mine.logprobs] == [drawn.token_id for drawn in theirs.logprobs]
    assert ahead.steps is not None
    assert ahead.steps.drawn_here > 150
    assert ahead.steps.drawn_under_masks > 0
    assert by_host.steps.drawn_here == warm_up
    for h in (ahead, by_host):
        h.engine.close()


def some_job(rng: random.Random, h: Harness) -> tuple[tuple[list[int], int, SamplingParams], dict[str, Any]]:
    """Return the arguments of a random job."""
    fields: dict[str, Any] = {"top_logprobs": rng.choice([None, None, 3])}
    if rng.random() < 0.3:
        fields["min_new_tokens"] = 9
    if rng.random() < 0.3:
        fields["stop_token_ids"] = (11, 12)
    if rng.random() < 0.2:
        fields["banned_strings"] = ("e", "a")
    if rng.random() < 0.4:
        fields["constraint"] = ("regex", rng.choice(["[a-z ]{12,40}", "([0-9]{2}[a-f])+", "(ab|ba){3,9}"]))
    return (h.random_ids(rng, rng.randrange(2, 40)), rng.randrange(9, 40), some_sampling(rng)), fields


def test_sizes_of_graphs() -> None:
    assert row_sizes(1) == [1]
    assert row_sizes(6) == [1, 2, 3, 4, 6]
    assert row_sizes(32) == [1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32]
    assert row_sizes(100) == [1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 100]
    assert row_sizes(32, 16) == [1, 2, 3, 4, 8, 12, 16, 40]
    assert row_sizes(32, 24) == [1, 2, 3, 4, 8, 12, 16, 20, 24, 40]
    assert row_sizes(12, 16) == [1, 2, 3, 4, 8, 12]
    assert row_sizes(64, 16) == [1, 2, 3, 4, 8, 12, 16, 40, 48, 56, 64]
    for most in range(1, 200):
        for kernel_rows in range(16, 33, 4):
            sizes = row_sizes(most, kernel_rows)
            assert sizes == sorted(set(sizes))
            assert sizes[-1] in (most, most_captured(most, True))
            for needed in range(1, most + 1):
                found = fitting(sizes, needed)
                assert found is not None
                assert found >= needed
                assert found <= kernel_rows or found > 32, "what kernels should not compute is made fp16"
        assert most_captured(most, False) == row_sizes(most)[-1] == most
    for most in range(1, 200):
        sizes = row_sizes(most)
        assert sizes == sorted(set(sizes))
        assert fitting(sizes, most) == most
        assert all(fitting(sizes, n) <= 32 for n in range(1, min(most, 32) + 1)), "no size reaches across 32 rows"  # type: ignore[operator]
    assert page_sizes(33, False) == [33]
    assert page_sizes(33, True) == [4, 8, 16, 32, 33]
    assert page_sizes(2, True) == [2]
    assert fitting([4, 8], 9) is None
