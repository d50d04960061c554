"""Write model directories with weights of any size that take no disk space: safetensors headers and a sparse file."""

import json
import math
import struct
from pathlib import Path
from typing import Any

from tests.engines.random_model import write_tokenizer

Header = dict[str, tuple[str, tuple[int, ...]]]
_BYTES = {"F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I16": 2, "F8_E4M3": 1, "U8": 1}


def write_header(file: Path, tensors: Header) -> None:
    """Write a safetensors file of the right length. ``tensors``: (dtype, shape) by name."""
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = _BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries).encode()
    with file.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + end)


def plain(name: str, outputs: int, inputs: int) -> Header:
    return {f"{name}.weight": ("F16", (outputs, inputs))}


def exl2(name: str, outputs: int, inputs: int, group: int = 32, bits: int = 4) -> Header:
    """Return the tensors of a matrix as EXL2 stores it, with ``bits`` for all weights."""
    groups = inputs // group
    return {
        f"{name}.q_weight": ("I32", (inputs * bits // 32, outputs)),
        f"{name}.q_invperm": ("I32", (inputs,)),
        f"{name}.q_scale": ("I32", (groups, outputs // 8)),
        f"{name}.q_scale_max": ("F16", (groups,)),
        f"{name}.q_groups": ("I16", (2 * groups,)),
    }


def write_llama(path: Path, *, quantized: bool = False, tied: bool = False, **changes: Any) -> dict[str, Any]:
    """Write a Llama model, small by default, and return its config.json. ``changes``: keys of config.json."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    } | changes
    path.mkdir(exist_ok=True)
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps(config))
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    matrix = exl2 if quantized else plain
    tensors: Header = {"model.norm.weight": ("F16", (hidden,)), **plain("model.embed_tokens", vocab, hidden)}
    if not tied:
        tensors |= matrix("lm_head", vocab, hidden)
    experts = config.get("num_experts", 0)
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        norms = ["input_layernorm", "post_attention_layernorm"]
        if config["architectures"] == ["Gemma2ForCausalLM"]:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        tensors |= {f"{stem}.{name}.weight": ("F16", (hidden,)) for name in norms}
        tensors |= matrix(f"{stem}.self_attn.q_proj", queries, hidden) | matrix(
            f"{stem}.self_attn.k_proj", keys, hidden
        )
        tensors |= matrix(f"{stem}.self_attn.v_proj", keys, hidden) | matrix(
            f"{stem}.self_attn.o_proj", hidden, queries
        )
        if experts:
            tensors |= plain(f"{stem}.mlp.gate", experts, hidden)
            tensors |= {
                f"{stem}.self_attn.{name}.weight": ("F16", (config["head_dim"],)) for name in ("q_norm", "k_norm")
            }
        width = config.get("moe_intermediate_size", inner)
        for mlp in [f"{stem}.mlp.experts.{n}" for n in range(experts)] or [f"{stem}.mlp"]:
            tensors |= matrix(f"{mlp}.gate_proj", width, hidden) | matrix(f"{mlp}.up_proj", width, hidden)
            tensors |= matrix(f"{mlp}.down_proj", hidden, width)
    write_header(path / "model.safetensors", tensors)
    return config
