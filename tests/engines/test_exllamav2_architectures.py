"""ExLlamaV2 computes what transformers computes, for the architectures and traits that both know.

The package's own Python runs on the CPU in fp16, around models with random weights. Each trait changes the logits
by far more than fp16 does.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from model_worker.engines.exllamav2.check import check_directory
from model_worker.engines.exllamav2.meaning import DEFAULTS, open_directory
from tests.engines.exllamav2_cpu.whole_model import logits
from tests.engines.random_model import write_tokenizer

CONTEXT = 512
IDS = torch.randint(2, 320, (1, 90), generator=torch.Generator().manual_seed(1))
COMMON = {
    "vocab_size": 320, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 192, "max_position_embeddings": CONTEXT, "initializer_range": 0.08, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {"sliding_window": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "long_factor": [1.5] * 16, "short_factor": [1.1] * 16, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_VL = {
    "text_config": COMMON | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}}
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", WINDOW),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2} | WINDOW),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 24} | WINDOW),
    "starcoder2": ("starcoder2", WINDOW),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", WINDOW),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5} | WINDOW),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.05,
            "logits_scaling": 4.0,
        },
    ),
    "glm4": ("glm4", {"head_dim": 32, "attention_bias": True}),
    "gpt2": ("gpt2", {"num_key_value_heads": 4, "intermediate_size": 512}),
    "gpt bigcode": ("gpt_bigcode", {}),
    "gemma3": (
        "gemma3",
        {
            "text_config": COMMON
            | {
                "head_dim": 32,
                "num_hidden_layers": 7,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            }
            | WINDOW,
            "vision_config": VISION,
        },
    ),
    "mistral3": (
        "mistral3",
        {
            "text_config": COMMON | {"model_type": "ministral3", "head_dim": 32},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16},
        },
    ),
    "qwen2 vl": (
        "qwen2_vl",
        QWEN_VL | {"vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 128, "num_heads": 2}},
    ),
    "qwen2.5 vl": (
        "qwen2_5_vl",
        QWEN_VL | {"vision_config": {"depth": 1, "hidden_size": 32, "out_hidden_size": 128, "num_heads": 2}},
    ),
    "yarn": ("llama", {"rope_parameters": YARN | {"beta_fast": 24.0, "mscale": 0.7, "mscale_all_dim": 1.0}}),
    "yarn, given factor": ("qwen2", {"rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False}}),
    "longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "llama3": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 5e4}}),
}


def write(path: Path, kind: str, traits: dict[str, Any]) -> torch.Tensor:
    """Write a model as transformers 5 saves it. Return its own logits for IDS."""
    torch.manual_seed(0)
    nested = "text_config" in traits
    config: Any = transformers.AutoConfig.for_model(kind, **(traits if nested else COMMON | traits))
    auto: Any = transformers.AutoModelForImageTextToText if nested else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model = model.half().float()
    model.save_pretrained(path)
    write_tokenizer(path)
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits[0]
    return found


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = write(tmp_path, *CASES[case])
    check_directory(open_directory(str(tmp_path)))
    found = logits(tmp_path, IDS, (40, 41, 70), CONTEXT, monkeypatch)[:, : expected.shape[1]]
    assert float((found - expected).abs().max()) < 0.01 * float(expected.abs().max())


def test_defaults_are_those_of_transformers() -> None:
    """Keys that are missing in config.json have the values that transformers gives them."""
    for architecture, defaults in DEFAULTS.items():
        kind = {"Gemma3ForConditionalGeneration": "gemma3_text"}.get(
            architecture, architecture.removesuffix("ForCausalLM").lower()
        )
        config = transformers.AutoConfig.for_model(kind).to_dict()
        config |= {key: value for key, value in (config["rope_parameters"] or {}).items() if key in defaults}
        assert {key: config[key] for key in defaults} == defaults, architecture


def test_older_spellings_are_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model as older libraries write it: rope_theta at the top, rope_scaling, its type named once or twice."""
    expected = write(tmp_path, *CASES["yarn"])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    for change in ({"type": "yarn"}, {}):
        file.write_text(json.dumps(config | {"rope_theta": theta, "rope_scaling": rope | change}))
        found = logits(tmp_path, IDS, (), CONTEXT, monkeypatch)
        assert float((found - expected).abs().max()) < 0.01 * float(expected.abs().max())
        rope["type"] = rope.pop("rope_type", "yarn")
