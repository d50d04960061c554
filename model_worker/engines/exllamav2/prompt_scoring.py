"""Compute the log-probabilities of a prompt's tokens while the prompt is read. Does not import exllamav2.

The package's pass over a chunk ends with the last keys and values. Here the pass goes on to the last hidden states. The
head makes their logits, for some places at a time, and only the likeliest of each place are kept.
"""

from collections import deque
from typing import Any

import torch

from model_worker.engine import PromptLogprobs
from model_worker.engines.exllamav2.decode.graphs import finish
from model_worker.engines.exllamav2.options import SCORED_LOGITS
from model_worker.engines.prompt_scores import PromptPieces, score


class _OnTheWay:
    """Tensors that a GPU copies to the host, behind all work that was queued there before."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._event: Any = None
        self.tensors = tensors
        if tensors[0].is_cuda:
            self.tensors = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
            for target, source in zip(self.tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def has_come(self, *, wait: bool) -> bool:
        if self._event is None:
            return True
        if wait:
            self._event.synchronize()
        return bool(self._event.query())


class PromptScorer:
    """The log-probabilities of one prompt.

    vocab  ids below this are in the vocabulary
    place  the first place, counted in tokens, whose logits are wanted
    done   whether ``take`` has returned all pieces
    """

    def __init__(self, pieces: PromptPieces, vocab: int) -> None:
        self._pieces, self._vocab = pieces, vocab
        self.place = pieces.next - 1
        self._last = len(pieces.prompt) - 1
        self._on_the_way: deque[_OnTheWay] = deque()
        self._alone = pieces.alone()

    def read(self, model: Any, ids: torch.Tensor, start: int, cache: Any, params: Any, loras: Any) -> None:
        """Queue a pass over ids [1, tokens], the prompt's tokens from ``start`` on, and their log-probabilities.

        model, cache, params, loras  the package's
        """
        states = model.forward_chunk(
            input_ids=ids, cache=cache, attn_params=params, loras=loras, last_id_only=True, return_last_state=True
        )["last_state"]
        places = self._pieces.wanted(start, start + ids.shape[1])
        tokens = self._pieces.behind(places)
        rows = max(1, SCORED_LOGITS // model.modules[-1].out_features)
        scored = []
        for begin in range(0, len(tokens), rows):
            at = places.start - start + begin
            some = tokens[begin : begin + rows]
            logits = _logits(model, states[:, at : at + len(some)].contiguous(), loras)
            scored.append(score(logits[0, :, : self._vocab], some, self._pieces.top))
        if scored:
            self._on_the_way.append(_OnTheWay(tuple(torch.cat(parts) for parts in zip(*scored, strict=True))))

    def take(self, *, wait: bool) -> list[PromptLogprobs]:
        """Return the pieces that have come. ``wait``: wait for all that was queued."""
        found, self._alone = self._alone, []
        while self._on_the_way and self._on_the_way[0].has_come(wait=wait):
            ids, logprobs = self._on_the_way.popleft().tensors
            found += self._pieces.add(ids.numpy(), logprobs.numpy())
        return found

    @property
    def done(self) -> bool:
        return not self._alone and self._pieces.next > self._last


def _logits(model: Any, states: torch.Tensor, loras: Any) -> torch.Tensor:
    """Return the logits fp16 [1, places, padded vocabulary] of hidden states, which the last layer made."""
    for module in model.modules[model.head_layer_idx - 1 :]:  # the norm and the head
        if module.device_idx is not None and module.device_idx >= 0 and states.is_cuda:
            states = states.to(f"cuda:{module.device_idx}", non_blocking=True)
        states = module.forward(states, cache=None, attn_params=None, past_len=0, loras=loras)
    finish(model, states)
    return states
