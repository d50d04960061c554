"""Run ``python -m tests.fuzzing`` from a test."""

import json
import os
import random
import subprocess
import sys
from typing import Any

from tests.serving import ROOT

SEED = int(os.environ.get("TEST_SEED", random.randrange(2**32)))
WITHIN = 280.0
TIMES = int(os.environ.get("FUZZ_TIMES", 1))
"""How many times as many inputs as usual."""


def fuzz(direction: str, count: int) -> dict[str, Any]:
    """Run the fuzzer and return its report. If it fails, the test shows its stderr and how to repeat the run."""
    arguments = ["-m", "tests.fuzzing", direction, str(count), str(SEED)]
    print(f"TEST_SEED={SEED} python {' '.join(arguments)}")
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=WITHIN)
    assert done.returncode == 0, done.stderr[-6000:]
    report: dict[str, Any] = json.loads(done.stdout)
    print(report)
    return report
