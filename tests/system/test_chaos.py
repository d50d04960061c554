"""Random faults at random times, see ``tests.chaos``: the laws hold; and where a supervisor breaks one, that is found.

TEST_SEED repeats the choices of a run; CHAOS_EPISODES says how many there are.
"""

import os
import random
import subprocess
import sys

import pytest

from tests.chaos.mutants import CAUGHT_BY, MUTANTS
from tests.serving import ROOT

SEED = int(os.environ.get("TEST_SEED", random.randrange(2**32)))
EPISODES = int(os.environ.get("CHAOS_EPISODES", 300))
PATIENCE_S = 8
"""Until what a mutant does not do is missed. The others have their usual time."""
PROOF_SEED = 3
"""Its first episodes have what each mutant is found by: a client that leaves, streams in one frame, ..."""
QUICK = ("repeat end", "repeat tokens", "tell prompts", "wound others")
"""Those that are tried here; all are by ``python -m tests.chaos.mutants``."""


def chaos(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", *map(str, arguments)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.timeout(900)
def test_the_laws_hold_whatever_happens() -> None:
    with chaos("--episodes", EPISODES, "--lanes", 3, "--seed", SEED) as run:
        out, _ = run.communicate()
    print(out)
    assert run.returncode == 0
    assert f"{EPISODES} episodes, " in out
    assert out.splitlines()[-2] == "0 violations"


@pytest.mark.timeout(900)
def test_a_supervisor_that_breaks_a_law_is_found_out() -> None:
    assert set(CAUGHT_BY) == set(MUTANTS)
    runs = {}
    for name in QUICK:
        faults, law = CAUGHT_BY[name]
        given = ("--mutant", name, "--only", faults, "--seed", PROOF_SEED, "--patience", PATIENCE_S)
        runs[name] = law, chaos("--episodes", 40, *given)
    for name, (law, run) in runs.items():
        with run:
            out, _ = run.communicate()
        assert f"VIOLATION: {law}: " in out, f"{name}:\n{out}"
        assert f"python -m tests.chaos --replay {PROOF_SEED}:" in out
        assert run.returncode == 1
