"""Measure a captured step from launch to launch, by the tokens in the cache and the cache's mode.

    python -m benchmarks.contexts [--model 8b-exl2-rounded] [--streams 1 8] [--tokens 2000 32000] [--short 1 8 16 32 64]

Keys and values are random, so nothing is read before. Each step is replayed 30 times; the median of three such rounds
counts. "copied" is the package's way with the same quantised cache: it copies all of it to fp16 for each layer and
step. The bytes of the weights and of the cache have to be read once a step; the time of reading as many bytes, in the
same run, is the ceiling. ``--short``: streams with 128 tokens each and an FP16 cache.
"""

import gc
import itertools
import statistics
from typing import Any

from benchmarks.decoding import reading_seconds
from benchmarks.harness import arguments_for, entry, spec_of
from benchmarks.report import Result, write
from model_worker.engines.exllamav2.vram import weight_bytes
from model_worker.engines.model_dir import ModelDir

PAGE, REPLAYS, ROUNDS = 256, 30, 3
MODES = "FP16", "Q8", "Q6", "Q4"
BYTES = {"FP16": 4.0, "Q8": 2.125, "Q6": 1.625, "Q4": 1.125}
"""Bytes of a key and a value of a number, scales included."""
SHORT = 128
"""Tokens in the cache in the middle of the answers of ``benchmarks.decoding``."""
SHORT_TARGETS = {1: 2.2, 8: 2.4, 16: 2.8, 32: 3.5, 64: 5.0}
"""Steps of the 8B at 4 bits, as multiples of reading its weights once."""


def milliseconds(graphs: Any, streams: int, tokens: int) -> float:
    """Return the time of a step in which each of ``streams`` sequences has ``tokens`` tokens."""
    import numpy as np
    import torch

    from model_worker.engines.exllamav2.decode.graphs import StepRow

    pages = -(-(tokens + 1) // PAGE)
    rows = [StepRow([7], tokens, np.arange(row * pages, (row + 1) * pages, dtype=np.int32)) for row in range(streams)]
    graphs.set_streams()
    stream = graphs.stream(graphs.devices[0])
    times = []
    for _ in range(ROUNDS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(stream)
        for _ in range(REPLAYS):
            graphs.replay(rows)
        end.record(stream)
        end.synchronize()
        times.append(begin.elapsed_time(end) / REPLAYS)
    return float(statistics.median(times[1:]))


def opened(arguments: Any, mode: str, streams: int, tokens: int) -> tuple[Any, Any]:
    """Return the engine and what it has loaded, with a cache for as many sequences."""
    from model_worker.engines import build_engine

    size = streams * -(-(tokens + 1) // PAGE) * PAGE
    more = {"rope_scale": 8.0} if tokens > 7000 else {}  # else the context is the model's own
    context = min(size, tokens + 2 * PAGE)
    made = entry(arguments, arguments.model, streams, size, context, cache_mode=mode, graphs=False, **more)
    engine: Any = build_engine(spec_of(made))
    engine.load(lambda *_: None)
    loaded = engine._loaded
    for tensor in loaded.cache.all_tensors():
        if mode == "FP16":
            tensor.normal_()
        else:
            tensor.random_(0, 255)
    for tensor in () if mode == "FP16" else (*loaded.cache.key_scales, *loaded.cache.value_scales):
        tensor.fill_(1 / 700)
    return engine, loaded


def graphs_of(loaded: Any, cache: Any, streams: list[int], width: int, embedding: Any = None) -> Any:
    from model_worker.engines.exllamav2.decode.graphs import DecodeGraphs, HostEmbedding
    from model_worker.engines.exllamav2.products.modules import OwnModules

    model = loaded.model
    embedding = embedding or HostEmbedding(model.modules[0].embedding.weight.data)
    spare = loaded.cache.max_seq_len // PAGE - 1
    made = DecodeGraphs(
        model, cache, None, embedding, rows=sorted(streams), widths=[width], queries=1, spare=spare,
        own=OwnModules(model),
    )  # fmt: skip
    made.capture(lambda *_: None)
    return made


def short(arguments: Any) -> list[Result]:
    _engine, loaded = opened(arguments, "FP16", max(arguments.short), SHORT)
    size = weight_bytes(ModelDir(str(loaded.model.config.model_dir)))
    ceiling = reading_seconds(size) * 1000
    results = [Result("weights on the GPU", size / 1e9, "GB"), Result("reading the weights once", ceiling, "ms")]
    graphs = graphs_of(loaded, loaded.cache, arguments.short, 1)
    for streams in arguments.short:
        step = milliseconds(graphs, streams, SHORT)
        most = SHORT_TARGETS.get(streams) if arguments.model.startswith("8b-exl2") else None
        label = f"{streams} streams of {SHORT} tokens, FP16: step"
        target = None if most is None else f"<= {most}"
        results.append(Result(label, step, "ms"))
        results.append(Result(f"{label} over reading the weights", step / ceiling, "ratio", target))
    return results


Steps = dict[tuple[str, int, int], float]


def long(arguments: Any, mode: str, steps: Steps, each_byte: float) -> list[Result]:
    """Measure a mode of the cache. ``each_byte``: milliseconds. Steps are added to ``steps``."""
    from model_worker.engines.exllamav2.quantised_cache import in_place

    results = []
    longest = max(arguments.tokens)
    _engine, loaded = opened(arguments, mode, max(arguments.streams), longest)
    shape = loaded.model.config
    pages, why = in_place(loaded.cache, shape.num_attention_heads, 1)
    if why:
        raise SystemExit(f"{mode}: not in place: {why}")
    graphs = graphs_of(loaded, pages or loaded.cache, arguments.streams, -(-(longest + 1) // PAGE))
    numbers = shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    for streams, tokens in itertools.product(arguments.streams, arguments.tokens):
        label = f"{streams} streams of {tokens} tokens, {mode}: step"
        step = steps[mode, streams, tokens] = milliseconds(graphs, streams, tokens)
        size = weight_bytes(ModelDir(str(shape.model_dir))) + numbers * streams * tokens * BYTES[mode]
        results.append(Result(label, step, "ms"))
        results.append(Result(f"{label} over reading all", step / (each_byte * size), "ratio"))
        if mode != "FP16" and ("FP16", streams, tokens) in steps:
            target = "<= 1" if tokens >= 32_000 else None
            ratio = step / steps["FP16", streams, tokens]
            results.append(Result(f"{label} over that with FP16", ratio, "ratio", target))
    for tokens in arguments.tokens if mode == "Q8" else ():
        copied = graphs_of(loaded, loaded.cache, [1], -(-(tokens + 1) // PAGE), graphs.embedding)
        results.append(Result(f"1 streams of {tokens} tokens, Q8, copied: step", milliseconds(copied, 1, tokens), "ms"))
    return results


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--model", default="8b-exl2-rounded")
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--tokens", nargs="*", type=int, default=[2000, 32_000])
    parser.add_argument("--short", nargs="*", type=int, default=[1, 8, 16, 32, 64])
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    arguments = parser.parse_args()
    results = short(arguments) if arguments.short else []
    each_byte = reading_seconds(1 << 32) * 1000 / (1 << 32)
    steps: Steps = {}
    for mode in arguments.modes if arguments.streams else ():
        gc.collect()  # a loaded model has circles
        results += long(arguments, mode, steps, each_byte)
    write("contexts", results, arguments.out)


if __name__ == "__main__":
    main()
