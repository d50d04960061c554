"""What a model directory holds besides the weights: the tokenizer and the small JSON files, written by hand.

Both engines read these directories. ``rope_theta`` therefore stands at the top level of config.json and nothing there
says ``rope_parameters`` or ``rope_scaling``; the head has weights of its own (``tie_word_embeddings`` false), so that
every tensor that an engine may look for is in the file; and all the widths are multiples of 32.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CONTEXT: Final = 2048
PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS: Final = {
    "letters": ("<pad>", "<s>", "</s>"),
    "stories": ("<pad>", "<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
}
"""By id, from 0."""

VOCABULARY: Final = {"letters": 448, "stories": 640}
"""Tokens at most; what the training text does not fill up to a multiple of 32 is made of reserved tokens."""

ADDS_BOS: Final = {"letters": True, "stories": False}
"""Whether encoding a prompt puts BOS in front. It does not for ``stories``, whose chat template writes it."""

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('only the first message may be a system message') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_WORDS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
"""Pieces that are never merged with each other: words, single digits, punctuation, white space."""

_NOT_MERGED = re.compile(r"[^\x00-\x7f]+|<\|\w+\|>|<s>")


def train_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer for arbitrary text, trained on ``texts``.

    Only their ASCII part is looked at: every other character stays in as many tokens as it has UTF-8 bytes, and so a
    stream of them has to be put together from parts.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY[name],
        min_frequency=50,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS[name]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in _NOT_MERGED.split(text)), trainer)
    missing = -tokenizer.get_vocab_size() % 32
    tokenizer.add_special_tokens(
        [AddedToken(f"<|reserved_{i}|>", special=True, normalized=False) for i in range(missing)],
    )
    if ADDS_BOS[name]:
        bos = SPECIAL_TOKENS[name][BOS]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, BOS)]
        )
    return tokenizer


def write_directory(name: str, out: Path, tokenizer: Tokenizer) -> None:
    """Write everything but ``model.safetensors`` into ``out``, which is made where it is missing."""
    out.mkdir(parents=True, exist_ok=True)
    special = SPECIAL_TOKENS[name]
    tokenizer.save(str(out / "tokenizer.json"))
    tokens = {"bos_token": special[BOS], "eos_token": special[EOS], "pad_token": special[PAD]}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "add_bos_token": ADDS_BOS[name],
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        **tokens,
    }
    if name == "stories":
        settings["chat_template"] = CHAT_TEMPLATE
    _write(out / "tokenizer_config.json", settings)
    _write(out / "special_tokens_map.json", tokens)
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    _write(out / "generation_config.json", {**ids, "do_sample": False})
    _write(
        out / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "float16",
            **ids,
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rope_theta": 100000.0,
            "rms_norm_eps": 1e-05,
            "initializer_range": 0.02,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "use_cache": True,
        },
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
