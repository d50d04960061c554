"""Step a transformers model by hand: many sequences in one forward pass, each at its own position."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from model_worker.engine import LoadError
from model_worker.engines import one_line
from model_worker.engines.embedded.slot_cache import SlotCache


class SlotModel:
    """A causal language model over a SlotCache. Call its methods under ``torch.inference_mode()``.

    model   an AutoModelForCausalLM in eval mode on ``device``
    rows    number of sequences at once
    length  the largest number of tokens of a sequence
    """

    def __init__(self, model: Any, device: torch.device, rows: int, length: int) -> None:
        self._model, self._device = model, device
        # Only the logits of the last position are needed, and in prefill mostly none. Not every architecture has this
        # parameter.
        self._keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        self.cache = SlotCache(rows, length)
        self._places = torch.arange(length + 1, device=device)
        self._masked = torch.finfo(model.dtype).min
        self._zero = torch.zeros((), dtype=model.dtype, device=device)
        self._hidden = torch.full((), self._masked, dtype=model.dtype, device=device)

    def prefill(
        self, rows: Sequence[int], ids: Sequence[Sequence[int]], starts: Sequence[int], *, logits: bool = False
    ) -> torch.Tensor:
        """Put prompt tokens into rows: ``ids[i]`` from position ``starts[i]`` on. Shorter prompts are padded.

        Return logits [rows, tokens of the longest, vocab], which are complete only if ``logits`` asks for them.
        """
        longest = max(map(len, ids))
        tokens = torch.zeros((len(ids), longest), dtype=torch.int64)
        for i, row in enumerate(ids):
            tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        first = torch.tensor(starts, device=self._device)
        positions = first[:, None] + self._places[:longest]
        for i, row in enumerate(ids):  # padding goes to the position that is never read
            positions[i, len(row) :] = self._places[-1]
        span = max(start + len(row) for start, row in zip(starts, ids, strict=True))
        # Only rows 0 to n-1 in order can be read without a copy.
        dense = list(rows) == list(range(len(rows)))
        return self._forward(tokens.to(self._device), list(rows), positions, span, dense=dense, logits=logits)

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Return logits [n, vocab] after one more token in each of the rows 0 to n-1, at the given positions."""
        placed = torch.tensor(positions, device=self._device)[:, None]
        ids = torch.tensor(tokens, device=self._device)[:, None]
        logits = self._forward(ids, range(len(tokens)), placed, max(positions) + 1, dense=True)
        return logits[:, -1]

    def _forward(
        self,
        ids: torch.Tensor,
        rows: Sequence[int],
        positions: torch.Tensor,
        span: int,
        *,
        dense: bool,
        logits: bool = False,
    ) -> torch.Tensor:
        index = self._places[: len(rows)] if dense else torch.tensor(rows, device=self._device)
        self.cache.select(index, positions, span, dense=dense)
        visible = self._places[:span] <= positions[:, :, None]
        # Use an additive mask: every layer would turn a boolean mask into an additive one.
        mask = torch.where(visible, self._zero, self._hidden)[:, None]
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            # The model's tables may not have the position of the padding.
            position_ids=positions.clamp(max=self._places.shape[0] - 2),
            past_key_values=self.cache,
            use_cache=True,
            **(dict.fromkeys(self._keep, 0) if logits else self._keep),  # 0 keeps all
        )
        computed: torch.Tensor = output.logits
        return computed

    @property
    def weight_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._model.parameters(), *self._model.buffers()))

    def sleep(self) -> None:
        """Keep the weights in host memory, and give all other memory back."""
        self.cache.drop()
        if self._device.type == "cuda":
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Undo ``sleep``. The cache holds zeros."""
        self._model.to(self._device)
        self.cache.restore()

    def check(self, name: str, vocab_size: int) -> None:
        """Compare logits with the model's own computation without a cache. Raises LoadError if they differ.

        This test works for every architecture. It finds an architecture that keeps state elsewhere, reads positions
        from its cache, or ignores the mask.
        """
        try:
            worst, scale = self._compare(vocab_size)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, NotImplementedError) as e:
            if isinstance(e, torch.OutOfMemoryError):
                raise
            raise LoadError(
                f"architecture {name} cannot be computed with a slot cache ({type(e).__name__}: {one_line(e)}): it is "
                "not supported by engine transformers"
            ) from e
        if not worst <= 1e-3 * scale:  # also for NaN
            raise LoadError(
                f"architecture {name} does not compute the same with a slot cache (off by {worst:.3g}): "
                "it is not supported by engine transformers"
            )

    def _compare(self, vocab_size: int) -> tuple[float, float]:
        """Return the largest difference from the model's own logits, and the size of those."""
        generator = torch.Generator().manual_seed(0)
        length = max(2, min(12, self._places.shape[0] - 1))
        ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
        own = self._model(input_ids=torch.tensor([ids], device=self._device), use_cache=False).logits[0]
        others = ids[::-1]
        rows = min(2, self.cache.rows)  # the two rows have different lengths, and are at different positions
        cut, short = length // 2, max(1, length // 4)
        self.prefill(range(rows), [ids[:cut], others[:short]][:rows], [0] * rows)
        self.prefill([0], [ids[cut : cut + 1]], [cut])
        worst = 0.0
        for step, at in enumerate(range(cut + 1, length)):
            tokens, positions = [ids[at], others[short + step]][:rows], [at, short + step][:rows]
            worst = max(worst, float((self.decode(tokens, positions)[0] - own[at]).abs().max()))
        return worst, max(1.0, float(own.abs().max()))
