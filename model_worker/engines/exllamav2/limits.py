"""Refuse, with a clear error, shapes and sizes that ExLlamaV2's kernels compute wrongly. Does not import torch.

Each refusal names the kernel in the package's source (exllamav2_ext/cuda) that is the reason.
"""

from model_worker.engine import LoadError
from model_worker.engines.exllamav2.options import Sizes
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.model_shape import ModelShape, read_shape
from protocol.process.worker_spec import PAGE_TOKENS

INDICES = 1 << 31
"""Kernels count the elements of a matrix with 32-bit integers."""
GRID_ROWS = 65535
"""The most rows that CUDA accepts in the second dimension of a launch. head_norm.cu has one row there for each
token."""
WIDEST_NORM = 32768
"""rms_norm.cu and layer_norm.cu have no kernel for wider vectors, and launch none."""


def check_limits(directory: ModelDir, sizes: Sizes, cache_mode: str, prefix: str = "") -> None:
    """Raise LoadError for a model that the package computes wrongly, always or with these sizes.

    prefix  prefix of the cache's option in the error: "draft_" for a draft model
    """
    shape = read_shape(directory)
    _check_widths(directory, shape)
    _check_routing(directory)
    _check_sizes(directory, shape, sizes, cache_mode, prefix)


def _check_widths(directory: ModelDir, shape: ModelShape) -> None:
    where = directory.path
    if shape.hidden > WIDEST_NORM:
        raise LoadError(f"{where}: hidden_size is {shape.hidden}: ExLlamaV2 has norms of up to {WIDEST_NORM} only")
    inner = -(-shape.intermediate // 32) * 32  # the package pads the width
    if directory.is_quantized and inner % 64:
        # q_mlp.cu: gridDim.x = DIVIDE(width, 32) / 2 blocks of 64 columns activate, and the division rounds down.
        raise LoadError(
            f"{where}: the MLP's size is {shape.intermediate}: with quantized weights ExLlamaV2 does not activate the "
            "last 32 columns where the size is no multiple of 64; use 16-bit weights"
        )
    if any(name.endswith(".q_norm.weight") for name in directory.tensors) and (
        shape.head_dim % 64 or shape.head_dim > 256
    ):
        # head_norm.cu: a warp sums 64 elements and exchanges them among all of its 32 threads. A head that does not
        # fill its last warp exchanges with threads that do not exist, and CUDA leaves the result undefined (an H200
        # computed heads of 32 and 96 correctly). A head of more than 256 elements overflows the memory for 8 warps.
        raise LoadError(
            f"{where}: heads of {shape.head_dim} have norms of their own: ExLlamaV2's kernel is made for heads of 64, "
            "128, 192 and 256 elements only"
        )


def _check_routing(directory: ModelDir) -> None:
    """Raise LoadError for a mixture that does not scale its experts' weights to a sum of 1, as the package always does.

    Source: moe_mlp.py, ``forward_torch``, and cuda/q_mlp_softmax.cuh. transformers takes a missing norm_topk_prob for
    false.
    """
    key, given = "", None
    if directory.architecture == "Qwen3MoeForCausalLM":
        key, given = "norm_topk_prob", directory.config.get("norm_topk_prob", False)
    elif directory.architecture == "DbrxForCausalLM":
        experts = directory.config.get("ffn_config")
        key = "ffn_config.moe_normalize_expert_weights"
        given = experts.get("moe_normalize_expert_weights", 1) if isinstance(experts, dict) else 1
    if key and given != 1:  # 1 and true are equal
        raise LoadError(
            f"{directory.path}/config.json: {key} is {given!r}: ExLlamaV2 always scales the weights of a token's "
            "experts to a sum of 1"
        )


def _check_sizes(directory: ModelDir, shape: ModelShape, sizes: Sizes, cache_mode: str, prefix: str) -> None:
    counted = "ExLlamaV2's kernels count to 2**31 elements"
    widest = max(shape.hidden, shape.intermediate, shape.heads * shape.head_dim)
    if (most := min(GRID_ROWS, (INDICES - 1) // widest)) < sizes.chunk_size:
        raise LoadError(
            f"chunk_size is {sizes.chunk_size}: ExLlamaV2 computes at most {most} tokens of {directory.path} at a time "
            f"rightly: set it to at most {most // PAGE_TOKENS * PAGE_TOKENS}",
            key="chunk_size",
        )
    logits = -(-shape.vocab // 32) * 32
    if directory.is_quantized and sizes.rows * logits >= INDICES:
        raise LoadError(
            f"max_batch_size comes to {sizes.rows} tokens a step, each of {logits} logits of {directory.path}: "
            f"{counted}: lower it, or draft_tokens",
            key="max_batch_size",
        )
    keys = shape.kv_heads * shape.head_dim
    if cache_mode != "FP16" and sizes.cache_size * keys >= INDICES:
        most = (INDICES - 1) // keys // PAGE_TOKENS * PAGE_TOKENS
        raise LoadError(
            f"cache_size is {sizes.cache_size}, each token with {keys} elements of keys of {directory.path}: with "
            f"{prefix}cache_mode {cache_mode} {counted}: set it to at most {most}, or "
            "use FP16",
            key="cache_size",
        )
