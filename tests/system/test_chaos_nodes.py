"""The invariants hold under random faults of machines, agents and networks (``python -m tests.chaos --nodes``).

TEST_SEED repeats the choices of a run. CHAOS_EPISODES is the number of episodes.
"""

import os
import time

import pytest

from tests.chaos.halves import EPISODES, chaos
from tests.chaos.mutants import CAUGHT_BY, PATIENCE_S, PROOF_SEED, WITH_NODES


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_invariants_hold_whatever_happens_to_other_machines() -> None:
    seed = os.environ.get("TEST_SEED", str(time.time_ns() % 2**32))
    with chaos("--nodes", "--episodes", EPISODES, "--lanes", 3, "--seed", seed) as run:
        out, _ = run.communicate()
    print(out)
    assert f"{EPISODES} episodes, " in out
    assert out.splitlines()[-2] == "0 violations"
    assert run.returncode == 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WITH_NODES)
def test_a_supervisor_that_keeps_what_is_lost_is_found_out(name: str) -> None:
    faults, (invariant, *_) = CAUGHT_BY[name]
    given = ("--mutant", name, "--only", faults, "--seed", PROOF_SEED, "--patience", PATIENCE_S)
    with chaos("--nodes", "--episodes", 40, *given) as run:
        out, _ = run.communicate()
    assert f"VIOLATION: {invariant}: " in out
    assert f"python -m tests.chaos --replay {PROOF_SEED}:" in out
    assert run.returncode == 1
