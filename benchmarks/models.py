"""Models to measure with: Llama and Qwen3-MoE shapes with random weights, and their conversions, in a directory.

    python -m benchmarks.models [1b 8b 1b-exl2 letters-gptq ...] [--into DIR]

    1b, 8b, tiny               random weights, fp16
    mixture, 30b-a3b-2layers   random weights, fp16, 128 experts of which 8 compute each token
    letters, stories           the demo models, as they are shipped
    NAME-exl2                  an EXL2 conversion of one of these; needs ExLlamaV2 and a GPU
    NAME-exl2-rounded          EXL2 with 4 bits everywhere, made without the converter (benchmarks.exl2)
    NAME-gptq                  in GPTQ's format, 4 bits, groups of 128, symmetric (benchmarks.gptq)
    NAME-gptq-act-order        like NAME-gptq, but not symmetric, and with inputs in another order than their groups
    NAME-gptq-dequantised      the weights of NAME-gptq as fp16; NAME-gptq-act-order-dequantised is there, too

Speed and memory depend on shapes, not on the values of the weights. The weights are normally distributed with standard
deviation 0.02, which keeps activations and logits of these depths within a few units. A model that exists is not made
again.
"""

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks import exl2, gptq
from tools.demo_models import NAMES, directory

WHERE = Path(tempfile.gettempdir()) / "models"
BITS = 4.0
"""Bits per weight of conversions."""
HEAD_BITS = 6
STD = 0.02
MEASURED_LAYERS = 2
"""Layers that a conversion measures. The others have weights of the same distribution and get the same figures."""
ROWS, ROW_TOKENS = 12, 256
"""Calibration data of conversions."""
TWIN = "-dequantised"
"""Suffix of the fp16 model that has the weights of a GPTQ model."""


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama model; sizes as in config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int = 8192
    rope_theta: float = 500000.0


@dataclass(frozen=True)
class MixtureShape(Shape):
    """The shape of a Qwen3-MoE model."""

    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = True


SHAPES: dict[str, Shape] = {
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 128256),
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128256),
    "tiny": Shape(256, 512, 2, 4, 2, 64, 2048, 2048),
    "mixture": MixtureShape(256, 512, 2, 4, 2, 64, 2048, 2048, moe_intermediate_size=128),
    "30b-a3b-2layers": MixtureShape(2048, 6144, 2, 32, 4, 128, 151936),
}
"""The shapes of Llama 3.2 1B (with an output layer of its own) and Llama 3.1 8B, and one that any CPU computes; then
those of mixtures. The large mixture has two of Qwen3-30B-A3B's 48 layers."""


def source_of(name: str) -> str:
    """Return the model that ``name`` was made from: the model itself, unless it is a conversion."""
    name = name.removesuffix(TWIN)
    for suffix in ("exl2", "exl2-rounded", *gptq.SCHEMES):
        name = name.removesuffix(f"-{suffix}")
    return name


def twin_of(name: str) -> str | None:
    """Return the fp16 model with the same weights as a GPTQ model; None for another model."""
    return f"{name}{TWIN}" if name.endswith(tuple(f"-{suffix}" for suffix in gptq.SCHEMES)) else None


def path_of(name: str, where: Path = WHERE) -> Path:
    """Return the directory of a model with one of the names above. Make the model if it is not there.

    A GPTQ model and its twin are made together. Raises KeyError for another name, and CalledProcessError if a
    conversion to EXL2 fails.
    """
    if name in NAMES:
        return directory(name)
    target, source = where / name, source_of(name)
    if not (target / "config.json").exists():
        if source not in (*NAMES, *SHAPES):
            raise KeyError(name)
        where.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        if name == source:
            write_model(target, SHAPES[name])
        elif name == f"{source}-exl2":
            convert(source, target, where)
        elif name == f"{source}-exl2-rounded":
            exl2.write(path_of(source, where), target)
        else:
            quantized = name.removesuffix(TWIN)
            scheme = gptq.SCHEMES[quantized.removeprefix(f"{source}-")]
            gptq.write_both(path_of(source, where), where / quantized, where / f"{quantized}{TWIN}", scheme)
        print(f"{name}: made in {time.monotonic() - begun:.1f} s", flush=True)
    return target


