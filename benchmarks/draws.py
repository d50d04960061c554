"""Measure the draw of a batch on the GPU, against reading its fp16 logits once.

    python -m benchmarks.draws          needs a CUDA device; about a minute

1, 8, 32 and 128 rows of 128,256 logits. A row is normally distributed logits with a deviation of 3, which is about as
peaked as a language model's. "flat" has equal logits and top_p 0.9: its candidates do not fit into the kernels' buffer.
Times are medians of replays of a CUDA graph with 20 draws, per draw. The ceiling is PyTorch's maximum of each row.
"""

import argparse
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from model_worker.engines.draw_rule.batched import BatchedDraws
from protocol.request import SamplingParams

VOCAB, REPEATS = 128_256, 20
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "flat, top_p 0.9": {"top_p": 0.9},
}
TARGETS = {("greedy", 32): "<= 15"} | {(name, 32): "<= 40" for name in ("temperature", "top_p 0.9", "min_p 0.05")}


def microseconds(call: Callable[[], object], repeats: int = REPEATS, replays: int = 15) -> float:
    """Return the median time on the device of one call in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(replays):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1000 / repeats)
    return float(statistics.median(times[3:]))


def measure(rows: int) -> list[report.Result]:
    rng = random.Random(0)
    torch.manual_seed(0)
    logits = (3 * torch.randn(rows, VOCAB, device="cuda")).half()
    ceiling = microseconds(lambda: logits.amax(1))
    results = [report.Result(f"{rows} rows: reading the logits once", round(ceiling, 1), "us")]
    for name, fields in SETTINGS.items():
        drawing = BatchedDraws(rows, VOCAB, VOCAB, (), "cuda")
        for row in range(rows):
            drawing.set_row(row, drawing.assign(SamplingParams(**fields)), rng.getrandbits(53))
        drawing.send()
        given = torch.ones_like(logits) if name.startswith("flat") else logits

        def draw(drawing: BatchedDraws = drawing, given: torch.Tensor = given) -> None:
            drawing.launch(given, rows)

        time = microseconds(draw)
        results.append(report.Result(f"{rows} rows: {name}", round(time, 1), "us", TARGETS.get((name, rows))))
        results.append(report.Result(f"{rows} rows: {name}, over reading", round(time / ceiling, 2), "ratio"))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    report.write("draws", [result for rows in (1, 8, 32, 128) for result in measure(rows)], arguments.out)


if __name__ == "__main__":
    main()
