"""A live supervisor with a hostile process and a well-behaved client, and a report on all three."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from tests.deterministic_engine import answer
from tests.serving import ROOT, WITHIN, Serving, engine, wait_until

TOKENS = 50


def peak(pid: int) -> int:
    """Return the peak of a process's resident memory, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class WellBehaved(threading.Thread):
    """A client that sends one request after another. ``waits`` are the seconds that each answer took."""

    def __init__(self, serving: Serving) -> None:
        super().__init__()
        self.serving, self.leaving = serving, threading.Event()
        self.waits: list[float] = []
        self.wrong: list[str] = []

    def run(self) -> None:
        with self.serving.client() as client:
            while not self.leaving.is_set():
                prompt = f"well-behaved {len(self.waits)}"
                begun = time.monotonic()
                try:
                    text = client.complete("b", prompt, max_tokens=TOKENS).text
                except Exception as e:
                    self.wrong.append(f"{prompt}: {e!r}")
                    return
                self.waits.append(time.monotonic() - begun)
                if text != answer(prompt, TOKENS):
                    self.wrong.append(f"{prompt}: {text!r}")


def attacked(seconds: float, seed: int) -> dict[str, Any]:
    """Serve two models and attack the supervisor for so many seconds.

    Returns the attacks and frames, the answers and their waits, the supervisor's growth in bytes, its counters, and the
    audit events of its process. Raises AssertionError if a worker was harmed or an answer was wrong.
    """
    with TemporaryDirectory(prefix="mctl-witness-") as directory:
        witness = Path(directory) / "seen"
        os.environ["WITNESS_TO"] = str(witness)
        models = {"a": engine(step_s=0.001, max_queue=50), "b": engine(step_s=0.001)}
        try:
            with Serving(models, script=ROOT / "tests/fuzzing/supervisor_with_witness.py") as serving:
                return _attacked(serving, witness, seconds, seed)
        finally:
            del os.environ["WITNESS_TO"]


def _attacked(serving: Serving, witness: Path, seconds: float, seed: int) -> dict[str, Any]:
    for model in "ab":  # one request to each model first, so that everything is imported
        with serving.client() as client:
            assert client.complete(model, "before", max_tokens=5).text == answer("before", 5)
    os.kill(serving.pid, signal.SIGUSR2)
    wait_until(witness.exists)
    generations = {name: serving.status(name)["generation"] for name in "ab"}
    before = max(psutil.Process(serving.pid).memory_info().rss, peak(serving.pid))
    behaved = WellBehaved(serving)
    behaved.start()
    command = [sys.executable, "-m", "tests.fuzzing.attacks", str(serving.runtime_dir), str(seconds), str(seed)]
    try:
        attacker = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + WITHIN, env=serving.environment
        )
    finally:
        behaved.leaving.set()
        behaved.join(WITHIN)
    assert attacker.returncode == 0, attacker.stderr[-3000:]
    assert not behaved.wrong, behaved.wrong
    waits = sorted(behaved.waits)
    report = {
        **json.loads(attacker.stdout),
        "answers": len(waits),
        "median_ms": round(waits[len(waits) // 2] * 1000, 1),
        "p99_ms": round(waits[int(len(waits) * 0.99)] * 1000, 1),
        "grown_bytes": peak(serving.pid) - before,
        "counters": serving.counters(),
        "seen": witness.read_text()[:3000],
    }
    serving.wait_idle("a")  # every request that reached a worker has ended
    for name, generation in generations.items():
        status = serving.status(name)
        assert (status["generation"], status["state"]) == (generation, "ready"), name
    return report
