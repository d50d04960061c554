"""Deaths are counted by payload, and forgotten in time."""

import pytest

from supervisor.requests import strikes as strikes_module
from supervisor.requests.strikes import StrikePolicy, Strikes


def test_one_strike_isolates_and_two_poison() -> None:
    strikes = Strikes(StrikePolicy())
    assert strikes.count("m", b"x", 0.0) == 0
    assert strikes.add("m", b"x", 0.0) == 1
    assert (strikes.count("m", b"x", 1.0), strikes.count("m", b"y", 1.0), strikes.count("n", b"x", 1.0)) == (1, 0, 0)
    assert strikes.isolates(1)
    assert not strikes.poisons(1)
    assert strikes.add("m", b"x", 1.0) == 2
    assert strikes.poisons(2)


def test_they_are_forgotten() -> None:
    strikes = Strikes(StrikePolicy(window_s=600))
    strikes.add("m", b"x", 0.0)
    strikes.add("m", b"x", 500.0)
    assert strikes.count("m", b"x", 1100.0) == 2, "the last one counts"
    assert strikes.count("m", b"x", 1100.1) == 0
    assert strikes.add("m", b"x", 1101.0) == 1
    strikes.clear("m", b"x")
    assert strikes.count("m", b"x", 1102.0) == 0


@pytest.mark.parametrize(("limit", "isolated"), [(1, []), (2, [1]), (5, [4])])
def test_the_last_try_is_alone(limit: int, isolated: list[int]) -> None:
    strikes = Strikes(StrikePolicy(limit=limit))
    assert [count for count in range(limit) if strikes.isolates(count)] == isolated


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strikes_module, "MOST", 3)
    strikes = Strikes(StrikePolicy())
    for n in range(5):
        strikes.add("m", bytes([n]), 0.0)
    assert [strikes.count("m", bytes([n]), 0.0) for n in range(5)] == [0, 0, 1, 1, 1]
