"""The invariants hold under random faults at random times (``tests.chaos``). ``test_chaos_on`` runs the second half.

TEST_SEED repeats the choices of a run. CHAOS_EPISODES is the number of episodes in each half.
"""

import pytest

from tests.chaos.halves import EPISODES, run_half


@pytest.mark.more
@pytest.mark.timeout(900)
def test_the_invariants_hold_whatever_happens() -> None:
    code, out = run_half(first=0)
    assert f"{EPISODES} episodes, " in out
    assert out.splitlines()[-2] == "0 violations"
    assert code == 0
