"""Measure several GPUs with a worker on each: whether the workers keep to their GPUs, and their speed together.

    python -m benchmarks.several_gpus --gpus 2      (or 4, or --split, or --tensor-parallel)

Each model has a client process of its own with 32 streams. One model alone and all at once take turns; figures are
medians of five. NVML shows on which GPUs each worker's process holds memory.

With --split, ``gpu: [0, 1]`` gives some layers of one model to each of two GPUs. With --tensor-parallel each GPU gets a
part of every layer (EXL2 only). Greedy answers are compared with those of the same model on one GPU. With --split they
must be equal, since each layer is computed as on one GPU. With --tensor-parallel partial sums are added in another
order, which can change the decisions of random weights. So the log-probabilities must be alike (benchmarks.comparison).
"""

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

from benchmarks.comparison import WITH_LOGPROBS, compare
from benchmarks.harness import Server, arguments_for, entry, requests, served
from benchmarks.memory import GIB, Memory, memory
from benchmarks.report import Result, write

STREAMS, TOKENS, ROUNDS = 32, 256, 5
TARGETS = {2: ">= 1.9", 4: ">= 3.7"}
SPLIT_GB = [1.5, 16.0]
"""GB of weights and buffers per GPU. The first GPU gets less than a 1B takes, so that it has to be split."""
SPLIT_TOKENS = 48
PARALLEL_STREAMS = (1, 8)
"""Numbers of requests at once for which the speed over two GPUs is measured."""


