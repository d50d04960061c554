"""Write the files of a model directory besides the weights: the tokenizer and the small JSON files.

Both engines read these directories. Therefore ``rope_theta`` is at the top level of config.json, which has neither
``rope_parameters`` nor ``rope_scaling``. The head has weights of its own (``tie_word_embeddings`` false), so that the
file has every tensor that an engine may look for. All widths are multiples of 32.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.demo_models.agent_chat import CHAT_TEMPLATE as AGENT_TEMPLATE

CONTEXT: Final = 2048
PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS: Final = {
    "letters": ("<pad>", "<s>", "</s>"),
    "stories": ("<pad>", "<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
    "agent": ("<pad>", "<s>", "<|im_end|>", "<|im_start|>"),
}
"""The special tokens of each model, in the order of their ids, from 0."""

MARKERS: Final = {
    "agent": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
}
"""Tokens of a model that are one token each, but not special: decoding shows them, as with most models that have them.
Their ids follow those of the vocabulary."""

VOCABULARY: Final = {"letters": 448, "stories": 640, "agent": 762}
"""Most tokens of each model. Reserved tokens fill the vocabulary up to a multiple of 32."""

ADDS_BOS: Final = {"letters": True, "stories": False, "agent": False}
"""True if encoding a prompt puts BOS in front. The chat template of ``stories`` writes BOS; chats of ``agent`` begin
without it."""

SHAPES: Final[dict[str, dict[str, int]]] = {
    "letters": {"layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 704},
    "stories": {"layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 704},
    "agent": {"layers": 6, "heads": 8, "kv_heads": 4, "head_dim": 32, "intermediate": 512},
}

STORIES_TEMPLATE: Final = (
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

CHAT_TEMPLATES: Final = {"stories": STORIES_TEMPLATE, "agent": AGENT_TEMPLATE}

_WORDS: Final = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
"""Pieces that are never merged with each other: words, single digits, punctuation, white space."""

_COPIED_WORDS: Final = r"\": \{\"|\": \"|\", \"|\"\}|\p{L}+|\p{N}|\s|[^\s\p{L}\p{N}]"
"""The pieces of ``agent``: some punctuation of JSON, words without a blank before them, and single characters. So a
word has the same tokens in a question, in a schema, in a call and in an answer, and can be copied token by token."""

PIECES: Final = {"letters": _WORDS, "stories": _WORDS, "agent": _COPIED_WORDS}

_NOT_MERGED = re.compile(r"[^\x00-\x7f]+|<\|\w+\|>|<s>|</?(?:think|tool_call|tool_response)>")


def train_tokenizer(name: str, texts: Iterable[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer for arbitrary text, trained on ``texts``.

    The training uses only the ASCII part of the texts. So every other character takes as many tokens as it has UTF-8
    bytes, and a stream has to put such characters together from parts.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES[name]), "isolated"),
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
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS.get(name, ())])
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
    """Write everything but ``model.safetensors`` into the directory ``out``. Make the directory if it is missing."""
    out.mkdir(parents=True, exist_ok=True)
    special, shape = SPECIAL_TOKENS[name], SHAPES[name]
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
    if name in CHAT_TEMPLATES:
        settings["chat_template"] = CHAT_TEMPLATES[name]
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
            "intermediate_size": shape["intermediate"],
            "num_hidden_layers": shape["layers"],
            "num_attention_heads": shape["heads"],
            "num_key_value_heads": shape["kv_heads"],
            "head_dim": shape["head_dim"],
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
