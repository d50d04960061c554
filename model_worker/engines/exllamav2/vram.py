"""Estimate the GPU memory that a model will take under ExLlamaV2, before any weight is read. Does not import torch.

``estimate(spec)`` reads config.json and the headers of the safetensors files, as ExLlamaV2 0.3.2 would, and adds up

    weights    each tensor as the package keeps it: fp16 unless quantized; the embedding stays in the host's memory
    cache      keys and values of all pages; quantized modes add one layer in fp16 to compute with
    draft      weights and cache of the draft model
    workspace  everything else: the package's scratch memory, tables of positions, activations of a full chunk, logits,
               cuBLAS, attention

The estimate is the memory that NVML reports for the process after a full chunk and a full batch, minus the memory of a
process that has only created a CUDA context. (Measure the latter once on a machine with torch.zeros(1, device="cuda"):
612 MiB on an H200 with torch 2.11.) The allocator's segments are expandable, as ``exllamav2.load`` sets them.

Sources: model.py, linear.py, attn.py, mlp.py, moe_mlp.py, cache.py, device.py of the package (``scratch_space_fixed``
and ``create_state_tensors``), and the rounding of PyTorch's allocator.
"""

from dataclasses import dataclass

from model_worker.engine import LoadError
from model_worker.engines.exllamav2.check import check
from model_worker.engines.exllamav2.decode.buckets import (
    PASSES,
    most_captured,
    page_sizes,
    reads_in_place,
    row_sizes,
)
from model_worker.engines.exllamav2.gpu_draws.sizes import BINS, MOST
from model_worker.engines.exllamav2.lora import adapter_bytes, check_adapter
from model_worker.engines.exllamav2.options import SCORED_LOGITS, ExLlamaV2Options, Sizes
from model_worker.engines.exllamav2.products.layout import MOST_ROWS
from model_worker.engines.model_dir import ModelDir, ModelShape, Tensor, read_shape
from protocol.process.worker_spec import PAGE_TOKENS, EngineSpec

MAX_DEQUANTIZED = 512 << 20
"""The most elements of a matrix that the package unpacks at once (config.max_dq_size)."""
CUBLAS_WORKSPACE = 32 << 20
"""Bytes that PyTorch gives cuBLAS for each stream on Hopper; earlier GPUs take 8 MiB."""
KERNELS = 152 << 20
"""Bytes of code loaded at first use on each GPU, for every model. Measured on an H200 with torch 2.11."""
SLACK = 32 << 20
"""Bytes that the allocator holds and cannot use, on each GPU. Measured: 30 to 38 MiB."""
BYTES_PER_ELEMENT = {"FP16": (2.0, 2.0), "Q8": (1.0, 1.0), "Q6": (1.0, 0.5), "Q4": (0.5, 0.5)}
"""Bytes per element of keys and of values, by cache mode, without scales."""
NODES, NODE_BYTES = 16, 4096
"""Operations of a layer in a captured step, and bytes of GPU memory for each. Measured on an H200 for 1B and 8B: 3 to
5 KiB, outside of PyTorch's memory."""
_SMALL, _LARGE = 1 << 20, 10 << 20


@dataclass(frozen=True)
class Estimate:
    """The estimate in bytes, for all GPUs of the worker together. Each GPU needs ``per_gpu`` bytes of ``workspace``."""

    weights: int
    cache: int
    draft: int
    workspace: int
    per_gpu: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.draft + self.workspace


def estimate(spec: EngineSpec, gpus: int = 1) -> Estimate:
    """Return the memory that ``spec`` takes on ``gpus`` GPUs together. Raises LoadError if it cannot be loaded."""
    checked = check(spec)
    return estimate_of(checked.options, checked.sizes, checked.directory, checked.draft, gpus)


