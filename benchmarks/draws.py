"""Measure the draws of a step on the GPU: microseconds for all rows together, by kind of request.

    python -m benchmarks.draws

The ceiling is the time of reading the logits once (fp16, 128,256 ids), measured in the same run. Launches are captured
as a CUDA graph, as they are in a step. Peaked rows are like those of a trained model, flat ones like random weights.
"""

import statistics
from functools import partial
from typing import Any

import numpy as np

from benchmarks.report import RESULTS, Result, write
from protocol.request import SamplingParams

VOCAB, ROWS = 128_256, (1, 8, 32, 128)
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "repetition penalty": {"temperature": 0.8, "repetition_penalty": 1.1},
}


def seconds(run: Any) -> float:
    """Return the median seconds of a call that queues work, as a captured graph."""
    import torch

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        times = []
        for _ in range(50):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
    return float(statistics.median(times))


def main() -> None:
    import argparse
    from pathlib import Path

    import torch

    from model_worker.engines.exllamav2.gpu_draws.batched import BatchedDraws, RowDraw, write_words
    from model_worker.engines.exllamav2.gpu_draws.rule import rule_of

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    results = []
    for count in ROWS:
        batched = BatchedDraws(count, VOCAB, VOCAB, "cuda")
        peaked = np.minimum(rng.gumbel(0, 2.2, (count, VOCAB)), 22).astype(np.float16)
        flat = rng.normal(0, 1, (count, VOCAB)).astype(np.float16)
        for shape, logits in (("peaked", peaked), ("flat", flat)):
            tensor = torch.from_numpy(logits).cuda()
            reading = seconds(partial(tensor.view(torch.float32).sum, -1))
            results.append(Result(f"{count} rows, {shape}: reading the logits once", reading * 1e6, "us"))
            for name, options in REQUESTS.items():
                rule = rule_of(SamplingParams(**options), VOCAB)
                slot = 0 if rule.needs_history else -1
                words = torch.zeros(count, batched.words.shape[1], dtype=torch.int32)
                points = rng.integers(0, 1 << 53, count)
                draws = [RowDraw(rule, slot + row if slot >= 0 else -1, 100, int(points[row])) for row in range(count)]
                write_words(words.numpy(), draws)
                batched.words.copy_(words)
                taken = seconds(partial(batched.launch, tensor, count))
                results.append(Result(f"{count} rows, {shape}, {name}", taken * 1e6, "us"))
    write("draws", results, arguments.out)


if __name__ == "__main__":
    main()
