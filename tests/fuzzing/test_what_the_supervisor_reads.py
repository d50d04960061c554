"""Mutated frames as clients and workers could send them: nothing but protocol errors, 50 ms and 20 MB.

Together with what the others read, 2,100,000 inputs a run. No input may open, import, run or unpickle anything.
"""

import pytest

from tests.fuzzing.running import fuzz


@pytest.mark.parametrize(("direction", "count"), [("client_to_supervisor", 700_000), ("worker_to_supervisor", 650_000)])
def test_mutated_frames(direction: str, count: int) -> None:
    report = fuzz(direction, count)
    assert report["inputs"] >= count
    # neither all nonsense nor all believed: then it would try one half of the code only
    assert 0.5 * count < report["refused"] < 0.99 * report["inputs"]