def estimate_of(
    options: ExLlamaV2Options, sizes: Sizes, directory: ModelDir, draft: ModelDir | None, gpus: int = 1
) -> Estimate:
    """Return the memory that a model takes on ``gpus`` GPUs together. ``check`` returns the other arguments."""
    shape = read_shape(directory)
    per_gpu = _shared_bytes(directory, shape, sizes)
    workspace = per_gpu * gpus + _logits_bytes(shape, sizes) + _page_buffers(shape, options.cache_mode)
    captured = is_captured(options)
    if captured:
        workspace += graph_bytes(directory, shape, options, sizes)
    for adapter in options.loras:
        tensors = check_adapter(adapter, directory)
        workspace += adapter_bytes(tensors.values())
        # The intermediate result between the two halves. Quantized layers allocate it for the largest rank.
        workspace += 2 * sizes.chunk_size * max(min(tensor.shape) for tensor in tensors.values())
    draft_bytes = 0
    if draft is not None:
        small = read_shape(draft)
        mode = options.draft_cache_mode or options.cache_mode
        draft_bytes = weight_bytes(draft) + _cache_bytes(small, mode, sizes, captured)
        draft_bytes += _scratch_bytes(draft, small, sizes) + _position_bytes(small, sizes)
    return Estimate(
        weights=weight_bytes(directory),
        cache=_cache_bytes(shape, options.cache_mode, sizes, captured, gpus),
        draft=draft_bytes,
        workspace=workspace,
        per_gpu=per_gpu,
    )


def weight_bytes(directory: ModelDir) -> int:
    """Return the bytes of the weights on the GPU."""
    tensors = directory.tensors
    embedding = {name for name in tensors if _is_embedding(name)}
    total = sum(_kept_bytes(name, tensor, tensors) for name, tensor in tensors.items() if name not in embedding)
    if not any(".lm_head." in f".{name}" or name.startswith("output.") for name in tensors):
        # Tied weights: the head is a second copy of the embedding.
        total += sum(_kept_bytes(name, tensors[name], tensors) for name in embedding if "wpe" not in name)
    return total


def _is_embedding(name: str) -> bool:
    return any(part in name for part in ("embed_tokens.", "tok_embeddings.", "wte.")) and "lora" not in name


def _kept_bytes(name: str, tensor: Tensor, tensors: dict[str, Tensor]) -> int:
    """Return the bytes that the package keeps on the GPU of one tensor of a file."""
    stem, _, part = name.rpartition(".")
    elements = tensor.elements
    if part == "q_invperm":
        if ".mlp.down_proj" in stem and "experts" not in stem:
            return 0  # gate and up are stored in this order instead
        # The file holds the order as int32. The package keeps it and its inverse as int16.
        return 2 * _block(2 * elements)
    if part == "q_weight":
        rows = tensors.get(f"{stem}.q_invperm")
        return _block(tensor.bytes) + (_block(4 * rows.elements) if rows else 0)  # q_group_map, made while loading
    if part == "g_idx":
        # GPTQ: while loading, the package makes the order of the groups and its inverse as int16, and keeps g_idx, too.
        return _block(tensor.bytes) + 2 * _block(2 * elements)
    if part in ("q_scale", "q_scale_max", "q_groups", "qweight", "qzeros"):
        return _block(tensor.bytes)
    return _block(2 * _padded(name, tensor))  # fp16, whatever type it has in the file


