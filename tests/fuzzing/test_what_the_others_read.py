"""A worker or a client that gets mutated frames from a supervisor raises nothing but protocol errors."""

import pytest

from tests.fuzzing.running import TIMES, fuzz


@pytest.mark.more
@pytest.mark.parametrize(("direction", "count"), [("supervisor_to_worker", 30_000), ("supervisor_to_client", 15_000)])
def test_mutated_frames(direction: str, count: int) -> None:
    assert fuzz(direction, count * TIMES)["inputs"] >= count * TIMES
