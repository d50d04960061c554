"""The shape of a language model, from the keys of config.json that ExLlamaV2 0.3.2 looks for."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_worker.engine import LoadError
from model_worker.engines.model_dir import ModelDir, Tensor

MOST_LAYERS = 1024
MOST_EXPERTS = 4096
MOST_WIDE = 1 << 22
"""The largest size of vectors, and the largest number of heads and of ids."""
_WIDTHS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "d_model", "n_embd", "n_head", "n_heads", "moe_intermediate_size",
)  # fmt: skip
_LAYERS = "num_hidden_layers", "n_layers", "n_layer", "num_layers"
_EXPERTS = "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"


def check_counts(directory: ModelDir) -> None:
    """Raise LoadError for counts that no model has. Engines make something for each layer, expert and id."""
    where = f"{directory.path}/config.json"
    for config in (directory.config, directory.text_config, directory.config.get("ffn_config")):
        if not isinstance(config, Mapping):
            continue
        for keys, least, most in ((_LAYERS, 1, MOST_LAYERS), (_EXPERTS, 0, MOST_EXPERTS), (_WIDTHS, 1, MOST_WIDE)):
            for key in keys:
                count = config.get(key)
                if count is not None and (not isinstance(count, (int, float)) or not least <= count <= most):
                    raise LoadError(f"{where}: {key} is {count!r:.60}: must be a number from {least} to {most}")
        for key in ("rope_scaling", "rope_parameters"):
            rope = config.get(key)
            for name, value in rope.items() if isinstance(rope, Mapping) else ():
                if isinstance(value, float) and not math.isfinite(value):
                    raise LoadError(f"{where}: {key} has {name} {value}: must be a finite number")
                if name in ("type", "rope_type") and not isinstance(value, str):
                    raise LoadError(f"{where}: {key} has {name} {value!r:.60}: must be a string")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model, as counts of elements.

    intermediate   width of the MLP; of one expert's MLP if there are experts
    experts        0 for none
    rotary_dim     size of each head's table of positions; 0 without rotary embedding
    rotary_tables  2 if layers with and without a sliding window have different positions
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    rotary_dim: int = 0
    rotary_tables: int = 1


def read_shape(directory: ModelDir) -> ModelShape:
    """Return the shape of the model in ``directory``. Raises LoadError if config.json does not state it."""
    config, name = directory.text_config, directory.architecture
    where = f"{directory.path}/config.json"

    def find(*keys: str, default: int | None = None) -> int:
        for source in (config, directory.config):
            for key in keys:
                value = _inside(source, key)
                if isinstance(value, float) and value.is_integer():
                    value = int(value)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        if default is None:
            raise LoadError(f"{where} does not say {keys[0]}")
        return default

    hidden = find("hidden_size", "d_model", "n_embd")
    gemma3 = name == "Gemma3ForConditionalGeneration"
    heads = find("num_attention_heads", "n_heads", "n_head", default=8 if gemma3 else 0)
    head_dim = find("head_dim", default=256 if gemma3 else (hidden // heads if heads else None))
    heads = heads or hidden // head_dim
    own = 4 if gemma3 else heads
    kv_heads = find("num_key_value_heads", "attn_config.kv_n_heads", default=own)
    if name == "GPTBigCodeForCausalLM":
        kv_heads = 1
    if kv_heads > heads or heads % kv_heads:
        raise LoadError(f"{where}: {heads} attention heads cannot share {kv_heads} heads of keys")
    inner = 4 * hidden if name in ("GPT2LMHeadModel", "GPTBigCodeForCausalLM") else None
    experts = 0
    intermediate = find("intermediate_size", "ffn_config.ffn_hidden_size", "n_inner", default=inner)
    if name in ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DbrxForCausalLM", "GemmoeForCausalLM"):
        experts = find("num_local_experts", "ffn_config.moe_num_experts", "num_experts")
        intermediate = find("moe_intermediate_size", default=intermediate)
    return ModelShape(
        layers=find("num_hidden_layers", "n_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=find("vocab_size", default=262208 if gemma3 else None),
        experts=experts,
        rotary_dim=0 if name in ("GPT2LMHeadModel", "GPTBigCodeForCausalLM") else _rotary_dim(config, head_dim),
        rotary_tables=2 if gemma3 or name == "Cohere2ForCausalLM" else 1,
    )


def _rotary_dim(config: Mapping[str, Any], head_dim: int) -> int:
    part = config.get("partial_rotary_factor")
    return int(head_dim * part) if isinstance(part, (int, float)) and 0 < part <= 1 else head_dim


def _inside(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# Check by names and shapes whether the weights are those of the model that config.json describes.
#
# Engines would notice only in the middle of a load, and the transformers library fills missing weights with random
# numbers.


_LAYER = re.compile(r"(.*?)\b(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING = "embed_tokens.weight"
_LLAMA_LIKE = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM"}
)
"""Architectures whose tensors have Llama's names and shapes."""


def check_names_and_shapes(directory: ModelDir) -> None:
    """Raise LoadError if names or shapes show that the weights are not those of the model in config.json."""
    check_layers(directory)
    check_shapes(directory)