def _padded(name: str, tensor: Tensor) -> int:
    """Return the elements of a weight [out, in] whose rows are padded to a multiple of 32."""
    if len(tensor.shape) != 2 or not name.endswith(".weight"):
        return tensor.elements
    return -(-tensor.shape[0] // 32) * 32 * tensor.shape[1]


def _cache_bytes(shape: ModelShape, mode: str, sizes: Sizes, captured: bool, gpus: int = 1) -> int:
    """Return the bytes of the whole cache. That of captured steps has one page more, in the same tensors."""
    return cache_bytes(shape, mode, sizes.cache_size, gpus) + (cache_bytes(shape, mode, PAGE_TOKENS) if captured else 0)


def cache_bytes(shape: ModelShape, mode: str, tokens: int, gpus: int = 1) -> int:
    """Return the bytes of a cache of ``tokens``, including the layer on each GPU that quantized modes compute with."""
    elements = tokens * shape.kv_heads * shape.head_dim
    of_keys, of_values = BYTES_PER_ELEMENT[mode]
    layer = _block(int(elements * of_keys)) + _block(int(elements * of_values))
    if mode == "FP16":
        return shape.layers * layer
    return shape.layers * (layer + 2 * _block(2 * elements // 32)) + gpus * 2 * _block(2 * elements)


def _shared_bytes(directory: ModelDir, shape: ModelShape, sizes: Sizes) -> int:
    """Return the bytes that every GPU with layers needs beside weights and cache."""
    return (
        _scratch_bytes(directory, shape, sizes)
        + _position_bytes(shape, sizes)
        + _activation_bytes(shape, sizes, directory.is_quantized)
        + CUBLAS_WORKSPACE
        + KERNELS
        + SLACK
    )


def _scratch_bytes(directory: ModelDir, shape: ModelShape, sizes: Sizes) -> int:
    """Return the bytes of the buffer that quantized layers share: the maximum of scratch_space_fixed over the modules.
    Return 0 for a model that is not quantized."""
    return _block(scratch_space(shape, sizes.chunk_size)) if directory.is_quantized else 0


def scratch_space(shape: ModelShape, chunk: int) -> int:
    """Return the bytes of scratch memory: the maximum over attention, MLP and head (attn.py:370, mlp.py:270,
    moe_mlp.py:146, linear.py:270)."""

    def unpacked(inputs: int, outputs: int) -> int:
        return 2 * min(inputs * (-(-outputs // 32) * 32), MAX_DEQUANTIZED)

    hidden, inner = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = chunk * max(queries, hidden) * 2 + 128
    attention += max(unpacked(hidden, queries), unpacked(hidden, keys), unpacked(queries, hidden))
    unpack = max(unpacked(hidden, inner), unpacked(inner, hidden))
    if shape.experts:
        mlp = 2 * (chunk * hidden * 2 + 128) + 2 * (chunk * inner * 2 + 128) + chunk * shape.experts * 2 + 128 + unpack
    else:
        mlp = chunk * hidden * 2 + 128 + 2 * (chunk * max(hidden, inner) * 2 + 128) + unpack
    return max(attention, mlp, unpacked(hidden, shape.vocab))


def _position_bytes(shape: ModelShape, sizes: Sizes) -> int:
    """Return the bytes of the sines and cosines of every position, fp16 [positions, head_dim] each."""
    return shape.rotary_tables * 2 * _block(2 * sizes.positions * shape.rotary_dim)


def _activation_bytes(shape: ModelShape, sizes: Sizes, quantized: bool) -> int:
    """Return the most bytes that are alive at once while a chunk of a prompt is computed, in fp16."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Residual and its norm; q and output; k and v. Keys and values of one sequence may be gathered from their pages.
    attention = sizes.chunk_size * 2 * (2 * shape.hidden + 2 * queries + 2 * keys) + 2 * 2 * sizes.positions * keys
    # Plain weights: gate, its activation and up, beside input and output.
    mlp = 0 if quantized else sizes.chunk_size * 2 * (5 * shape.hidden + 3 * shape.intermediate)
    return max(attention, mlp, _scored_bytes(shape))


def _scored_bytes(shape: ModelShape) -> int:
    """Return the bytes that are alive while log-probabilities of a prompt are computed: logits in fp16 and float32, and
    their exponentials."""
    padded = -(-shape.vocab // 32) * 32
    return (2 + 4 + 4) * padded * max(1, SCORED_LOGITS // padded)


def _logits_bytes(shape: ModelShape, sizes: Sizes) -> int:
    """Return the bytes of the head's output for a step, in fp16."""
    return _block(2 * sizes.rows * (-(-shape.vocab // 32) * 32))


def is_captured(options: ExLlamaV2Options) -> bool:
    """Return whether steps are captured, as far as the options say. Some models that cannot be captured take less."""
    return options.graphs and not options.tensor_parallel


def graph_bytes(directory: ModelDir, shape: ModelShape, options: ExLlamaV2Options, sizes: Sizes) -> int:
    """Return the bytes that captured steps take: static logits, memory that all graphs share, and the graphs.

    The graphs share what is alive at once in the largest step. A graph has about NODES operations in each layer.
    """
    rows, padded = most_captured(sizes.rows, directory.is_quantized), -(-shape.vocab // 32) * 32
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if directory.is_quantized:
        alive = 2 * queries + 2 * keys + shape.hidden
    else:
        alive = 4 * shape.hidden + 2 * queries + 2 * keys + 3 * shape.intermediate
    passes = [] if shape.experts else PASSES
    shared = max([2 * rows * (alive + padded), *(2 * tokens * alive for tokens in passes)])
    embedded = sum(2 * tokens * shape.hidden for tokens in passes)
    draft_tokens = options.draft_tokens if options.speculates else 0
    pages = -(-(sizes.context + draft_tokens) // PAGE_TOKENS)
    quantized = options.cache_mode != "FP16"
    copied = quantized and not reads_in_place(shape.head_dim)
    graphs = len(row_sizes(sizes.rows // (draft_tokens + 1))) * len(page_sizes(pages, copied))
    graphs += len(passes) * len(page_sizes(pages + 1, quantized))
    # Draws: for each row bias, two tables, weights and a mask of the vocabulary, and candidates (gpu_draws.batched).
    draws = 0 if draft_tokens else rows * (16 * shape.vocab + shape.vocab // 8 + 12 * (MOST + BINS))
    own = product_bytes(shape) if directory.is_quantized else 0
    return _block(2 * rows * padded) + shared + embedded + draws + own + graphs * shape.layers * NODES * NODE_BYTES


def product_bytes(shape: ModelShape) -> int:
    """Return the bytes that products of quantised matrices share: partial sums in fp32, and placed rows in fp16.

    A product has parts until 1.9 blocks come to each processor of the GPU (products.layout). So its sums have some
    65,536 columns on a GPU of 132 processors, or those of its matrices if these are more.
    """
    columns = max(1 << 16, 2 * shape.intermediate)
    inputs = shape.hidden + shape.heads * shape.head_dim + shape.intermediate
    return _block(4 * MOST_ROWS * columns) + _block(2 * MOST_ROWS * inputs)


def _page_buffers(shape: ModelShape, mode: str) -> int:
    """Return the bytes of one page for each kind of tensor of the cache. Pages are moved through these buffers."""
    elements = PAGE_TOKENS * shape.kv_heads * shape.head_dim
    kinds = set(BYTES_PER_ELEMENT[mode])
    return sum(_block(int(elements * kind)) for kind in kinds) + (0 if mode == "FP16" else _block(elements // 16))


def _block(size: int) -> int:
    """Return the bytes that PyTorch's allocator takes for a tensor: multiples of 512, or of 2 MiB from 10 MiB on."""
    unit = 512 if size < _LARGE else 2 << 20
    return -(-size // unit) * unit


def refusal(
    needs: Estimate, free: int, total: int, options: ExLlamaV2Options, sizes: Sizes, gpus: int = 1
) -> LoadError:
    """Return the error for a model that does not fit, with the arithmetic in one line."""
    mode = f"{options.cache_mode}, {sizes.cache_size} tokens"
    parts = f"weights {_gib(needs.weights)}, cache {_gib(needs.cache)} ({mode})"
    if needs.draft:
        parts += f", draft {_gib(needs.draft)}"
    holder = "the GPU has" if gpus == 1 else f"the {gpus} GPUs have"
    return LoadError(
        f"not enough VRAM: needs {_gib(needs.total)} GiB: {parts}, workspace {_gib(needs.workspace)}; {holder} "
        f"{_gib(free)} free of {_gib(total)}: lower cache_size or max_seq_len, use a coarser cache_mode or smaller "
        "weights, or end what else is there"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
