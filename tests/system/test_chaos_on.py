"""The second half of ``test_chaos`` passes, and the chaos run finds supervisors that break an invariant."""

import pytest

from tests.chaos.halves import EPISODES, chaos, run_half
from tests.chaos.mutants import CAUGHT_BY, MUTANTS, PATIENCE_S, PROOF_SEED

QUICK = ("repeat tokens", "tell prompts")
"""The mutants that are tried here. ``python -m tests.chaos.mutants`` tries all of them."""


@pytest.mark.long
@pytest.mark.more
@pytest.mark.timeout(900)
def test_the_invariants_hold_whatever_happens_then() -> None:
    code, out = run_half(first=EPISODES)
    assert f"{EPISODES} episodes, " in out
    assert out.splitlines()[-2] == "0 violations"
    assert code == 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_supervisor_that_breaks_an_invariant_is_found_out() -> None:
    assert set(CAUGHT_BY) == set(MUTANTS)
    runs = {}
    for name in QUICK:
        faults, invariants = CAUGHT_BY[name]
        given = ("--mutant", name, "--only", faults, "--seed", PROOF_SEED, "--patience", PATIENCE_S)
        runs[name] = invariants, chaos("--episodes", 40, *given)
    for name, (invariants, run) in runs.items():
        with run:
            out, _ = run.communicate()
        assert any(f"VIOLATION: {invariant}: " in out for invariant in invariants), f"{name}:\n{out}"
        assert f"python -m tests.chaos --replay {PROOF_SEED}:" in out
        assert run.returncode == 1
