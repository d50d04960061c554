"""The supervisor asks each client for a sign of life once a round, in groups of even size."""

import pytest

from supervisor.ports.floods import PARTS, Probes


@pytest.mark.parametrize("count", [0, 1, PARTS - 1, PARTS, PARTS + 1, 207, 3000])
def test_a_round_asks_everybody_once_in_even_parts(count: int) -> None:
    probes = Probes()
    for first in (1, 10_000):  # two rounds with different connections
        there = set(range(first, first + count))
        parts = [probes.next(lambda there=there: there) for _ in range(PARTS)]
        asked = [channel for part in parts for channel in part]
        assert sorted(asked) == sorted(there)
        assert max(map(len, parts)) <= -(-count // PARTS)


def test_who_comes_during_a_round_is_asked_in_the_next() -> None:
    probes = Probes()
    there = {1}
    asked = probes.next(lambda: there)
    there.add(2)
    for _ in range(PARTS - 1):
        asked += probes.next(lambda: there)
    assert asked == [1]
    assert sorted(c for _ in range(PARTS) for c in probes.next(lambda: there)) == [1, 2]
