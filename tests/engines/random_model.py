"""Write small models with random weights, for architectures that the demo models do not have."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128},
    "qwen2": {"num_key_value_heads": 2, "intermediate_size": 96, "use_sliding_window": False},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 48, "intermediate_size": 96},
    "gpt2": {},
    "gptj": {"rotary_dim": 8},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "sliding_window": 512},
    "phi3": {"num_key_value_heads": 2, "intermediate_size": 96, "pad_token_id": 0, "sliding_window": None},
    "mistral": {"num_key_value_heads": 2, "intermediate_size": 96, "sliding_window": None},
}
ARCHITECTURES = tuple(_SHAPES)


def write_tokenizer(directory: Path) -> int:
    """Write a byte-level tokenizer.json with <s> 0 and </s> 1. Return the size of its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return int(tokenizer.get_vocab_size())


def write_model(directory: Path, architecture: str = "llama", **changes: Any) -> None:
    """Write a model of two layers with hidden size 64. Its random weights are equal in every run."""
    directory.mkdir(exist_ok=True)
    common = {
        "vocab_size": write_tokenizer(directory),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.5,  # large enough that greedy answers have clear margins
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config = transformers.AutoConfig.for_model(architecture, **(common | _SHAPES[architecture] | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file. A value of None removes the key."""
    value = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))
