"""Measure the time to the first token from nothing: `modelctl serve` against a script with the engine and nothing else.

    python -m benchmarks.start [--rounds 9]

The time is from the start of the process to the first token. One side is a client that connects as soon as there is a
socket and asks at once; its request waits while the model is loaded. The other side is ``benchmarks.bare_start``, as it
is and with the worker's settings of the garbage collector. The difference is what serving adds. Both run in turn, with
the demo models on the CPU, files in the page cache, and modules compiled. Both are also measured with an engine without
torch. Then the worker does almost nothing, and the supervisor's own part of the time remains.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import MODELCTL
from benchmarks.report import RESULTS, Result, write
from modelctl import Client
from protocol.errors import ConnectionLost
from protocol.process.paths import front_endpoint
from tests.serving import ENGINES
from tools.demo_models import corpus, directory

ROUNDS = 9
WITHIN = 120.0
POLL_S = 0.002


def bare(entry: dict[str, Any], prompt: str, *more: str) -> float:
    """Return the seconds of the bare script. ``more``: further arguments of the script."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.bare_start", entry["engine"], entry["model_dir"], "cpu", prompt, *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"token\n":
            raise RuntimeError("the bare engine made no token")
        return time.perf_counter() - begun


def served(entry: dict[str, Any], prompt: str) -> float:
    """Return the seconds through the supervisor."""
    with tempfile.TemporaryDirectory(prefix="modelctl-bench-") as scratch:
        config, runtime_dir = Path(scratch, "models.yaml"), Path(scratch, "run")
        config.write_text(yaml.safe_dump({"models": {"m": entry}}))
        begun = time.perf_counter()
        command = [*MODELCTL, "serve", "-q", "-c", str(config), "--runtime-dir", str(runtime_dir)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                with _connected(runtime_dir, begun + WITHIN) as client:
                    stream = client.generate("m", prompt, max_tokens=8, temperature=0)
                    next(delta for delta in stream if delta.token_ids)
                    took = time.perf_counter() - begun
                    stream.close()
            finally:
                process.terminate()
                process.wait(WITHIN)
    return took


def _connected(runtime_dir: Path, deadline: float) -> Client:
    socket = Path(front_endpoint(runtime_dir).removeprefix("ipc://"))
    while True:
        try:
            if socket.exists():  # a real client that tried to connect would take a third of a core meanwhile
                return Client(runtime_dir=runtime_dir)
        except ConnectionLost:
            pass
        if time.perf_counter() > deadline:
            raise TimeoutError(f"no supervisor in {runtime_dir}")
        time.sleep(POLL_S)


def measure(label: str, entry: dict[str, Any], prompt: str, rounds: int, target: str | None) -> list[Result]:
    ways = {
        "served": lambda: served(entry, prompt),
        "bare": lambda: bare(entry, prompt),
        "kept": lambda: bare(entry, prompt, "kept"),
    }
    took: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(1 + rounds):  # the first brings the files into the page cache
        order = sorted(ways, reverse=bool(number % 2))
        seconds = {way: ways[way]() for way in order}
        print(f"{label}: " + ", ".join(f"{way} {seconds[way]:.3f} s" for way in ways), flush=True)
        if number:
            for way in ways:
                took[way].append(seconds[way])
    more, more_than_kept = (
        statistics.median(a - b for a, b in zip(took["served"], took[way], strict=True)) for way in ("bare", "kept")
    )
    return [
        Result(f"{label}: first token, served", statistics.median(took["served"]), "s"),
        Result(f"{label}: first token, bare engine script", statistics.median(took["bare"]), "s"),
        Result(f"{label}: served later than bare", more, "s", target),
        Result(f"{label}: served later than bare, garbage collection as in a worker", more_than_kept, "s", target),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="one round: tries the script itself")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    results = []
    for name in ("letters", "stories"):
        entry = {"model_dir": str(directory(name)), "engine": "transformers", "gpu": "cpu"}
        results += measure(name, entry, corpus.TEST_PROMPTS[name][0][0], rounds, "<= 0.5")
    entry = {"model_dir": ".", "engine": f"{ENGINES}:DeterministicEngine"}
    results += measure("engine without torch", entry, "hello", rounds, None)
    write("start", results, arguments.out)


if __name__ == "__main__":
    main()
