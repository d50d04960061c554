"""The shape of a language model, from the keys of config.json that ExLlamaV2 0.3.2 looks for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_worker.engine import LoadError
from model_worker.engines.model_dir import ModelDir

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
