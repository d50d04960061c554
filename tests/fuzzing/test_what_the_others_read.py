"""Mutated frames as a supervisor out of its mind could send them to a worker or a client. See the other file."""

import pytest

from tests.fuzzing.running import fuzz


@pytest.mark.parametrize(("direction", "count"), [("supervisor_to_worker", 500_000), ("supervisor_to_client", 250_000)])
def test_mutated_frames(direction: str, count: int) -> None:
    assert fuzz(direction, count)["inputs"] >= count
