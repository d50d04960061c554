"""What config.json means to transformers, in the words that ExLlamaV2 0.3.2 understands. Does not import torch.

The package reads the keys of older files, leaves keys out without a word, and takes other defaults for missing ones.
``open_directory`` translates config.json, so that the package computes the model that transformers computes.
``check_meaning`` refuses what cannot be translated. ``package_model`` makes the package read the translation.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from model_worker.engine import LoadError
from model_worker.engines.model_dir import ModelDir

_SILU, _GELU = ("silu", "swish"), ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_WITH_GELU = frozenset(
    {
        "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForConditionalGeneration", "GemmoeForCausalLM",
        "Starcoder2ForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM",
    }
)  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "CohereForCausalLM": {"logit_scale": 0.0625, "rope_theta": 500000.0},
    "Cohere2ForCausalLM": {"logit_scale": 0.0625, "sliding_window": 4096, "head_dim": 128},
    "GemmaForCausalLM": {"head_dim": 256, "num_key_value_heads": 16},
    "Gemma2ForCausalLM": {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "head_dim": 256, "num_key_value_heads": 4,
    },
    "Gemma3ForConditionalGeneration": {
        "sliding_window": 4096, "query_pre_attn_scalar": 256, "max_position_embeddings": 131072,
    },
    "Glm4ForCausalLM": {"partial_rotary_factor": 0.5, "head_dim": 128, "num_key_value_heads": 2},
    "MixtralForCausalLM": {"rope_theta": 1000000.0, "num_key_value_heads": 8, "num_experts_per_tok": 2},
    "Qwen3ForCausalLM": {"head_dim": 128},
}  # fmt: skip
"""Values that transformers takes for keys that are missing, where the package takes others."""
_COMPUTED: dict[str, tuple[tuple[str, Any], ...]] = {
    "DbrxForCausalLM": (("attn_config.clip_qkv", None),),
    "Gemma3ForConditionalGeneration": (("use_bidirectional_attention", False), ("rope_local_base_freq", 10000)),
    "GPT2LMHeadModel": (("scale_attn_by_inverse_layer_idx", False), ("scale_attn_weights", True)),
    "GPTBigCodeForCausalLM": (("multi_query", True), ("scale_attn_weights", True)),
    "InternLM2ForCausalLM": (("bias", False),),
    "Qwen3MoeForCausalLM": (("mlp_only_layers", []), ("decoder_sparse_step", 1)),
    "Starcoder2ForCausalLM": (("use_bias", True),),
}
"""Keys that the package does not read, with the only value that it computes. A missing key has this value."""
_TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
    "Mistral3ForConditionalGeneration": ("mistral", "ministral3"),
}
_TOP_LEVEL = (
    "attention_bias", "mlp_bias", "partial_rotary_factor", "original_max_position_embeddings", "use_qk_norm",
    "attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier",
    "residual_multiplier", "tie_word_embeddings",
)  # fmt: skip
"""Keys that the package looks for at the top level only, and not in text_config."""
_LENGTHS = "original_max_position_embeddings"
_BY_KIND = ("full_attention", "sliding_attention")
LONGROPE = ("longrope", "su")


def open_directory(path: str, roots: Iterable[str] = ()) -> ModelDir:
    """Return a model's directory, with config.json in the package's words. Raises LoadError.

    roots  as for ModelDir
    """
    directory = ModelDir(path, roots)
    directory.config = _translated(directory)
    return directory


def _translated(directory: ModelDir) -> dict[str, Any]:
    config = copy.deepcopy(directory.config)
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else config
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    for key, value in DEFAULTS.get(name, {}).items():
        if key not in config:
            text.setdefault(key, value)
    _translate_rope(directory, config, text)
    if name == "Starcoder2ForCausalLM" and "norm_epsilon" in config:
        config["layer_norm_epsilon"] = config["norm_epsilon"]
    if name == "GPTBigCodeForCausalLM" and config.get("n_inner") is None and isinstance(config.get("n_embd"), int):
        config["n_inner"] = 4 * config["n_embd"]
    if text is not config:
        config |= {key: text[key] for key in _TOP_LEVEL if key in text and key not in config}
    return config


def _translate_rope(directory: ModelDir, config: dict[str, Any], text: dict[str, Any]) -> None:
    """Write the rotary embedding as files before transformers 5 do: rope_theta, partial_rotary_factor, rope_scaling.

    rope_scaling is left out for the kinds that change nothing within the model's own context.
    """
    where = f"{directory.path}/config.json"
    given = text.pop("rope_scaling", None) or config.pop("rope_scaling", None)
    newer = text.pop("rope_parameters", None) or config.pop("rope_parameters", None)
    rope = given or newer  # transformers 5 takes them in this order
    if not isinstance(rope, dict):
        return
    rope = _of_all_layers(where, rope)
    kinds = {rope.pop(key) for key in ("type", "rope_type") if rope.get(key) is not None and _is_text(where, rope, key)}
    if len(kinds - {"default"}) > 1:
        raise LoadError(f"{where}: rope_scaling has two types, {' and '.join(sorted(kinds))}: remove the wrong one")
    kind = next(iter(kinds - {"default"}), "default")
    for key in ("rope_theta", "partial_rotary_factor"):
        if (value := rope.pop(key, None)) is not None:
            text[key] = value
    if kind == "dynamic" and "alpha" in rope:
        raise LoadError(f"{where}: rope_scaling of type dynamic has alpha, which ExLlamaV2 does not compute")
    if kind in ("default", "dynamic", "mrope"):
        # dynamic changes positions beyond max_position_embeddings only. mrope gives text the positions of default.
        return
    if kind in ("llama3", "yarn", *LONGROPE):
        outer = text.get(_LENGTHS, config.get(_LENGTHS))
        original = outer or rope.get(_LENGTHS) or text.get("max_position_embeddings")
        if original is not None:
            rope[_LENGTHS] = original
        if kind in LONGROPE:
            config[_LENGTHS] = original
    text["rope_scaling"] = {"rope_type": kind, **rope}


def _is_text(where: str, rope: Mapping[str, Any], key: str) -> bool:
    if not isinstance(rope[key], str):
        raise LoadError(f"{where}: the rotary embedding has {key} {rope[key]!r:.60}: must be a string")
    return True


def _of_all_layers(where: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of layers with full attention, from parameters that transformers 5 nests by layer type."""
    nested = {key: value for key, value in rope.items() if isinstance(value, dict)}
    if not nested:
        return dict(rope)
    full, sliding = (nested.get(key) for key in _BY_KIND)
    # The package gives sliding layers (of Gemma 3) the base 10,000 and no scaling, whatever config.json says.
    plain = sliding is None or (sliding.get("rope_type", "default"), sliding.get("rope_theta", 10000)) == (
        "default",
        10000,
    )
    if full is None or set(nested) - set(_BY_KIND) or not (plain or full == sliding):
        raise LoadError(f"{where}: rope_parameters differ by layer in a way that ExLlamaV2 does not compute")
    return dict(full)


