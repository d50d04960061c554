"""The pages of the cache that go to host memory with a model that sleeps, so that no prompt in them is computed again.

A page stays in the generator's page table while the model sleeps. Its keys and values are copied to host memory, and
back to the same page. The pages that find no room there are forgotten.
"""

from collections.abc import Sequence
from typing import Any

import torch

from protocol.process.worker_spec import PAGE_TOKENS


class KeptPages:
    """Copies of pages of some caches, which have the same page table. ``most`` is a number of bytes."""

    def __init__(self, caches: Sequence[Any], most: int) -> None:
        self._tensors = [_paged(tensor) for cache in caches for tensor in cache.all_tensors()]
        self._pages = min(most // sum(tensor.shape[1] for tensor in self._tensors), self._tensors[0].shape[0])
        self._kept: list[int] = []
        self._copies: list[torch.Tensor] = []

    @property
    def most_bytes(self) -> int:
        """The most host memory of the copies."""
        return self._pages * sum(tensor.shape[1] for tensor in self._tensors)

    @torch.inference_mode()
    def save(self, pages: Sequence[Any]) -> None:
        """Copy the latest pages that hold keys and values, as many as there is room for, and clear the others. No page
        is in use."""
        latest = _latest_first(pages)
        kept = latest[: self._pages]
        for page in latest[self._pages :]:
            page.clear()
        count = len(kept)
        self._kept = sorted(page.page_index for page in kept)
        self._copies = []
        for tensor in self._tensors if count else ():
            index = torch.tensor(self._kept, device=tensor.device)
            copy = torch.empty((count, tensor.shape[1]), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            copy.copy_(tensor.index_select(0, index))
            self._copies.append(copy)

    @torch.inference_mode()
    def restore(self) -> None:
        """Fill the caches with zeros, and copy the pages back."""
        for tensor in self._tensors:
            tensor.zero_()  # what was never written may be no number, which attention's mask would not hide
        for tensor, copy in zip(self._tensors, self._copies, strict=bool(self._copies)):
            tensor.index_copy_(0, torch.tensor(self._kept, device=tensor.device), copy.to(tensor.device))
        self._kept, self._copies = [], []


def _paged(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the cache [1, tokens, ...] as bytes [pages, bytes of a page]."""
    return tensor.view(torch.uint8).view(tensor.shape[1] // PAGE_TOKENS, -1)


def _latest_first(pages: Sequence[Any]) -> list[Any]:
    """Return the pages that hold keys and values: the text that was used last comes first, and of a text its beginning.

    The generator numbers pages in the order of their use (``access_serial``), those of one text one by one.
    """
    written = {page.phash: page for page in pages if page.kv_position > 0}
    ordered: dict[Any, Any] = {}
    for page in sorted(written.values(), key=lambda page: -page.access_serial):
        text: list[Any] = []
        at: Any = page
        while at is not None and at.phash not in ordered:
            text.append(at)
            at = written.get(at.prev_hash)
        ordered |= {part.phash: part for part in reversed(text)}
    return list(ordered.values())
