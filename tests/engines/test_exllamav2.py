"""Features that only engine exllamav2 has work: cache modes, shared pages, its own admission. Needs a CUDA device."""

from collections.abc import Callable
from typing import Any

import pytest

from model_worker.engine import Engine, LoadError
from model_worker.engines import build_engine
from tests.engines.conftest import demo_spec, need_gpu
from tests.engines.driver import Driver, answer
from tools.demo_models.corpus import LETTERS_TEST_LONG_PROMPTS, LETTERS_TEST_PROMPTS

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu() -> None:
    need_gpu("exllamav2")


def loaded(model: str = "letters", **changes: Any) -> Engine:
    engine = build_engine(demo_spec("exllamav2", model, **changes))
    engine.load(lambda *_: None)
    return engine


@pytest.mark.parametrize("mode", ["Q8", "Q6", "Q4"])
def test_quantized_caches(mode: str) -> None:
    engine = loaded(options={"cache_mode": mode, "cache_size": 4096, "chunk_size": 256})
    driver = Driver(engine)
    pairs = LETTERS_TEST_PROMPTS[:16]
    outcomes = [driver.submit(prompt) for prompt, _ in pairs]
    driver.run()
    right = sum(outcome.text == text for outcome, (_, text) in zip(outcomes, pairs, strict=True))
    assert right >= (12 if mode == "Q4" else 15), "a coarser cache may cost an answer, not most of them"
    driver.assert_idle()


def test_pages_are_counted_and_shared_prefixes_reused(load: Callable[[str, str], Engine]) -> None:
    engine = load("exllamav2", "letters")
    engine.reset()
    assert engine.pages_needed(1, 255) == 1
    assert engine.pages_needed(1, 256) == 2
    driver = Driver(engine)
    prompt, text = LETTERS_TEST_LONG_PROMPTS[-1]
    first = driver.submit(prompt, 40)
    driver.step()
    assert engine.stats().extra["pages_used"] == engine.pages_needed(len(first.job.prompt_ids), 40)
    driver.run()
    assert first.text == text
    assert engine.stats().extra["pages_used"] == 0
    assert engine.stats().extra["pages_cached"] > 0
    again = answer(engine, prompt, 40)
    assert again.text == text
    assert again.finished is not None
    assert again.finished.cached_tokens >= 256
    engine.reset()
    assert engine.stats().extra["pages_cached"] == 0


def test_jobs_wait_for_pages_and_cancelled_ones_give_them_back() -> None:
    engine = loaded(max_seq_len=1024, options={"cache_size": 1024, "chunk_size": 256})
    assert engine.stats().extra["pages_total"] == 4
    driver = Driver(engine)
    large = driver.submit(LETTERS_TEST_PROMPTS[0][0], 1000)
    small = [driver.submit(prompt, 60) for prompt, _ in LETTERS_TEST_PROMPTS[1:3]]
    driver.step()
    assert (engine.stats().active, engine.stats().pending) == (1, 2)
    driver.cancel(large)
    driver.run()
    assert [o.text for o in small] == [text for _, text in LETTERS_TEST_PROMPTS[1:3]]
    driver.assert_idle()


def test_a_context_that_is_no_multiple_of_a_page_is_kept_exactly() -> None:
    engine = loaded(max_seq_len=300, max_batch_size=2, options={})
    assert engine.capabilities.context == 300
    assert engine.stats().extra["pages_total"] == 2
    assert answer(engine, LETTERS_TEST_PROMPTS[0][0]).text == LETTERS_TEST_PROMPTS[0][1]


def test_sizes_that_do_not_go_together() -> None:
    with pytest.raises(LoadError, match="cache_size is 512, less than the context of 2048"):
        loaded(options={"cache_size": 512})
    with pytest.raises(LoadError, match="max_batch_size is 300"):
        loaded(max_batch_size=300, options={"chunk_size": 256})
