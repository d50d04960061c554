"""Random faults at random times, see ``tests.chaos``: the laws hold. The first half; ``test_chaos_on`` is the second.

TEST_SEED repeats the choices of a run; CHAOS_EPISODES says how many there are in each half.
"""

import pytest

from tests.chaos.halves import EPISODES, run_half


@pytest.mark.timeout(900)
def test_the_laws_hold_whatever_happens() -> None:
    code, out = run_half(first=0)
    assert f"{EPISODES} episodes, " in out
    assert out.splitlines()[-2] == "0 violations"
    assert code == 0
