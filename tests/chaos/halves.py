"""The chaos run of the test suite: two halves, each a test file of its own, so that they can run in parallel."""

import os
import subprocess
import sys
import time

from tests.serving import ROOT

EPISODES = int(os.environ.get("CHAOS_EPISODES", 8))
"""Number of episodes of each half. ``make test-long`` and ``make test-nightly`` have more."""
LANES = 3
"""Lanes of each half. While one lane waits, the others go on."""


def chaos(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", *map(str, arguments)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run_half(first: int) -> tuple[int, str]:
    """Run one half. Return its exit code and its output. Both halves have the same seed only if TEST_SEED is set."""
    seed = os.environ.get("TEST_SEED", str(time.time_ns() % 2**32))
    with chaos("--first", first, "--episodes", EPISODES, "--lanes", LANES, "--seed", seed) as run:
        out, _ = run.communicate()
    print(out)
    return run.returncode, out
