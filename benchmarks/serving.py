"""Measure the cost of serving: a model through client, sockets and supervisor, against the same model without serving.

    make bench          or: python -m benchmarks.serving --engine exllamav2 --gpu 0 [--models 1b 8b 1b-exl2]

The other side is, for ExLlamaV2, the package's own dynamic generator driven in this process (its jobs, its sampling,
its text), and for transformers the engine alone. Both compute greedy answers to the same prompts in the same run, in
turn. Figures are medians of ROUNDS rounds, those of first tokens of FIRST_ROUNDS. Machines are noisy, so look at the
ratios.

Smooth: the 99th percentile of the time between two deltas of a stream at the client, while all streams run, divided by
the 99th percentile of the generator's own step while it computes as many jobs. Burst at the end: the speed of the last
tenth of a stream divided by the speed of the whole stream, while all streams ran; the largest of all streams.
"""

import statistics
from typing import Any

import psutil

from benchmarks.bare import bare
from benchmarks.harness import Run, Server, arguments_for, entry, percentile, quiet_heap, requests, served
from benchmarks.report import Result, write

ROUNDS = 5
FIRST_ROUNDS, FEW_TOKENS = 21, 4
"""Rounds of short answers, for the time to the first token."""
CONCURRENT = (1, 8, 32)
TOKENS = {"transformers": 160, "exllamav2": 256}
CACHE_SIZE = max(CONCURRENT) * 512


def measure(server: Server, model: str, made: dict[str, Any], quick: bool, rounds: int) -> list[Result]:
    """Measure one model. ``made`` is its entry of models.yaml. On the GPU these figures have targets."""
    gpu = made["engine"] == "exllamav2"
    tokens = 24 if quick else TOKENS[made["engine"]]
    other = bare(made)
    quiet_heap()
    results = []
    label = f"{model}, " if gpu else ""
    for count in CONCURRENT:
        pairs: list[tuple[Run, Run]] = []
        for number in range(1 + (1 if quick else rounds)):
            asked = requests(model, made["model_dir"], count, seed=number)
            without = other.run(asked, tokens)
            through = served(server, model, asked, tokens)
            if number:  # the first one warms up
                pairs.append((through, without))
        later = []
        for number in range(2 if quick else FIRST_ROUNDS):
            asked = requests(model, made["model_dir"], count, seed=100 + number)
            later.append(-other.run(asked, FEW_TOKENS).first + served(server, model, asked, FEW_TOKENS).first)
        results += _figures(f"{label}{count} streams: ", pairs, later, gpu, smooth=count == max(CONCURRENT))
    other.close()
    return results


def _figures(label: str, pairs: list[tuple[Run, Run]], later: list[float], targets: bool, smooth: bool) -> list[Result]:
    """Return figures of rounds (served, bare), and of the seconds by which first tokens came later."""
    kind = "generator" if targets else "engine"
    ratio = statistics.median(s.rate / b.rate for s, b in pairs)
    results = [
        Result(f"{label}tokens/s served", statistics.median(s.rate for s, _ in pairs), "tok/s"),
        Result(f"{label}tokens/s, bare {kind} in one process", statistics.median(b.rate for _, b in pairs), "tok/s"),
        Result(f"{label}served over bare", ratio, "ratio", ">= 0.97" if targets else None),
        Result(
            f"{label}first token later than bare", statistics.median(later) * 1000, "ms", "<= 2" if targets else None
        ),
    ]
    gaps, steps = [gap for s, _ in pairs for gap in s.gaps()], [step for _, b in pairs for step in b.steps]
    if smooth and len(gaps) > 1 and len(steps) > 1:
        gap, step = percentile(gaps, 99), percentile(steps, 99)
        burst = max(s.last_tenth() for s, _ in pairs)
        results += [
            Result(f"{label}{kind}'s own step, p99", step * 1000, "ms"),
            Result(f"{label}gap between deltas, p99", gap * 1000, "ms"),
            Result(f"{label}gap over step, both p99", gap / step, "ratio", "<= 1.3" if targets else None),
            Result(f"{label}last tenth of a stream over its rate", burst, "ratio", "<= 1.3" if targets else None),
            Result(f"{label}tokens with an answer's end, most", max(s.last_delta() for s, _ in pairs), "tokens"),
        ]
    return results


def main() -> None:
    parser = arguments_for(__doc__)
    parser.set_defaults(engine="transformers", gpu="cpu")
    parser.add_argument("--models", nargs="+", help="default: stories for transformers, else 1b 8b 1b-exl2")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    default = ["stories"] if arguments.engine == "transformers" else ["1b", "8b", "1b-exl2"]
    results: list[Result] = []
    for model in arguments.models or default:
        made = entry(arguments, model, max(CONCURRENT), CACHE_SIZE)
        with Server({model: made}) as server:
            results += measure(server, model, made, arguments.quick, arguments.rounds)
            process = psutil.Process(server.overview()["supervisor"]["pid"])
            last = [
                Result("modelctl ps", statistics.median(server.modelctl("ps") for _ in range(ROUNDS)), "s", "<= 0.2"),
                Result("supervisor's memory (RSS) after serving", process.memory_info().rss / 1e6, "MB", "<= 80"),
            ]
        write(f"serving-{arguments.engine}", results + last, arguments.out)  # also when a later model fails


if __name__ == "__main__":
    main()
