"""Let the package's generator use captured steps, unchanged."""

from typing import Any

import torch

from model_worker.engines.exllamav2.decode.graphs import DecodeGraphs
from model_worker.engines.exllamav2.decode.inputs import Row
from protocol.process.worker_spec import PAGE_TOKENS


def use_graphs(model: Any, cache: Any, graphs: DecodeGraphs) -> None:
    """Replace ``model.forward_chunk`` for decode steps that were captured. All other calls go to the package's own.

    model, cache  the package's; ``cache`` is the one for which the graphs were captured
    """
    original = model.forward_chunk

    def forward_chunk(
        input_ids: torch.Tensor, cache_: Any = None, attn_params: Any = None, preprocess_only: bool = False, **rest: Any
    ) -> dict[str, Any]:
        given = rest.pop("cache", cache_)
        # A draft model's last pass of a step draws nothing either, and is as large as the others.
        captured = not preprocess_only or graphs.behind is None
        if given is cache and input_ids.shape[1] == graphs.queries and captured and attn_params is not None:
            step = _rows(input_ids, attn_params)
            if graphs.fits(len(step), max(len(row.pages) for row in step)):
                logits = graphs.replay(step)
                return {} if preprocess_only else {"logits": logits}
        result: dict[str, Any] = original(
            input_ids, cache=given, attn_params=attn_params, preprocess_only=preprocess_only, **rest
        )
        return result

    model.forward_chunk = forward_chunk


def _rows(input_ids: torch.Tensor, params: Any) -> list[Row]:
    lengths, tables = params.cache_seqlens.tolist(), params.block_index.numpy()
    queries = input_ids.shape[1]
    return [
        Row(tokens, length, table[: -(-(length + queries) // PAGE_TOKENS)])
        for tokens, length, table in zip(input_ids.tolist(), lengths, tables, strict=True)
    ]
