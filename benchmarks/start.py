"""Time to the first token from nothing: `modelctl serve`, against a script that has the same engine and nothing else.

    python -m benchmarks.start [--rounds 9]

From the start of the process to the first token: at a client that connects as soon as there is a socket and asks at
once (its request waits while the model is loaded), and in ``benchmarks.bare_start``. Both in turns, the demo models on
the CPU, files in the page cache. The supervisor's own part is what is left when the worker does nothing: the same with
an engine without torch, of which the bare script is one as well.
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
from model_worker.demo_models import corpus, directory
from protocol import Client
from protocol.errors import ConnectionLost
from tests.serving import ENGINES

ROUNDS = 9
WITHIN = 120.0
POLL_S = 0.002


def bare(entry: dict[str, Any], prompt: str) -> float:
    """Seconds."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.bare_start", entry["engine"], entry["model_dir"], "cpu", prompt]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"token\n":
            raise RuntimeError("the bare engine made no token")
        return time.perf_counter() - begun


def served(entry: dict[str, Any], prompt: str) -> float:
    """Seconds."""
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
    while True:
        try:
            return Client(runtime_dir=runtime_dir)
        except ConnectionLost:
            if time.perf_counter() > deadline:
                raise
            time.sleep(POLL_S)


def measure(label: str, entry: dict[str, Any], prompt: str, rounds: int, target: str | None) -> list[Result]:
    with_us, without = [], []
    for number in range(1 + rounds):  # the first brings the files into the page cache
        pair = served(entry, prompt), bare(entry, prompt)
        print(f"{label}: served {pair[0]:.3f} s, bare {pair[1]:.3f} s", flush=True)
        if number:
            with_us.append(pair[0])
            without.append(pair[1])
    more = statistics.median(a - b for a, b in zip(with_us, without, strict=True))
    return [
        Result(f"{label}: first token, served", statistics.median(with_us), "s"),
        Result(f"{label}: first token, bare engine script", statistics.median(without), "s"),
        Result(f"{label}: served later than bare", more, "s", target),
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
