"""Measure llama.cpp's llama-batched-bench with 4-bit weights of the shapes in ``benchmarks.models``, for comparison.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36   # its source has llama.cpp's
    python -m benchmarks.llama_cpp --source llama_cpp_python-0.3.36.tar.gz [--models 8b] [--streams 1 8 32] [--cpu]

The program is built here, with cmake and, for a GPU, nvcc. The model is a GGUF file with random blocks of Q4_K (4.5
bits per weight) and an output layer in Q6_K, as Q4_K_S has them. Speed depends on shapes and formats, not on values.

llama-batched-bench has no server, no sampling and no text: its rate is that of decoding alone, over answers of equal
length. So beside it stands the rate at the client that ``benchmarks.contexts`` measures, without reading the prompts.
"""

import argparse
import json
import subprocess
import tarfile
from pathlib import Path

import gguf
import numpy

from benchmarks.decoding import reading_seconds
from benchmarks.models import SHAPES, WHERE, Shape
from benchmarks.report import RESULTS, Result, write

PROMPT, TOKENS, CONTEXT = 64, 256, 512
SCALE = 2.0**-13
"""Scale of the scales in a block: with it the weights have a standard deviation of about 0.02."""
Q4_K, Q6_K = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
PARTS = ("CMakeLists.txt", "cmake", "common", "ggml", "include", "src", "tools", "vendor")
"""The parts of llama.cpp's source that the program needs."""


def build(source: Path, where: Path, *, cuda: bool) -> Path:
    """Return llama-batched-bench, built from llama-cpp-python's source package or from a directory of llama.cpp."""
    program = where / "build" / "bin" / "llama-batched-bench"
    if program.exists():
        return program
    if source.is_file():
        with tarfile.open(source) as package:
            package.extractall(where, members=[m for m in package if _is_needed(m.name)], filter="data")
        (source,) = where.glob("*/vendor/llama.cpp")
    options = {
        "CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "OFF", "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_SERVER": "OFF", "GGML_CUDA": "ON" if cuda else "OFF",
        "CMAKE_CUDA_ARCHITECTURES": "native",
    }  # fmt: skip
    made = str(where / "build")
    defined = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run(["cmake", "-S", str(source), "-B", made, *defined], check=True)
    subprocess.run(["cmake", "--build", made, "--target", "llama-batched-bench", "--parallel"], check=True)
    return program


def _is_needed(name: str) -> bool:
    parts = name.split("/")
    return parts[1:3] == ["vendor", "llama.cpp"] and (len(parts) == 3 or parts[3] in PARTS)


def blocks(rng: numpy.random.Generator, rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> numpy.ndarray:
    """Return random quantised weights, uint8 [rows, bytes of a row].

    A block of 256 weights in Q4_K is two fp16 scales and 140 bytes, in Q6_K 208 bytes and a scale (ggml-common.h).
    """
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    count = rows * columns // weights
    made = rng.integers(0, 256, (count, size), dtype=numpy.uint8)
    if kind is Q4_K:
        made[:, :4] = numpy.array([SCALE, SCALE * 7.5], numpy.float16).view(numpy.uint8)
    else:
        made[:, 192:208] &= 0x1F  # the scales are signed
        made[:, 208:] = numpy.array([SCALE / 4], numpy.float16).view(numpy.uint8)
    return made.reshape(rows, -1)


def write_model(path: Path, shape: Shape) -> None:
    """Write a Llama of this shape."""
    rng = numpy.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    layer = {
        "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
        "attn_output": (hidden, queries), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }  # fmt: skip
    tensors = {"token_embd": (shape.vocab_size, hidden, Q4_K), "output": (shape.vocab_size, hidden, Q6_K)}
    for number in range(shape.num_hidden_layers):
        tensors |= {f"blk.{number}.{name}": (*sizes, Q4_K) for name, sizes in layer.items()}
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{number}.{norm}.weight", numpy.ones(hidden, numpy.float32))
    writer.add_tensor("output_norm.weight", numpy.ones(hidden, numpy.float32))
    for name, (rows, columns, kind) in tensors.items():
        writer.add_tensor(f"{name}.weight", blocks(rng, rows, columns, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(program: Path, model: Path, name: str, streams: list[int], *, cuda: bool) -> list[Result]:
    """Return the rates of decoding, and the steps as multiples of the time in which the weights are read."""
    command = [
        str(program), "-m", str(model), "-c", str(max(streams) * CONTEXT), "-npp", str(PROMPT), "-ntg", str(TOKENS),
        "-npl", ",".join(map(str, streams)), "-ngl", "99" if cuda else "0", "-fa", "on", "--output-format", "jsonl",
    ]  # fmt: skip
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    size = model.stat().st_size
    results = [Result(f"{name}: the file", size / 1e9, "GB")]
    if cuda:
        reading = reading_seconds(size)
        results.append(Result(f"{name}: reading as many bytes once", reading * 1000, "ms"))
    for each in found:
        label, step = f"{name}, {each['pl']} streams", each["pl"] / each["speed_tg"]
        results.append(Result(f"{label}: tokens/s of llama-batched-bench", each["speed_tg"], "tokens/s"))
        results.append(Result(f"{label}: step", step * 1000, "ms"))
        if cuda:
            results.append(Result(f"{label}: step", step / reading, "x"))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="llama-cpp-python's sdist, or llama.cpp's directory")
    parser.add_argument("--models", nargs="+", default=["8b"], choices=SHAPES)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--cpu", action="store_true", help="without CUDA: tries the script itself")
    parser.add_argument("--where", type=Path, default=WHERE / "llama.cpp", help="where the program and models are made")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    arguments.where.mkdir(parents=True, exist_ok=True)
    program = build(arguments.source, arguments.where, cuda=not arguments.cpu)
    results: list[Result] = []
    for name in arguments.models:
        path = arguments.where / f"{name}-q4_k.gguf"
        if not path.exists():
            write_model(path, SHAPES[name])
        results += measure(program, path, f"{name} Q4_K", arguments.streams, cuda=not arguments.cpu)
    write("llama-cpp", results, arguments.out)


if __name__ == "__main__":
    main()