class GroupClient:
    """A ``benchmarks.group_client`` process for one model."""

    def __init__(self, server: Server, model: str, directory: str, streams: int, tokens: int) -> None:
        command = [sys.executable, "-m", "benchmarks.group_client", server.runtime_dir, model, directory]
        self.process = subprocess.Popen(
            [*map(str, command), str(streams), str(tokens)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()

    def go(self, seed: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()

    def result(self) -> tuple[float, float, int]:
        begin, end, tokens = json.loads(self._line())
        return begin, end, tokens

    def _line(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError("a client process ended")
        return line

    def __enter__(self) -> "GroupClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # closes its stdin, which ends the process


def rate(clients: list[GroupClient], seed: int) -> float:
    """Return the tokens per second of all clients, from the first beginning to the last end."""
    for number, client in enumerate(clients):
        client.go(100 * seed + number)
    begins, ends, tokens = zip(*(client.result() for client in clients), strict=True)
    return float(sum(tokens) / (max(ends) - min(begins)))


def side_by_side(
    arguments: argparse.Namespace, entries: dict[str, dict[str, Any]], held: Memory, rounds: int, tokens: int
) -> list[Result]:
    with Server(entries) as server, ExitStack() as stack:
        clients = [
            stack.enter_context(GroupClient(server, name, made["model_dir"], STREAMS, tokens))
            for name, made in entries.items()
        ]
        rate(clients, 0)  # warms up
        pairs = [(rate(clients[:1], 2 * n + 1), rate(clients, 2 * n + 2)) for n in range(rounds)]
        results, astray = [], 0
        for name in entries:
            places = held.of(server.status(name)["pid"])
            own = int(server.status(name)["gpu"]) if arguments.gpu != "cpu" else 0
            print(f"{name} on GPU {own}: pid {server.status(name)['pid']} holds {places} (bytes by GPU)", flush=True)
            astray += sum(size for index, size in places.items() if index != own)
            results.append(Result(f"{name}: memory on its own GPU", places.get(own, 0) / GIB, "GiB"))
    together = statistics.median(b / a for a, b in pairs)
    count = len(entries)
    return [
        Result("one worker alone", statistics.median(a for a, _ in pairs), "tok/s"),
        Result(f"{count} workers on {count} GPUs at once", statistics.median(b for _, b in pairs), "tok/s"),
        Result(f"{count} workers over one alone", together, "ratio", TARGETS.get(count)),
        *results,
        Result("workers' memory on other GPUs than their own", astray / GIB, "GiB", "<= 0"),
    ]


def over_two(made: dict[str, Any], model: str, keys: dict[str, Any], held: Memory, quick: bool) -> list[Result]:
    """Compare one model over GPUs 0 and 1, by these keys of its entry, with the same on GPU 0."""
    parallel = "tensor_parallel" in keys
    label = "tensor_parallel" if parallel else "gpu: [0, 1]"
    asked = requests(model, made["model_dir"], 8 if parallel else 4, seed=9)
    fields: list[dict[str, Any]] = [request.fields | (WITH_LOGPROBS if parallel else {}) for request in asked]
    answers, rates = [], []
    with Server({"two": made | {"gpu": [0, 1]} | keys, "one": made}) as server:
        for name in ("two", "one"):
            with server.client() as client:
                answers.append([client.complete(name, max_tokens=SPLIT_TOKENS, temperature=0, **f) for f in fields])
            rates.append([speed(server, name, model, made, streams, quick) for streams in PARALLEL_STREAMS])
        status = server.wait_idle("two")
        places = held.of(status["pid"])
        how = f"{status['attention']}; {status['decoding']}"
        print(f"{label}: on {status['device']}; {how}; holds {places} (bytes by GPU)", flush=True)
    results = [Result(f"{label}: loaded in", float(status["load_seconds"]), "s")] if parallel else []
    results += [Result(f"{label}: memory on GPU {gpu}", places.get(gpu, 0) / GIB, "GiB", ">= 0.8") for gpu in (0, 1)]
    of_two, of_one = answers
    results += compare(label, "one GPU's", of_two, of_one, must_equal=not parallel)
    for streams, two, one in zip(PARALLEL_STREAMS, *rates, strict=True):
        results += [
            Result(f"{label}: {streams} streams", two, "tok/s"),
            Result(f"{label}: {streams} streams, over one GPU", two / one, "ratio"),
        ]
    return results


def speed(server: Server, name: str, model: str, made: dict[str, Any], streams: int, quick: bool) -> float:
    """Return the tokens per second of ``streams`` requests at once: the median of rounds after a warm-up."""
    rounds, tokens = (2, 24) if quick else (ROUNDS, TOKENS)
    asked = [requests(model, made["model_dir"], streams, seed=number) for number in range(rounds + 1)]
    return statistics.median([served(server, name, each, tokens).rate for each in asked][1:])


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--gpus", type=int, default=2, help="as many workers, a GPU each (default: 2)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--split", action="store_true", help="one model instead, its layers split over GPUs 0 and 1")
    how.add_argument("--tensor-parallel", action="store_true", help="one model instead, every layer split over both")
    parser.add_argument(
        "--model", help="default: 1b, or tiny with --quick; their EXL2 conversion with --tensor-parallel"
    )
    arguments = parser.parse_args()
    model = arguments.model or ("tiny" if arguments.quick else "1b") + ("-exl2" if arguments.tensor_parallel else "")
    rounds, tokens = (2, 24) if arguments.quick else (ROUNDS, TOKENS)
    held = memory(arguments.gpu)
    made = entry(arguments, model, STREAMS, STREAMS * 512)
    if arguments.split or arguments.tensor_parallel:
        name = "gpus-split" if arguments.split else "gpus-tensor-parallel"
        keys = {"gpu_split": SPLIT_GB} if arguments.split else {"tensor_parallel": True}
        write(name, over_two(made, model, keys, held, arguments.quick), arguments.out)
        return
    places = ["cpu" if arguments.gpu == "cpu" else index for index in range(arguments.gpus)]
    entries = {f"{model}-{index}": made | {"gpu": gpu} for index, gpu in enumerate(places)}
    results = side_by_side(arguments, entries, held, rounds, tokens)
    write(f"gpus-{arguments.gpus}", results, arguments.out)


if __name__ == "__main__":
    main()
