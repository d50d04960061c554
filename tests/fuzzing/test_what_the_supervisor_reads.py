"""A supervisor that gets mutated frames raises nothing but protocol errors, and no frame costs over 50 ms or 20 MB.

No frame may make it open, import, run or unpickle anything.
"""

import pytest

from tests.fuzzing.running import TIMES, fuzz


@pytest.mark.more
@pytest.mark.parametrize(("direction", "count"), [("client_to_supervisor", 45_000), ("worker_to_supervisor", 40_000)])
def test_mutated_frames(direction: str, count: int) -> None:
    count *= TIMES
    report = fuzz(direction, count)
    assert report["inputs"] >= count
    # some frames must be refused and some accepted, or only half of the code would be tested
    assert 0.5 * count < report["refused"] < 0.99 * report["inputs"]
