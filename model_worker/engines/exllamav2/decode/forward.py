"""Let the package's generator use captured steps and passes, unchanged."""

from typing import Any

import torch

from model_worker.engines.exllamav2.decode.graphs import DecodeGraphs
from model_worker.engines.exllamav2.decode.inputs import Row
from model_worker.engines.exllamav2.decode.prompts import PromptPasses
from protocol.process.worker_spec import PAGE_TOKENS


def use_graphs(model: Any, cache: Any, graphs: DecodeGraphs, prompts: PromptPasses | None) -> None:
    """Replace ``model.forward_chunk`` for decode steps and prompts that were captured. All other calls go to the
    package's own.

    model, cache  the package's; ``cache`` is the one for which the graphs were captured
    """
    original = model.forward_chunk

    def forward_chunk(
        input_ids: torch.Tensor, cache_: Any = None, attn_params: Any = None, preprocess_only: bool = False, **rest: Any
    ) -> dict[str, Any]:
        given = rest.pop("cache", cache_)

        def launched(ids: torch.Tensor, params: Any) -> dict[str, Any]:
            result: dict[str, Any] = original(
                ids, cache=given, attn_params=params, preprocess_only=preprocess_only, **rest
            )
            return result

        if given is not cache or attn_params is None or rest.get("return_last_state"):
            return launched(input_ids, attn_params)
        # A draft model's last pass of a step draws nothing either, and is as large as the others.
        if input_ids.shape[1] == graphs.queries and (not preprocess_only or graphs.behind is None):
            step = _rows(input_ids, attn_params)
            if graphs.fits(len(step), max(len(row.pages) for row in step)):
                logits = graphs.replay(step)
                return {} if preprocess_only else {"logits": logits}
        elif preprocess_only and prompts is not None and input_ids.shape[0] == 1:
            count = input_ids.shape[1]
            done = prompts.launched(count)
            if done:
                launched(input_ids[:, :done], _part(attn_params, 0, done))
            start, table = int(attn_params.cache_seqlens[0]), attn_params.block_index[0].cpu().numpy()
            done += prompts.read(input_ids[0, done:].tolist(), start + done, table)
            if done < count:
                launched(input_ids[:, done:], _part(attn_params, done, count - done))
            return {}
        return launched(input_ids, attn_params)

    model.forward_chunk = forward_chunk


def _part(params: Any, begin: int, tokens: int) -> Any:
    """Return the parameters of a pass over some of the tokens that ``params`` is made for.

    A draft model's pass over the same tokens may have moved the tensors of ``params`` to a GPU.
    """
    lengths = params.cache_seqlens.cpu() + begin
    return type(params)(1, params.block_index.cpu(), lengths, int(lengths[0]), params.page_size, q_len=tokens)


def _rows(input_ids: torch.Tensor, params: Any) -> list[Row]:
    lengths, tables = params.cache_seqlens.tolist(), params.block_index.numpy()
    queries = input_ids.shape[1]
    return [
        Row(tokens, length, table[: -(-(length + queries) // PAGE_TOKENS)])
        for tokens, length, table in zip(input_ids.tolist(), lengths, tables, strict=True)
    ]
