"""Measure a step of decoding: captured as a CUDA graph, one kernel at a time, and the package's own generator.

    python -m benchmarks.decoding [--models 1b 8b 1b-exl2-rounded 8b-exl2-rounded] [--streams 1 8 32 64 128]

A step has to read all weights once, so the measure of a step is the time of reading as many bytes, in the same run. The
step is the median of the gaps between two tokens of a stream at the client, while all streams run. All three serve the
same greedy requests in turn. Rates include reading the prompts, of 64 tokens each. The median round counts.

Figures of other models that the same machine and commit have left in the result file stay there.
"""

import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.bare import bare
from benchmarks.harness import Request, Run, Server, arguments_for, entry, quiet_heap, requests, served
from benchmarks.report import Result, commit, machine, write
from model_worker.engines.exllamav2.vram import weight_bytes
from model_worker.engines.model_dir import ModelDir

STREAMS = (1, 8, 32, 64, 128)
TOKENS, PAGES = 128, 256
ROUNDS = 2
"""Rounds that count. One more comes first."""
MOST_STEPS = {
    "1b": {1: 2.2, 32: 3.0},
    "8b": {1: 1.5, 32: 1.8},
    "1b-exl2": {1: 4.5, 32: 20.0},
    "1b-exl2-rounded": {1: 4.5, 32: 20.0},
}
"""Targets: the step by the number of streams, as a multiple of the time in which the weights are read once."""


def reading_seconds(size: int) -> float:
    """Return the seconds in which the GPU reads ``size`` bytes: the least of several sums over as much memory."""
    import torch

    numbers = torch.zeros(size // 4, dtype=torch.float32, device="cuda")
    seconds = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        numbers.sum()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    del numbers
    torch.cuda.empty_cache()
    return float(min(seconds))


def best(runs: list[Run]) -> Run:
    return sorted(runs, key=lambda run: run.rate)[len(runs) // 2]


def step(run: Run) -> float:
    """Return the median gap in seconds, of gaps that are no part of a pair that came together."""
    gaps = [gap for gap in run.gaps() if gap > 1e-4]
    return statistics.median(gaps) if gaps else 0.0


def measure(server: Server, name: str, made: dict[str, Any], streams: list[int], rounds: int) -> list[Result]:
    """Measure one model, which the server serves as ``name`` and ``name-uncaptured``."""
    directory = made["model_dir"]
    size = weight_bytes(ModelDir(directory))
    ceiling = reading_seconds(size)
    results = [
        Result(f"{name}: weights on the GPU", size / 1e9, "GB"),
        Result(f"{name}: reading the weights once", ceiling * 1000, "ms"),
    ]
    other = bare(made)
    quiet_heap()
    for count in streams:
        asked: list[list[Request]] = [requests(name, directory, count, seed=number) for number in range(rounds + 1)]
        runs: dict[str, list[Run]] = {"graphs": [], "uncaptured": [], "package": []}
        for number, some in enumerate(asked):
            one = {
                "package": other.run(some, TOKENS),
                "uncaptured": served(server, f"{name}-uncaptured", some, TOKENS),
                "graphs": served(server, name, some, TOKENS),
            }
            if number:
                for kind, run in one.items():
                    runs[kind].append(run)
        graphs, uncaptured, package = (best(runs[kind]) for kind in ("graphs", "uncaptured", "package"))
        most = MOST_STEPS.get(name, {}).get(count)
        label = f"{name}, {count} streams: "
        results += [
            Result(f"{label}tokens/s with graphs", graphs.rate, "tok/s"),
            Result(f"{label}tokens/s with graphs: false", uncaptured.rate, "tok/s"),
            Result(f"{label}tokens/s of the package's generator", package.rate, "tok/s"),
            Result(f"{label}graphs over graphs: false", graphs.rate / uncaptured.rate, "ratio"),
            Result(f"{label}step with graphs", step(graphs) * 1000, "ms"),
            Result(f"{label}step with graphs: false", step(uncaptured) * 1000, "ms"),
            Result(
                f"{label}step over reading the weights once",
                step(graphs) / ceiling,
                "ratio",
                None if most is None else f"<= {most}",
            ),
        ]
    other.close()
    return results


def others(directory: Path, models: list[str]) -> list[Result]:
    """Return the figures of other models in the result file, if the same machine and commit have measured them."""
    path = directory / "decoding.json"
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    if (content["machine"], content["commit"]) != (machine(), commit()):
        return []
    found = [Result(*(result[key] for key in ("name", "value", "unit", "target"))) for result in content["results"]]
    return [result for result in found if re.split(r"[,:]", result.name)[0] not in models]


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--models", nargs="+", default=["1b", "8b", "1b-exl2-rounded", "8b-exl2-rounded"])
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    results = others(arguments.out, arguments.models)
    for model in arguments.models:
        most = max(arguments.streams)
        made = entry(arguments, model, most, max(most, 8) * 2 * PAGES)
        with Server({model: made, f"{model}-uncaptured": made | {"graphs": False}}) as server:
            results += measure(server, model, made, arguments.streams, arguments.rounds)
        write("decoding", results, arguments.out)  # also when a later model fails


if __name__ == "__main__":
    main()