def check_meaning(directory: ModelDir) -> None:
    """Raise LoadError for a config.json with which the package would compute another model than transformers."""
    name, config, text = directory.architecture, directory.config, directory.text_config
    where = f"{directory.path}/config.json"
    models = _TEXT_MODELS.get(name)
    if models and text.get("model_type") not in (None, *models):
        raise LoadError(
            f"{where}: text_config describes a model of type {text['model_type']!r:.60}, which ExLlamaV2 does not know"
        )
    for key, wanted in _COMPUTED.get(name, ()):
        value = text if text.get(key.split(".")[0]) is not None else config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None  # type: ignore[assignment]
        if value is not None and value != wanted:
            raise LoadError(f"{where}: {key} is {value!r:.60}: ExLlamaV2 computes models with {wanted!r} only")
    family = _GELU if name in _WITH_GELU else _SILU
    for key in ("hidden_activation", "hidden_act", "activation_function"):
        if (act := text.get(key)) is not None:
            if act not in family:
                raise LoadError(f"{where}: {key} is {act!r:.60}: ExLlamaV2 computes {name} with {family[0]} only")
            break
    _check_rope(where, name, text)


def _check_rope(where: str, name: str, text: Mapping[str, Any]) -> None:
    scaling = text.get("rope_scaling")
    if not isinstance(scaling, dict):
        return
    kind = scaling["rope_type"]
    known = {
        "linear": ("factor",),
        "yarn": ("factor", _LENGTHS),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTHS),
        "su": ("long_factor", "short_factor", _LENGTHS),
        "longrope": ("long_factor", "short_factor", _LENGTHS),
    }
    if kind not in known or (name == "Gemma3ForConditionalGeneration" and kind != "linear"):
        raise LoadError(
            f"{where}: rope_scaling of type {kind} is one that ExLlamaV2 leaves out without a word; it computes "
            f"{', '.join(known)}"
        )
    for key in known[kind]:
        if scaling.get(key) is None:
            raise LoadError(f"{where}: rope_scaling of type {kind} lacks {key}")
        if not key.startswith(("long_f", "short_f")) and not _positive(scaling[key]):
            raise LoadError(f"{where}: {key} of rope_scaling is {scaling[key]!r:.60}: must be a number above 0")
    for key in ("short_mscale", "long_mscale"):
        if scaling.get(key) is not None:
            raise LoadError(f"{where}: rope_scaling has {key}, which ExLlamaV2 does not compute")
    for key in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if (value := scaling.get(key)) and not _positive(value):
            raise LoadError(f"{where}: {key} of rope_scaling is {value!r:.60}: must be a number above 0")


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def check_reach(directory: ModelDir, context: int) -> None:
    """Raise LoadError for a context in which the package would compute another model than transformers."""
    text = directory.text_config
    scaling = text.get("rope_scaling")
    rope = scaling if isinstance(scaling, dict) else {}
    if not rope.get("llama_4_scaling_beta") and text.get("model_type") != "ministral3":
        return
    # transformers (modeling_ministral3) multiplies queries by 1 + beta * log(1 + position // original).
    original = rope.get(_LENGTHS)
    if not isinstance(original, int) or context > original:
        raise LoadError(
            f"{directory.path}/config.json scales its queries by their position (llama_4_scaling_beta), which "
            f"ExLlamaV2 does not compute: set max_seq_len to at most {original}, from where on the scale changes",
            key="max_seq_len",
        )


