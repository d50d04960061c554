"""A hostile process at a live supervisor's sockets, for some seconds: it lives, stays small, runs nothing of what it is
sent, and the client beside it does not notice. MODELCTL_FUZZ_SECONDS makes it longer."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from tests.deterministic_engine import answer
from tests.serving import ROOT, WITHIN, Serving, engine, wait_until

SEED = int(os.environ.get("TEST_SEED", random.randrange(2**32)))
SECONDS = float(os.environ.get("MODELCTL_FUZZ_SECONDS", "6"))
MAX_GROWTH = 64 << 20
"""Several of the largest frames that are taken may be on their way in at once, and malloc keeps some."""
TOKENS = 50


def peak(pid: int) -> int:
    """Most bytes that a process has had in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class WellBehaved(threading.Thread):
    """Asks again and again. ``waits`` are the seconds that each answer took."""

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


def test_hostile_frames_at_a_live_supervisor(monkeypatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    print(f"TEST_SEED={SEED} MODELCTL_FUZZ_SECONDS={SECONDS:g}")
    witness = tmp_path / "seen"
    monkeypatch.setenv("WITNESS_TO", str(witness))
    models = {"a": engine(step_s=0.001, max_queue=50), "b": engine(step_s=0.001)}
    with Serving(models, script=ROOT / "tests/fuzzing/supervisor_with_witness.py") as serving:
        with serving.client() as client:  # once the whole road, so that all is imported
            assert client.complete("b", "before", max_tokens=5).text == answer("before", 5)
        os.kill(serving.pid, signal.SIGUSR2)
        wait_until(witness.exists)
        generations = {name: serving.status(name)["generation"] for name in models}
        before, start = psutil.Process(serving.pid).memory_info().rss, peak(serving.pid)
        behaved = WellBehaved(serving)
        behaved.start()
        command = [sys.executable, "-m", "tests.fuzzing.attacks", str(serving.runtime_dir), str(SECONDS), str(SEED)]
        try:
            attacker = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS + WITHIN, env=serving.environment
            )
        finally:
            behaved.leaving.set()
            behaved.join(WITHIN)
        assert attacker.returncode == 0, attacker.stderr[-3000:]
        assert not behaved.wrong, behaved.wrong
        grown = max(psutil.Process(serving.pid).memory_info().rss - before, peak(serving.pid) - max(before, start))
        waits = sorted(behaved.waits)
        counters = serving.counters()
        told = {
            **json.loads(attacker.stdout),
            "answers": len(waits),
            "median_ms": round(waits[len(waits) // 2] * 1000, 1),
            "p99_ms": round(waits[int(len(waits) * 0.99)] * 1000, 1),
            "grown_mib": round(grown / (1 << 20), 1),
            "counters": counters,
        }
        print(json.dumps(told))
        assert len(waits) > 5
        assert not (seen := witness.read_text()), seen[:3000]
        assert grown < MAX_GROWTH, f"the supervisor grew by {grown >> 20} MiB"
        assert counters["bad_frames"] > 100
        assert counters["worker_frames_dropped"] > 100
        # whatever reached a worker ended as a request does
        serving.wait_idle("a")
        for name, generation in generations.items():
            assert (serving.status(name)["generation"], serving.status(name)["state"]) == (generation, "ready"), name
