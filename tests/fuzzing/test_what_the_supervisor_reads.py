"""A supervisor that gets mutated frames raises nothing but protocol errors, and no frame costs over 50 ms or 20 MB.

No frame may make it open, import, run or unpickle anything. With the frames for workers and clients, a run has
2,100,000 inputs.
"""

import pytest

from tests.fuzzing.running import fuzz


@pytest.mark.parametrize(("direction", "count"), [("client_to_supervisor", 700_000), ("worker_to_supervisor", 650_000)])
def test_mutated_frames(direction: str, count: int) -> None:
    report = fuzz(direction, count)
    assert report["inputs"] >= count
    # some frames must be refused and some accepted, or only half of the code would be tested
    assert 0.5 * count < report["refused"] < 0.99 * report["inputs"]
