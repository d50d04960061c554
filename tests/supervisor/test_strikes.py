"""What is remembered of requests whose worker died, and for how long."""

import pytest

from supervisor.requests import strikes as strikes_module
from supervisor.requests.strikes import StrikePolicy, Strikes, Suspicion


def count(strikes: Strikes, body: bytes, now: float, model: str = "m") -> int | None:
    """Strikes of a payload; None for one under no suspicion."""
    found = strikes.find(model, body, now)
    return None if found is None else found.strikes


def test_two_deaths_that_are_blamed_on_a_payload_make_it_poisoned() -> None:
    strikes = Strikes(StrikePolicy())
    assert strikes.find("m", b"x", 0.0) is None
    strikes.add("m", b"x", 7, 0.0, blamed=False)
    assert strikes.find("m", b"x", 1.0) == Suspicion(strikes=0, place=7, at=0.0)
    strikes.add("m", b"x", 9, 1.0, blamed=True)
    assert strikes.find("m", b"x", 1.0) == Suspicion(strikes=1, place=9, at=1.0)
    assert (count(strikes, b"y", 1.0), count(strikes, b"x", 1.0, "n")) == (None, None)
    assert strikes.next_is_last(strikes.find("m", b"x", 1.0))
    assert not strikes.poisons(strikes.find("m", b"x", 1.0))
    strikes.add("m", b"x", 9, 1.0, blamed=True)
    assert strikes.poisons(strikes.find("m", b"x", 1.0))


def test_a_death_that_is_blamed_on_others_changes_no_count() -> None:
    strikes = Strikes(StrikePolicy())
    for blamed in (True, False, False):
        strikes.add("m", b"x", 0, 0.0, blamed=blamed)
    assert count(strikes, b"x", 0.0) == 1


def test_they_are_remembered_for_a_while_after_the_last_death_and_forgotten_when_it_ends_well() -> None:
    strikes = Strikes(StrikePolicy(window_s=600))
    strikes.add("m", b"x", 0, 0.0, blamed=True)
    strikes.add("m", b"x", 0, 500.0, blamed=True)
    assert count(strikes, b"x", 1100.0) == 2, "the last one counts"
    assert count(strikes, b"x", 1100.1) is None
    strikes.add("m", b"x", 0, 1101.0, blamed=True)
    assert count(strikes, b"x", 1101.0) == 1
    strikes.clear("m", b"x")
    assert count(strikes, b"x", 1102.0) is None


@pytest.mark.parametrize(("limit", "last"), [(1, [0]), (2, [1]), (5, [4])])
def test_which_strike_is_the_last_follows_from_the_limit(limit: int, last: list[int]) -> None:
    strikes = Strikes(StrikePolicy(limit=limit))
    found = [Suspicion(n, 0, 0.0) for n in range(limit)]
    assert [suspicion.strikes for suspicion in found if strikes.next_is_last(suspicion)] == last
    assert strikes.next_is_last(None) == (limit == 1)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strikes_module, "MOST", 3)
    strikes = Strikes(StrikePolicy())
    for n in range(5):
        strikes.add("m", bytes([n]), 0, 0.0, blamed=True)
    assert [count(strikes, bytes([n]), 0.0) for n in range(5)] == [None, None, 1, 1, 1]