def write_model(target: Path, shape: Shape, seed: int = 0, std: float = STD) -> None:
    """Write fp16 safetensors, config.json and tokenizer.json. Layer i has the same weights for any number of layers.

    std  the standard deviation of the weights. A mixture's router has its own: its logits spread by about 2 for any
         ``std``, so that a few experts get most of the weight
    """
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def weight(generator: torch.Generator, *size: int, std: float = std) -> torch.Tensor:
        return torch.empty(size, dtype=torch.half, device=device).normal_(0, std, generator=generator).cpu()

    hidden, inner = shape.hidden_size, shape.intermediate_size
    experts = shape.num_experts if isinstance(shape, MixtureShape) else 0
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    ones = torch.ones(hidden, dtype=torch.half)
    ends = torch.Generator(device).manual_seed(seed)
    tensors = {
        "model.embed_tokens.weight": weight(ends, shape.vocab_size, hidden),
        "lm_head.weight": weight(ends, shape.vocab_size, hidden),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(shape.num_hidden_layers):
        own = torch.Generator(device).manual_seed(seed + 1 + layer)
        name = f"model.layers.{layer}."
        tensors |= {
            name + "input_layernorm.weight": ones.clone(),
            name + "self_attn.q_proj.weight": weight(own, queries, hidden),
            name + "self_attn.k_proj.weight": weight(own, keys, hidden),
            name + "self_attn.v_proj.weight": weight(own, keys, hidden),
            name + "self_attn.o_proj.weight": weight(own, hidden, queries),
            name + "post_attention_layernorm.weight": ones.clone(),
        }
        if isinstance(shape, MixtureShape):
            inner, of_heads = shape.moe_intermediate_size, torch.ones(shape.head_dim, dtype=torch.half)
            tensors[name + "mlp.gate.weight"] = weight(own, experts, hidden, std=2 / hidden**0.5)
            tensors |= {name + f"self_attn.{norm}.weight": of_heads.clone() for norm in ("q_norm", "k_norm")}
        for mlp in [f"mlp.experts.{number}." for number in range(experts)] or ["mlp."]:
            tensors |= {
                name + mlp + "gate_proj.weight": weight(own, inner, hidden),
                name + mlp + "up_proj.weight": weight(own, inner, hidden),
                name + mlp + "down_proj.weight": weight(own, hidden, inner),
            }
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(target, shape.vocab_size)
    config = asdict(shape) | {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "LlamaForCausalLM"],
        "model_type": "qwen3_moe" if experts else "llama",
        "torch_dtype": "float16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2))  # last: it says that the model is complete


def write_tokenizer(target: Path, size: int) -> None:
    """Write a byte-level BPE tokenizer with exactly ``size`` ids: <s>, </s>, the bytes, and words of two to four
    letters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = list(ascii_lowercase)
    merges: list[tuple[str, str]] = [*itertools.product(words, words)]
    pairs = [a + b for a, b in merges]
    merges += itertools.product(pairs, words)
    merges += itertools.product(pairs, pairs)
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = merges[: size - len(tokens)]
    tokens += [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:2]])
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )


def convert(source: str, target: Path, where: Path = WHERE) -> None:
    """Convert a model to EXL2 with the package's own converter. Raises CalledProcessError with its output."""
    original = path_of(source, where)
    with tempfile.TemporaryDirectory(prefix="exl2-") as scratch:
        options = ["-c", _calibration(Path(scratch, "calibration.parquet")), "-l", ROW_TOKENS, "-r", ROWS]
        if source in SHAPES:
            few = Path(scratch, "few-layers")
            write_model(few, replace(SHAPES[source], num_hidden_layers=MEASURED_LAYERS))
            measured = Path(scratch, "measured.json")
            measure = ["-om", measured, "-ml", ROW_TOKENS, "-mr", max(2, ROWS // 4)]
            _converter(Path(scratch), "measuring", few, *options, *measure)
            _for_all_layers(measured, SHAPES[source].num_hidden_layers)
            options += ["-m", measured]
        else:
            options += ["-ml", ROW_TOKENS, "-mr", max(2, ROWS // 4)]
        unfinished = Path(scratch, "converted")
        _converter(Path(scratch), "converting", original, *options, "-cf", unfinished)
        shutil.move(unfinished, target)


def _converter(scratch: Path, work: str, source: Path, *options: object) -> None:
    Path(scratch, work).mkdir()
    arguments = ["-i", source, "-o", Path(scratch, work), "-b", BITS, "-hb", HEAD_BITS, *options]
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "exllamav2.conversion.convert_exl2", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=scratch,
    )  # fmt: skip
    if done.returncode or "Finished" not in done.stdout:
        print(done.stdout[-3000:], flush=True)
        raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout)
    print(f"{work}: {time.monotonic() - begun:.1f} s", flush=True)


def _calibration(file: Path) -> Path:
    """Write random words as calibration data, and return the file."""
    import pandas  # type: ignore[import-untyped]

    draw = random.Random(0)
    words = ("".join(draw.choices(ascii_lowercase, k=draw.choice((2, 4, 8)))) for _ in range(2 * ROWS * ROW_TOKENS))
    pandas.DataFrame({"text": [" ".join(words)]}).to_parquet(file, engine="fastparquet")
    return file


def _for_all_layers(file: Path, layers: int) -> None:
    """Give layer i the figures measured on layer i modulo MEASURED_LAYERS."""
    content: dict[str, Any] = json.loads(file.read_text())
    measured = content["measurement"]
    for layer in range(MEASURED_LAYERS, layers):
        like, name = f"model.layers.{layer % MEASURED_LAYERS}.", f"model.layers.{layer}."
        measured |= {name + key.removeprefix(like): v for key, v in list(measured.items()) if key.startswith(like)}
    file.write_text(json.dumps(content))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["1b", "8b", "1b-exl2", "letters-exl2"])
    parser.add_argument("--into", type=Path, default=WHERE)
    arguments = parser.parse_args()
    for name in arguments.names:
        print(path_of(name, arguments.into))


if __name__ == "__main__":
    main()
