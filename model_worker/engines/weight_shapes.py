"""Check by names and shapes whether the weights are those of the model that config.json describes.

Engines would notice only in the middle of a load, and the transformers library fills missing weights with random
numbers.
"""

import re
from collections import defaultdict

from model_worker.engine import LoadError
from model_worker.engines.model_dir import ModelDir

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
