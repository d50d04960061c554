"""The chaos run as the suite has it: in two halves, whose files run beside one another or beside other tests."""

import os
import subprocess
import sys
import time

from tests.serving import ROOT

EPISODES = int(os.environ.get("CHAOS_EPISODES", 150))
"""Of a half."""
LANES = 3
"""While one waits for what takes a second, the other goes on."""


def chaos(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", *map(str, arguments)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run_half(first: int) -> tuple[int, str]:
    """The exit code and what was told. The halves of a run are of one seed only where TEST_SEED gives it."""
    seed = os.environ.get("TEST_SEED", str(time.time_ns() % 2**32))
    with chaos("--first", first, "--episodes", EPISODES, "--lanes", LANES, "--seed", seed) as run:
        out, _ = run.communicate()
    print(out)
    return run.returncode, out
