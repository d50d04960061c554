"""Refuse, with a clear error, models that ExLlamaV2 would refuse with an assertion or silently load wrongly.

This module does not import torch.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model_worker.engine import LoadError
from model_worker.engines.exllamav2.lora import check_adapter
from model_worker.engines.exllamav2.meaning import check_meaning, check_reach, has_window, open_directory
from model_worker.engines.exllamav2.options import ExLlamaV2Options, Sizes, read_options, sizes_of
from model_worker.engines.model_dir import ModelDir, ModelShape, check_counts, check_layers, read_shape
from model_worker.engines.opening import open_tokenizer, open_vocabulary
from model_worker.engines.vetting import REMEDY, Faults, refusal
from protocol.process.worker_spec import PAGE_TOKENS, EngineSpec

if TYPE_CHECKING:
    from model_worker.engines.tokenizer import Tokenizer


# Refuse, with a clear error, shapes and sizes that ExLlamaV2's kernels compute wrongly. Does not import torch.
#
# Each refusal names the kernel in the package's source (exllamav2_ext/cuda) that is the reason.


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


# ExLlamaV2 loads an architecture that it does not know as Llama, after a line on stdout.
ARCHITECTURES = frozenset(
    {
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        "DbrxForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "GemmoeForCausalLM",
        "Glm4ForCausalLM",
        "GraniteForCausalLM",
        "IndexForCausalLM",
        "InternLM2ForCausalLM",
        "LlamaForCausalLM",
        "MiniCPMForCausalLM",
        "MistralForCausalLM",
        "Mistral3ForConditionalGeneration",
        "MixtralForCausalLM",
        "OrionForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Starcoder2ForCausalLM",
        "YiForCausalLM",
    }
)
PARALLEL = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
"""Architectures that tensor parallelism computes correctly. The package accepts more, but leaves out the norms of heads
(Qwen3) and partial rotary embeddings (Glm4), and does not split experts (Qwen3Moe)."""
_DTYPES = ("F16", "BF16", "F32", "I16", "I32")


@dataclass(frozen=True)
class CheckedExLlamaV2Model:
    """A model that passed every check.

    tokenizer  None if the packages that read it are not installed
    draft      None without a draft model
    """

    options: ExLlamaV2Options
    directory: ModelDir
    tokenizer: "Tokenizer | None"
    sizes: Sizes
    draft: ModelDir | None


def check(spec: EngineSpec) -> CheckedExLlamaV2Model:
    """Read the model's directory and check all that can be known before a load, except the number of GPUs.

    Raises LoadError with every fault that is found.
    """
    faults = Faults(spec.model_dir)
    options = faults.of(lambda: read_options(spec))
    directory = faults.of(lambda: open_directory(spec.model_dir, spec.model_roots))
    tokenizer = sizes = draft = None
    if directory is not None:
        directory.chat_template = None if options is None else options.chat_template
        tokenizer = faults.of(lambda: open_tokenizer(directory))
        sound = faults.passes(lambda: check_directory(directory))
        if options is not None:
            sizes = faults.of(lambda: sizes_of(spec, options, directory))
        if options is not None and sound:
            faults.of(lambda: check_layers(directory))
            faults.of(lambda: check_cache(directory, options.cache_mode))
            for number, adapter in enumerate(options.loras):
                faults.of(lambda adapter=adapter, number=number: check_adapter(adapter, directory, number))  # type: ignore[misc]
            if sizes is not None:
                faults.of(lambda: check_reach(directory, sizes.context))
                faults.of(lambda: check_limits(directory, sizes, options.cache_mode))
                draft = faults.of(lambda: open_draft(options, directory, sizes))
    faults.raise_found()
    assert options is not None
    assert directory is not None
    assert sizes is not None
    return CheckedExLlamaV2Model(options, directory, tokenizer, sizes, draft)


def check_directory(directory: ModelDir) -> None:
    """Raise LoadError for a model that the package cannot load, or would load wrongly."""
    name = directory.architecture
    if name not in ARCHITECTURES:
        why = "ExLlamaV2 0.3.2 does not know it, and would compute it as Llama"
        if name == "LlavaForConditionalGeneration":
            why = "of models that read images, the text of Gemma 3, Mistral 3, Qwen2-VL and Qwen2.5-VL is served only"
        raise LoadError(f"architecture {name} is not served by engine exllamav2: {why}")
    if directory.quantization not in (None, "exl2", "gptq"):
        raise LoadError(refusal(directory.path, directory.quantization))
    check_counts(directory)
    if directory.quantization == "gptq":
        _check_gptq(directory)
    for tensor_name, tensor in directory.tensors.items():
        if tensor.dtype not in _DTYPES:
            raise LoadError(
                f"{directory.path}: {tensor_name} has dtype {tensor.dtype}: ExLlamaV2 loads {', '.join(_DTYPES)}; "
                "use weights in 16 bits, or EXL2"
            )
    check_meaning(directory)


def _check_gptq(directory: ModelDir) -> None:
    declared = directory.config.get("quantization_config")
    declared = declared if isinstance(declared, dict) else directory.quantize_config
    bits, form, size = (declared.get(key) for key in ("bits", "checkpoint_format", "group_size"))
    if bits not in (None, 4):
        raise LoadError(
            f"{directory.path} is quantized by GPTQ to {bits} bits: ExLlamaV2 loads GPTQ with 4 bits only; {REMEDY}"
        )
    if form not in (None, "gptq", "gptq_v2"):
        raise LoadError(
            f"{directory.path} holds GPTQ weights in the format {form}: ExLlamaV2 loads gptq and gptq_v2 only"
        )
    for name, scales in directory.tensors.items():
        packed = directory.tensors.get(name.removesuffix("scales") + "qweight") if name.endswith(".scales") else None
        if packed is None or len(scales.shape) != 2 or scales.shape[0] <= 1:  # one group has all rows
            continue
        # The package does not read the group size. It takes the smallest power of two for which the groups hold all
        # rows, and its kernels step by 32.
        rows, groups = packed.shape[0] * 8, scales.shape[0]
        guess = 1 << max(0, math.ceil(rows / groups) - 1).bit_length()
        if guess < 32 or guess * (groups - 1) >= rows or (isinstance(size, int) and size > 0 and size != guess):
            raise LoadError(
                f"{directory.path}: {name} has {groups} groups for {rows} rows"
                + (f" (group_size {size})" if size else "")
                + ": ExLlamaV2 computes groups of 32, 64, 128, ... rows, or one, rightly, and no others"
            )


def check_cache(directory: ModelDir, mode: str, key: str = "cache_mode") -> None:
    """Raise LoadError for heads that a quantized cache cannot hold, because it scales 32 elements at a time."""
    head_dim = read_shape(directory).head_dim
    if mode != "FP16" and head_dim % 32:
        message = f"{key} {mode} needs heads of a multiple of 32 elements; {directory.path} has {head_dim}: set FP16"
        raise LoadError(message, key=key)


def open_draft(options: ExLlamaV2Options, directory: ModelDir, sizes: Sizes) -> ModelDir | None:
    """Return the draft model's directory, or None without one. Raises LoadError for a draft model that cannot be
    used."""
    if options.draft_model is None:
        return None
    try:
        draft = open_directory(options.draft_model, map(str, directory.bounds.roots))
        check_directory(draft)
        mode = options.draft_cache_mode or options.cache_mode
        check_cache(draft, mode, "draft_cache_mode")
        check_reach(draft, sizes.context)
        check_limits(draft, sizes, mode, "draft_")
        stretched = options.draft_rope_scale is not None or options.draft_rope_alpha is not None
        own = draft.context(None)
        if own < sizes.context and not stretched:
            raise LoadError(
                f"the context of {draft.path} is {own}, less than the model's {sizes.context}: set max_seq_len to at "
                f"most {own}, or draft_rope_alpha"
            )
        ours, theirs = open_vocabulary(directory), open_vocabulary(draft)
        if ours is not None and theirs is not None and ours != theirs:
            odd = min(set(ours.items()) ^ set(theirs.items()), key=lambda item: item[1])
            raise LoadError(
                f"{draft.path} has another vocabulary: {len(theirs)} tokens, the model has {len(ours)}, and they "
                f"differ from id {odd[1]} on"
            )
        rows, draft_rows = read_shape(directory).vocab, read_shape(draft).vocab
        if draft_rows > rows:
            raise LoadError(f"{draft.path} can draw {draft_rows} ids, the model knows {rows} only: use another one")
    except LoadError as e:
        raise LoadError(f"draft_model: {e}", key=e.key or "draft_model") from None
    return draft


def check_parallel(options: ExLlamaV2Options, directory: ModelDir, sizes: Sizes, gpus: int) -> None:
    """Raise LoadError for splits over ``gpus`` GPUs that the package computes wrongly, or not at all."""
    for key, values in (("gpu_split", options.gpu_split), ("autosplit_reserve", options.autosplit_reserve)):
        if values is not None and len(values) != gpus:
            message = f"{key} has {len(values)} values, the worker has {gpus} GPUs: give one for each"
            raise LoadError(message, key=key)
    if not options.tensor_parallel:
        return

    def no(why: str) -> LoadError:
        message = f"tensor_parallel: {why}; without it, layers are split among the GPUs"
        return LoadError(message, key="tensor_parallel")

    if gpus < 2:
        raise no("the worker has one GPU")
    if directory.architecture not in PARALLEL:
        raise no(f"architecture {directory.architecture} is not computed rightly, only {', '.join(PARALLEL)} are")
    if directory.quantization != "exl2" or "lm_head.q_weight" not in directory.tensors:
        raise no("only EXL2 weights with a quantized head can be split")
    if options.loras:
        raise no("lora is left out by it")
    shape = read_shape(directory)
    if has_window(directory, sizes.context):
        raise no(f"the sliding window of {directory.text_config['sliding_window']} tokens is left out by it")
    if shape.heads * shape.head_dim != shape.hidden:
        raise no(f"{shape.heads} heads of {shape.head_dim} do not make up the hidden size {shape.hidden}")
    if shape.kv_heads < gpus:
        raise no(f"{shape.kv_heads} heads of keys cannot be split over {gpus} GPUs")
    if shape.intermediate % 128 or shape.rotary_dim != shape.head_dim:
        raise no("the MLP's size is no multiple of 128, or only a part of each head is rotated")


# Why a model's decode step cannot be captured.


MIXTURE_ROWS = 4
"""The most rows for which the package computes a mixture of experts without the host (moe_mlp.py, forward)."""
MIXTURE = f"a mixture of experts is routed by the host for more than {MIXTURE_ROWS} rows"
FUSED_MIXTURES = 4, 8, 16
"""Numbers of experts whose routing stays on the GPU."""


def obstacle_before_loading(options: ExLlamaV2Options, attention: str) -> str | None:
    """Return why no step can be captured, as far as that is known before the model is loaded; else None.

    attention  the way in which decoding computes attention, by name
    """
    if not options.graphs:
        return "graphs is false"
    if options.tensor_parallel:
        return "tensor_parallel: the GPUs of a layer wait for each other on the host"
    if "Triton" not in attention:
        return f"attention is computed by {attention}, whose launches depend on the lengths"
    return None


def obstacle(model: Any, loras: Any) -> str | None:
    """Return why no step of a loaded model can be captured; else None. ``model`` and ``loras`` are the package's."""
    embedding = getattr(model.modules[0], "embedding", None)
    if embedding is None or embedding.weight.is_cuda or embedding.weight.element_size() != 2:
        return "its embedding is not a table of 16-bit numbers in host memory"
    if any(type(module).__name__ == "ExLlamaV2PosEmbedding" for module in model.modules):
        return "its positions are embedded by the host"
    if loras and loras[0].embed_tokens is not None:
        return "its adapter replaces the embedding"
    experts = {module.num_experts for module in model.modules if hasattr(module, "num_experts")}
    if experts and (not experts <= set(FUSED_MIXTURES) or loras):
        return f"its mixture of {max(experts)} experts is routed by the host"
    return None


def most_rows(model: Any, rows: int, queries: int) -> int:
    """Return the most rows of ``queries`` tokens that can be captured: ``rows``, or fewer for a mixture of experts."""
    if any(hasattr(module, "num_experts") for module in model.modules):
        return min(rows, MIXTURE_ROWS // queries)
    return rows
