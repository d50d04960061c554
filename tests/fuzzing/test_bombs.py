"""The most expensive frames cost at most 50 ms and 20 MB in every process that reads them."""

import pytest

from tests.fuzzing.__main__ import MOST_BYTES, MOST_SECONDS, cost
from tests.fuzzing.bombs import bombs
from tests.fuzzing.receivers import receiver


@pytest.mark.long
def test_no_bomb_costs_more_than_50_ms_and_20_mb() -> None:
    parts = []
    for name, direction, frame in bombs():
        seconds, peak = cost(receiver(direction), frame)
        parts.append((seconds, peak, name))
        assert seconds <= MOST_SECONDS, f"{name}, {direction}: {seconds * 1000:.1f} ms"
        assert peak <= MOST_BYTES, f"{name}, {direction}: {peak / 1e6:.1f} MB"
    assert len(parts) > 130
    for seconds, peak, name in (max(parts), max(parts, key=lambda one: one[1])):
        print(f"{name}: {seconds * 1000:.1f} ms, {peak / 1e6:.1f} MB")
