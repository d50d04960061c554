"""Several GPUs, a worker on each: whether they keep to their own, and what they make together.

    python -m benchmarks.several_gpus --gpus 2      (or 4, or --split)

Each model is asked by a client process of its own, 32 streams each; one alone and all at once take turns, medians of
five. NVML says on which GPUs each worker's process holds memory. With --split, ``gpu: [0, 1]`` splits one
model over both, and its greedy answers are compared with those of one GPU.
"""

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

from benchmarks.harness import Server, arguments_for, entry, requests
from benchmarks.memory import GIB, Memory, memory
from benchmarks.report import Result, write

STREAMS, TOKENS, ROUNDS = 32, 256, 5
TARGETS = {2: ">= 1.9", 4: ">= 3.7"}
SPLIT_GB = [1.5, 16.0]
"""Of weights and buffers per GPU: less on the first than a 1B takes, so that it has to be split."""
SPLIT_TOKENS = 48


class GroupClient:
    """``benchmarks.group_client`` for one model."""

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
        self.process.communicate()  # its stdin ends, and with it the process


def rate(clients: list[GroupClient], seed: int) -> float:
    """Tokens per second of all of them, from the first begin to the last end."""
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


def split(made: dict[str, Any], model: str, held: Memory) -> list[Result]:
    """One model over GPUs 0 and 1, against the same on GPU 0."""
    texts: list[list[list[int]]] = []
    asked = requests(model, made["model_dir"], 4, seed=9)
    two = made | {"gpu": [0, 1], "gpu_split": SPLIT_GB}
    with Server({"split": two, "whole": made}) as server:
        for name in ("split", "whole"):
            with server.client() as client:
                answers = [client.complete(name, max_tokens=SPLIT_TOKENS, temperature=0, **r.fields) for r in asked]
            texts.append([list(answer.token_ids) for answer in answers])
        places = held.of(server.status("split")["pid"])
        print(f"split over gpu: [0, 1]: {places} (bytes by GPU)", flush=True)
    same = sum(a == b for a, b in zip(*texts, strict=True))
    return [
        Result("gpu: [0, 1]: memory on GPU 0", places.get(0, 0) / GIB, "GiB", ">= 0.8"),
        Result("gpu: [0, 1]: memory on GPU 1", places.get(1, 0) / GIB, "GiB", ">= 0.8"),
        Result("gpu: [0, 1]: answers equal to one GPU's", same / len(asked), "share", ">= 1"),
    ]


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--split", action="store_true", help="one model over GPUs 0 and 1 instead")
    parser.add_argument("--model", help="default: 1b, or tiny with --quick")
    arguments = parser.parse_args()
    model = arguments.model or ("tiny" if arguments.quick else "1b")
    rounds, tokens = (2, 24) if arguments.quick else (ROUNDS, TOKENS)
    held = memory(arguments.gpu)
    made = entry(arguments, model, STREAMS, STREAMS * 512)
    if arguments.split:
        write("gpus-split", split(made, model, held), arguments.out)
        return
    places = ["cpu" if arguments.gpu == "cpu" else index for index in range(arguments.gpus)]
    entries = {f"{model}-{index}": made | {"gpu": gpu} for index, gpu in enumerate(places)}
    results = side_by_side(arguments, entries, held, rounds, tokens)
    write(f"gpus-{arguments.gpus}", results, arguments.out)


if __name__ == "__main__":
    main()
