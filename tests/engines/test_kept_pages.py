"""Pages of the cache that sleep along hold what they held, and prompts find them again. Others are forgotten."""

import random
from typing import Any

import pytest
import torch

from model_worker.engines.exllamav2.sleep import KeptPages
from tests.engines.exllamav2_cpu.harness import PAGE, Harness

pytestmark = pytest.mark.usefixtures("decoding")
WIDTH = 8


class Cache:
    """Tensors in the shape of the package's caches, in which each page holds its number."""

    def __init__(self, pages: int) -> None:
        self.keys = torch.arange(pages).repeat_interleave(PAGE)[None, :, None].expand(1, -1, WIDTH).half().contiguous()
        self.codes = self.keys.to(torch.uint8)

    def all_tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.codes]

    def lose(self) -> None:
        for tensor in self.all_tensors():
            tensor.fill_(77)

    def held(self) -> list[set[int]]:
        return [{int(number) for number in tensor.flatten().tolist()} for tensor in self.all_tensors()]


def size_of_a_page() -> int:
    return PAGE * WIDTH * 3


def sleep(h: Harness, cache: Any, pages: int) -> None:
    kept = KeptPages([cache], pages * size_of_a_page())
    assert kept.most_bytes == pages * size_of_a_page()
    if h.engine._loop is not None:
        h.engine._loop.forget()
    kept.save(h.generator.all_pages)
    cache.lose()
    kept.restore()


def test_a_conversation_is_found_again() -> None:
    h, rng = Harness(pages=8), random.Random(1)
    prompt = h.random_ids(rng, 2 * PAGE + 30)
    first = h.answer(prompt, 20)
    cache = Cache(8)
    sleep(h, cache, 8)
    assert all(held <= set(range(8)) for held in cache.held())
    again = h.answer(prompt, 20)
    assert again.finished is not None
    assert again.finished.cached_tokens >= 2 * PAGE
    assert again.ids == first.ids
    h.check()
    h.driver.assert_idle()


def test_the_latest_text_is_kept_and_of_it_the_beginning() -> None:
    h, rng = Harness(pages=8), random.Random(2)
    old, new = h.random_ids(rng, 2 * PAGE + 1), h.random_ids(rng, 3 * PAGE + 1)
    h.answer(old, 5)
    h.answer(new, 5)
    cache = Cache(8)
    sleep(h, cache, 2)
    used = [page.page_index for page in h.generator.all_pages if page.kv_position > 0]
    assert len(used) == 2
    assert all(held == {0, *used} for held in cache.held()), "the others hold zeros"
    found = [h.answer(text, 5).finished for text in (new, old)]
    assert [end.cached_tokens // PAGE for end in found if end is not None] == [2, 0]
    h.check()


def test_nothing_is_kept_without_room() -> None:
    h = Harness(pages=4)
    prompt = h.random_ids(random.Random(3), PAGE + 9)
    h.answer(prompt, 5)
    cache = Cache(4)
    sleep(h, cache, 0)
    assert cache.held() == [{0}, {0}]
    end = h.answer(prompt, 5).finished
    assert end is not None
    assert end.cached_tokens == 0
    h.check()
