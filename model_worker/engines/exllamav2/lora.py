"""LoRA adapters: check them, then load them. They apply to every request.

The package checks shapes with assertions, follows null pointers where half of an adapter is missing, skips tensors that
it does not know, prefers a pickled file, and forgets that it has reordered the MLPs of EXL2 models. So this module
checks adapters first. The check does not import torch.
"""

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model_worker.engine import LoadError
from model_worker.engines.exllamav2.options import Adapter
from model_worker.engines.model_dir import ModelDir, ModelShape, Tensor, read_header, read_shape
from model_worker.engines.vetting import Bounds, read_json, vet

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "YiForCausalLM",
    "GraniteForCausalLM",
)
"""Architectures whose layers all pass adapters on. For others (parallel blocks, experts, 32-bit residuals, names with a
prefix) the package refuses adapters, or leaves a part of them out."""
WEIGHTS = "adapter_model.safetensors"
_MERGE = "merge the adapter into the model's weights (merge_and_unload of peft) and serve the result"
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the model's own weights as they are. peft changes those weights for the others
(pissa, olora, corda, loftq, mica, ...) whenever it loads the adapter, and the package does not."""
_VARIANTS = (
    "fan_in_fan_out", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "rank_pattern", "alpha_pattern",
    "alora_invocation_tokens", "layer_replication", "target_parameters", "arrow_config", "kasa_config",
    "monteclora_config",
)  # fmt: skip
"""Keys of adapter_config.json that change what peft computes, and that the package does not read or refuses."""
_REPLACING = "modules_to_save", "trainable_token_indices"
"""Keys that name whole matrices or rows which the adapter brings along."""
_KEY = re.compile(r"model\.layers\.(\d+)\.(self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.lora_([AB])\.weight$")


def check_adapter(adapter: Adapter, directory: ModelDir, number: int = 0) -> dict[str, Tensor]:
    """Return the tensors of an adapter. Raises LoadError, which names the adapter, if it does not fit the model.

    number  the adapter's index among the model's adapters, from 0
    """
    try:
        return _check(Path(adapter.directory), directory)
    except LoadError as e:
        raise LoadError(f"lora {adapter.directory}: {e}", key=f"lora.{number}.dir") from None


def _check(path: Path, directory: ModelDir) -> dict[str, Tensor]:
    if directory.architecture not in ARCHITECTURES:
        raise LoadError(f"adapters are not supported for architecture {directory.architecture}")
    if not path.is_dir():
        raise LoadError("it is no directory")
    bounds = Bounds(Path(os.path.realpath(path)), directory.bounds.roots)
    vet(path, bounds)
    rank = _check_config(path / "adapter_config.json", bounds)
    if not (path / WEIGHTS).is_file():
        pickled = (path / "adapter_model.bin").is_file()
        raise LoadError(
            f"there is no {WEIGHTS}" + ("; pickled weights are never loaded, convert them" if pickled else "")
        )
    tensors = read_header(path / WEIGHTS, bounds)
    shape = read_shape(directory)
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _KEY.search(name)
        if match is None:
            raise LoadError(
                f"it holds {name[:200]!r}: only adapters of the projections of attention and MLP are served; {_MERGE}"
            )
        if int(match[1]) >= shape.layers:
            raise LoadError(f"{name}: the model has {shape.layers} layers")
        if tensor.dtype not in ("F16", "BF16", "F32"):
            raise LoadError(f"{name} has dtype {tensor.dtype}: use 16-bit weights")
        halves.setdefault(f"{match[1]}.{match[2]}", {})[match[3]] = tensor
    if not halves:
        raise LoadError(f"{WEIGHTS} holds nothing")
    for place, pair in halves.items():
        inputs, outputs = _features(shape, place.split(".")[-1])
        if set(pair) != {"A", "B"}:
            raise LoadError(f"layer {place} has lora_{min(pair)} without the other half")
        if pair["A"].shape != (rank, inputs) or pair["B"].shape != (outputs, rank):
            raise LoadError(
                f"layer {place} has shapes {list(pair['A'].shape)} and {list(pair['B'].shape)}, this model and rank "
                f"{rank} need {[rank, inputs]} and {[outputs, rank]}"
            )
    return tensors


def _check_config(file: Path, bounds: Bounds) -> int:
    """Return the adapter's rank. Raises LoadError for a configuration that ExLlamaV2 does not compute."""
    config = read_json(file, bounds)
    kind = config.get("peft_type")
    if kind not in (None, "LORA"):
        raise LoadError(f"{file.name} has peft_type={kind!r:.60}: only LoRA adapters are served; {_MERGE}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise LoadError(f"{file.name} has r={rank!r}: it must be the rank")
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise LoadError(f"{file.name} has lora_alpha={alpha!r}: it must be a number")
    for key in _VARIANTS:
        if config.get(key):
            raise LoadError(
                f"{file.name} has {key}={config[key]!r:.80}, a variant of LoRA that ExLlamaV2 does not "
                f"compute: {_MERGE}"
            )
    start = config.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise LoadError(
            f"{file.name} has init_lora_weights={start!r:.60}: such an adapter belongs to changed weights of the "
            f"model, which ExLlamaV2 does not change: {_MERGE}, or convert the adapter to plain LoRA when you save it "
            "(path_initial_model_for_weight_conversion of peft)"
        )
    for key in _REPLACING:
        if config.get(key):
            raise LoadError(
                f"{file.name} has {key}={config[key]!r:.80}: adapters that replace whole parts of a model, such as its "
                f"head or its embeddings, are not served; {_MERGE}"
            )
    return rank


def _features(shape: ModelShape, projection: str) -> tuple[int, int]:
    """Return (inputs, outputs) of a projection as the package has them: outputs are padded to a multiple of 32."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.intermediate
    inputs, outputs = {
        "q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys), "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden),
    }[projection]  # fmt: skip
    return inputs, -(-outputs // 32) * 32


def adapter_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of an adapter's tensors on the GPU, in fp16."""
    return sum(-(-2 * tensor.elements // 512) * 512 for tensor in tensors)


def load_adapters(core: Any, model: Any, adapters: Iterable[Adapter], directory: ModelDir) -> list[Any]:
    """Load adapters that have been checked onto the model's GPUs. Return the package's objects."""
    loaded = []
    for adapter in adapters:
        path = Path(adapter.directory)
        loaded.append(
            core.ExLlamaV2Lora(model, str(path / "adapter_config.json"), str(path / WEIGHTS), adapter.scaling)
        )
    if loaded and directory.quantization == "exl2":
        import torch  # late, because the check of a model reads adapters without torch

        with torch.inference_mode():  # tensors that were made in this mode can be written in this mode only
            _reorder(model, loaded, directory)
    return loaded


def _reorder(model: Any, adapters: list[Any], directory: ModelDir) -> None:
    """Reorder the inner neurons of adapters of MLPs as EXL2 layers compute them.

    The package stores gate and up in the order in which down takes its inputs (mlp.py, ``unmap``), but does not reorder
    adapters. Their values would be added to other neurons. The tensors are changed in place, because kernels hold their
    addresses.
    """
    import safetensors  # late, because the check of a model does not need this import

    for layer in range(read_shape(directory).layers):
        name = f"model.layers.{layer}.mlp."
        order = f"{name}down_proj.q_invperm"
        if order not in directory.tensors:
            continue
        with safetensors.safe_open(str(directory.path / directory.tensors[order].file), framework="pt") as file:
            inputs = file.get_tensor(order).argsort()
        for adapter in adapters:
            for projection in ("gate_proj", "up_proj"):
                outputs = model.modules_dict[name + projection].lora_b_tensors.get(adapter)  # [rank, neurons]
                if outputs is not None:
                    outputs.copy_(outputs[:, inputs.to(outputs.device)])
            taken = model.modules_dict[f"{name}down_proj"].lora_a_tensors.get(adapter)  # [neurons, rank]
            if taken is not None:
                taken.copy_(taken[inputs.to(taken.device)])
