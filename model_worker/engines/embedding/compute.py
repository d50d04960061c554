"""Compute vectors and scores with models of the transformers library: one batch of token ids, padded on the right."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional

from model_worker.engine import LoadError, ProgressCallback
from model_worker.engines.embedded.load import load_weights
from model_worker.engines.embedding.directory import Dense, Recipe
from model_worker.engines.embedding.texts import Row
from model_worker.engines.model_dir import ModelDir

_CLASSES: dict[str, Any] = {
    "pooled": transformers.AutoModel,
    "classifier": transformers.AutoModelForSequenceClassification,
    "yes_no": transformers.AutoModelForCausalLM,
}


class EmbeddingModel:
    """A loaded model, with all that stands between its last layer and the result.

    padding  id of the token that fills rows up
    answers  ids of "no" and "yes", for the form "yes_no"

    Raises LoadError.
    """

    def __init__(
        self,
        directory: ModelDir,
        recipe: Recipe,
        device: torch.device,
        progress: ProgressCallback,
        padding: int,
        answers: tuple[int, int] | None = None,
    ) -> None:
        self._recipe, self._device, self._padding = recipe, device, padding
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        library = _CLASSES[recipe.form]
        self._model = load_weights(directory, device, progress, library, dtype, unused=("pooler.",))
        if recipe.form == "classifier":
            self._model.config.pad_token_id = padding  # a causal classifier looks for the last token before it
        taken = inspect.signature(self._model.forward).parameters
        self._typed = "token_type_ids" in taken and getattr(self._model.config, "type_vocab_size", 0) > 1
        self._further = {"use_cache": False} if "use_cache" in taken else {}
        self._layers: list[Callable[[torch.Tensor], torch.Tensor]] = [
            _normalised if layer == "normalize" else _dense(layer, device) for layer in recipe.layers
        ]
        self._judges: torch.Tensor | None = None
        if answers is not None:
            self._judges = self._model.get_output_embeddings().weight[list(answers)]

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._model.parameters())

    def move(self, device: torch.device) -> None:
        """Move the weights to a device. Only those of Dense layers stay, which are small."""
        self._model.to(device)
        if self._judges is not None:
            self._judges = self._judges.to(device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def compute(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return float32 [rows, size] in the memory of the host."""
        longest = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), longest), self._padding, dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        kinds = torch.zeros((len(rows), longest), dtype=torch.long) if self._typed else None
        for number, row in enumerate(rows):
            ids[number, : len(row.ids)] = torch.tensor(row.ids)
            mask[number, : len(row.ids)] = 1
            if kinds is not None and row.kinds:
                kinds[number, : len(row.ids)] = torch.tensor(row.kinds)
        mask = mask.to(self._device)
        inputs = {"input_ids": ids.to(self._device), "attention_mask": mask, **self._further}
        if kinds is not None:
            inputs["token_type_ids"] = kinds.to(self._device)
        if self._recipe.form == "classifier":
            return _ACTIVATIONS[self._recipe.activation](self._model(**inputs).logits[:, :1].float()).cpu()
        if self._judges is not None:
            hidden = self._model.base_model(**inputs).last_hidden_state
            no, yes = (_last(hidden, mask) @ self._judges.T).float().unbind(1)
            return torch.sigmoid(yes - no)[:, None].cpu()
        hidden = self._model(**inputs).last_hidden_state
        kept = mask
        if not self._recipe.keeps_prompt and any(row.prompt for row in rows):
            begins = torch.tensor([row.prompt for row in rows], device=self._device)[:, None]
            kept = mask * (torch.arange(longest, device=self._device)[None] >= begins)
        vectors = torch.cat([_POOLINGS[name](hidden, kept) for name in self._recipe.pooling], dim=1)
        for layer in self._layers:
            vectors = layer(vectors)
        return vectors.cpu()


def _dense(layer: Dense, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    try:
        weights = {name: tensor.to(device, torch.float32) for name, tensor in load_file(layer.file).items()}
    except Exception as e:  # the library raises its own errors
        raise LoadError(f"{layer.file} cannot be read: {type(e).__name__}") from None
    weight, bias = weights["linear.weight"], weights["linear.bias"] if layer.bias else None
    return lambda vectors: _ACTIVATIONS[layer.activation](functional.linear(vectors, weight, bias))


def _normalised(vectors: torch.Tensor) -> torch.Tensor:
    return functional.normalize(vectors, p=2, dim=1)


def shortened(vectors: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Return the first numbers of vectors, with the length 1 again."""
    return _normalised(vectors[:, :dimensions])


# How the vectors of a text's tokens become one, in float32. ``mask`` is 1 for the tokens that count. They are
# consecutive, since rows are padded on the right and a prompt stands at the beginning.


def _first(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    places = (mask.cumsum(dim=1) == 0).sum(dim=1).clamp(max=mask.shape[1] - 1)  # argmax need not give the first
    return hidden[torch.arange(len(hidden), device=hidden.device), places].float()


def _last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    places = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), places]


def _sums(hidden: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = weights.float()[..., None]
    return (hidden.float() * weights).sum(dim=1), weights.sum(dim=1).clamp(min=1e-9)


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    total, count = _sums(hidden, mask)
    return total / count


def _mean_sqrt_len(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    total, count = _sums(hidden, mask)
    return total / count.sqrt()


def _weighted_mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    total, weight = _sums(hidden, mask * torch.arange(1, mask.shape[1] + 1, device=mask.device))
    return total / weight


def _most(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.float().masked_fill(mask[..., None] == 0, float("-inf")).amax(dim=1)


_POOLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": _first,
    "mean": _mean,
    "max": _most,
    "mean_sqrt_len": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
    "lasttoken": lambda hidden, mask: _last(hidden, mask).float(),
}
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": functional.gelu,
    "SiLU": functional.silu,
    "Sigmoid": torch.sigmoid,
}