def check_layers(directory: ModelDir) -> None:
    """Raise LoadError for weights without a layer that config.json describes.

    Tensors whose names do not contain the number of their layer are left to the engine.
    """
    count = next((c for k in ("num_hidden_layers", "n_layer", "n_layers") if (c := directory.text_config.get(k))), None)
    if not isinstance(count, int):
        return
    found: dict[str, set[int]] = defaultdict(set)  # a model may have further stacks of layers, for images
    for name in directory.tensors:
        if match := _LAYER.match(name):
            found[match[1]].add(int(match[2]))
    missing = min((sorted(set(range(count)) - numbers) for numbers in found.values()), key=len, default=[])
    if missing:
        raise LoadError(
            f"{directory.path}: config.json describes {count} layers, and the weights have none with number "
            f"{missing[0]}: they are not of one model, or a part of the weights is missing"
        )


def check_shapes(directory: ModelDir) -> None:
    """Raise LoadError for plain weights of another shape than config.json says, and for layers that lack a tensor.

    Only architectures with Llama's names are checked, and only sizes that config.json itself states.
    """
    if directory.architecture not in _LLAMA_LIKE or directory.is_quantized:
        return
    expected = _llama_shapes(directory)
    prefix = "model." if any(name.startswith("model.") for name in directory.tensors) else ""
    for name, shape in expected.items():
        tensor = directory.tensors.get(prefix + name)
        if tensor is None and name == _EMBEDDING and "lm_head.weight" in directory.tensors:
            continue  # tied weights: one of the two is enough
        if tensor is None:
            raise LoadError(f"{directory.path}: the weights lack {prefix}{name}: download them again")
        if shape is not None and tensor.shape != shape:
            raise LoadError(
                f"{directory.path}: {prefix}{name} has shape {list(tensor.shape)}, config.json describes "
                f"{list(shape)}: they are not of one model"
            )


def _llama_shapes(directory: ModelDir) -> dict[str, tuple[int, ...] | None]:
    """Return the shape of each required tensor by its name without the prefix; None where config.json lacks a size."""

    def size(key: str) -> int | None:
        value = directory.text_config.get(key)
        return value if type(value) is int else None

    def shape(*sizes: int | None) -> tuple[int, ...] | None:
        known = tuple(one for one in sizes if one is not None)
        return known if len(known) == len(sizes) else None

    def rows(heads: int | None) -> int | None:
        return heads * head_dim if heads is not None and head_dim is not None else None

    hidden, inner, vocab = size("hidden_size"), size("intermediate_size"), size("vocab_size")
    heads, kv_heads, head_dim = size("num_attention_heads"), size("num_key_value_heads"), size("head_dim")
    if head_dim is None and directory.architecture in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"):
        head_dim = hidden // heads if hidden is not None and heads is not None else None
    layer = {
        "input_layernorm": shape(hidden),
        "post_attention_layernorm": shape(hidden),
        "self_attn.q_proj": shape(rows(heads), hidden),
        "self_attn.k_proj": shape(rows(kv_heads), hidden),
        "self_attn.v_proj": shape(rows(kv_heads), hidden),
        "self_attn.o_proj": shape(hidden, rows(heads)),
        "mlp.gate_proj": shape(inner, hidden),
        "mlp.up_proj": shape(inner, hidden),
        "mlp.down_proj": shape(hidden, inner),
    }
    layers = size("num_hidden_layers") or 0
    return {
        _EMBEDDING: shape(vocab, hidden),
        "norm.weight": shape(hidden),
        **{f"layers.{number}.{name}.weight": wanted for number in range(layers) for name, wanted in layer.items()},
    }


# The bytes of weights that each part of a model takes, for the progress of a load. Pure.


_KNOWN_SHARE = 0.9
"""The share of the weights that the parts must take together. Below it their names are not those of the files."""


def bytes_of_modules(tensors: Mapping[str, Tensor], keys: Sequence[str]) -> list[int] | None:
    """Return the bytes of each module's tensors; None if the names of most tensors begin with no module's key.

    keys  names of the modules, such as "model.layers.0". Modules with the same name (the attention and the MLP of a
          layer) share its tensors evenly
    """
    sizes = dict.fromkeys(keys, 0)
    for name, tensor in tensors.items():
        place = name
        while place and place not in sizes:
            place = place.rpartition(".")[0]
        if place:
            sizes[place] += tensor.bytes
    whole = sum(tensor.bytes for tensor in tensors.values())
    if not sum(sizes.values()) >= _KNOWN_SHARE * whole > 0:
        return None
    modules = Counter(keys)
    return [sizes[key] // modules[key] for key in keys]


def bytes_of_parameters(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[int]:
    """Return the bytes of each parameter. Parameters that are joined from several tensors, and so have names that no
    file has, share evenly what is left."""
    whole = sum(tensor.bytes for tensor in tensors.values())
    known = [tensors[name].bytes if name in tensors else None for name in names]
    others = known.count(None)
    rest = max(0, whole - sum(size or 0 for size in known)) // others if others else 0
    return [rest if size is None else size for size in known]
