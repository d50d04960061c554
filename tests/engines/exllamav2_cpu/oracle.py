"""A model that reads its whole input from its paged cache. Each token depends on all tokens before it.

The cache holds token ids and positions instead of keys and values. ``forward_chunk`` writes the given ids into the
pages, reads back the whole sequence, and makes the logits from it. So a page that is stale, not written yet or from
another sequence changes the answer, and a wrong position raises at once. ``expected`` computes the right answer to a
prompt, from the prompt alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

PAGE = 256
_MULTIPLIER = 6364136223846793005
_POWERS = np.cumprod(np.full(1 << 16, _MULTIPLIER, np.uint64))[::-1]


def digest(ids: np.ndarray[Any, Any]) -> int:
    """Return a number of 60 bits that depends on every id and on its place."""
    products = (ids.astype(np.uint64) + np.uint64(1)) * _POWERS[len(_POWERS) - len(ids) :]
    return int(products.sum()) * _MULTIPLIER >> 3 & (1 << 60) - 1


class OracleLogits:
    """A function from a prefix to logits [vocab]. The logit of the likeliest token leads by about 3.

    eos_id      the likeliest token after one of ``eos_every`` prefixes, and after no other
    habit       share of the prefixes (0 to 1) at which the likeliest token depends on the last token alone, so that
                speculation can guess it
    """

    def __init__(self, vocab: int, *, eos_id: int = 2, eos_every: int = 0, habit: float = 0.5) -> None:
        self.vocab, self.eos_id, self.eos_every, self.habit = vocab, eos_id, eos_every, habit
        # all values differ, so that greedy answers have no ties
        self._noise = np.random.default_rng(0).permutation(np.linspace(-2.5, 2.5, 1 << 16, dtype=np.float32))
        self._noise = np.concatenate([self._noise, self._noise[:vocab]])

    def best(self, ids: np.ndarray[Any, Any]) -> int:
        value = digest(ids)
        if self.eos_every and value >> 40 & 0xFFFF < 0x10000 // self.eos_every:
            return self.eos_id
        if (value >> 20 & 0xFFFF) / 0x10000 < self.habit:
            return self._ordinary(int(ids[-1]) * 7 + 3)
        return self._ordinary(value >> 8)

    def _ordinary(self, number: int) -> int:
        """Return any id except eos_id."""
        token = number % self.vocab
        return token if token != self.eos_id else (token + 1) % self.vocab

    def __call__(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        start = digest(ids) & 0xFFFF
        logits: np.ndarray[Any, Any] = self._noise[start : start + self.vocab].copy()
        logits[self.best(ids)] = 5.5
        return logits

    def expected(self, prompt: Sequence[int], size: int, *, ends: Sequence[int] = ()) -> list[int]:
        """Return the greedy answer: up to ``size`` tokens, or up to and including the first of ``ends``."""
        ids = np.zeros(len(prompt) + size, np.int64)
        ids[: len(prompt)] = prompt
        for n in range(len(prompt), len(ids)):
            ids[n] = self.best(ids[:n])
            if ids[n] in ends:
                return ids[len(prompt) : n + 1].tolist()
        return ids[len(prompt) :].tolist()


class _Passes:
    """The norm and the head, in whose place the oracle's hidden states are logits already."""

    device_idx: int | None = None
    padding = 0

    def __init__(self, size: int) -> None:
        self.out_features = size

    def forward(self, states: torch.Tensor, **_: Any) -> torch.Tensor:
        return states


class OracleModel:
    """The methods of a model that the generator calls. ``config``: the package's, of a demo model with other sizes."""

    def __init__(self, config: Any, logits: OracleLogits) -> None:
        self.config, self.logits = config, logits
        self.cache_map = {0: "cpu"}
        self.forwards: list[tuple[int, int, bool]] = []
        """(rows, tokens of each row, whether it was prefill) of each call."""
        self.fail_at: int | None = None
        """Number of the call that raises, from 0."""
        self.modules = [_Passes(-(-config.vocab_size // 32) * 32) for _ in range(2)]
        self.head_layer_idx, self.tp_context = 1, None

    def forward_chunk(
        self, input_ids: torch.Tensor, cache: Any, attn_params: Any, preprocess_only: bool = False, **_: Any
    ) -> dict[str, torch.Tensor]:
        rows, size = input_ids.shape
        if self.fail_at == len(self.forwards):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.forwards.append((rows, size, preprocess_only))
        padded = -(-self.config.vocab_size // 32) * 32
        out = torch.full((rows, size, padded), -65504.0)
        tokens, positions = cache.key_states[0].view(-1).numpy(), cache.value_states[0].view(-1).numpy()
        for row in range(rows):
            past = int(attn_params.cache_seqlens[row])
            end = past + size
            assert end <= self.config.max_seq_len, f"position {end - 1} is beyond the tables of positions"
            pages = attn_params.block_index[row, : -(-end // PAGE)].numpy().astype(np.int64)
            assert len(set(pages.tolist())) == len(pages), "a page stands twice in one sequence"
            slots = (pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:end]
            tokens[slots[past:]] = input_ids[row].numpy()
            positions[slots[past:]] = np.arange(past, end)
            read = tokens[slots]
            wrong = np.flatnonzero(positions[slots] != np.arange(end))
            assert not wrong.size, f"position {wrong[0]} of a sequence holds the keys of another position"
            if not preprocess_only:
                for at in range(size):
                    out[row, at, : self.logits.vocab] = torch.from_numpy(self.logits(read[: past + at + 1]))
        return {} if preprocess_only else {"logits": out, "last_state": out}


def make_cache(core: Any, model: OracleModel, size: int) -> Any:
    """Return a cache of the package's own class with one layer of int64: ids as keys, positions as values."""

    class OracleCache(core.ExLlamaV2CacheBase):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(model, 1, size, torch.int64, 1, 1, False, num_key_value_heads=1)
            self.num_hidden_layers, self.head_dim = 1, 1
            self.shape_wk = self.shape_wv = (1, size, 1, 1)
            self.create_state_tensors(None)
            for tensor in self.all_tensors():
                tensor.fill_(-1)

        def all_tensors(self) -> list[torch.Tensor]:
            return [*self.key_states, *self.value_states]

    return OracleCache()