def layer_kinds(directory: ModelDir) -> list[bool]:
    """Return for each layer whether it has a sliding window, as transformers decides it."""
    name, text = directory.architecture, directory.text_config
    count = next((n for key in ("num_hidden_layers", "n_layers", "n_layer") if isinstance(n := text.get(key), int)), 0)
    window = text.get("sliding_window")
    if type(window) is not int or window < 1:
        return [False] * count
    if name.startswith(("Qwen2", "Qwen3")) and text.get("use_sliding_window") is not True:
        return [False] * count
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == count and name in _BY_LAYER:
        return [kind == "sliding_attention" for kind in kinds]
    if name in _BY_LAYER:
        pattern = _BY_LAYER[name] and (text.get("sliding_window_pattern") or _BY_LAYER[name])
        if not pattern:
            first = text.get("max_window_layers", 28)
            return [layer >= first for layer in range(count)]
        return [(layer + 1) % pattern != 0 for layer in range(count)]
    return [name in _WINDOWED] * count


_BY_LAYER = {
    "Gemma2ForCausalLM": 2,
    "Gemma3ForConditionalGeneration": 6,
    "Cohere2ForCausalLM": 4,
    "Qwen2ForCausalLM": 0,
    "Qwen3ForCausalLM": 0,
    "Qwen2VLForConditionalGeneration": 0,
    "Qwen2_5_VLForConditionalGeneration": 0,
}
"""Architectures whose layers differ: each so-many-th layer has full attention. 0: layers from max_window_layers on have
a window."""
_WINDOWED = frozenset(
    {
        "MistralForCausalLM", "Mistral3ForConditionalGeneration", "MixtralForCausalLM", "Phi3ForCausalLM",
        "Starcoder2ForCausalLM", "Qwen3MoeForCausalLM",
    }
)  # fmt: skip
"""Architectures all layers of which have the window, if config.json names one."""


def has_window(directory: ModelDir, context: int) -> bool:
    """Return whether a layer has a sliding window that is shorter than the context."""
    return any(layer_kinds(directory)) and directory.text_config["sliding_window"] < context
