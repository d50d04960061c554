"""The tracker remembers suspect requests for the right time."""

import pytest

from supervisor.requests import poison
from supervisor.requests.poison import PoisonPolicy, PoisonTracker, Suspicion


def count(tracker: PoisonTracker, body: bytes, now: float, model: str = "m") -> int | None:
    """Return the strikes of a payload, or None if it is no suspect."""
    found = tracker.find(model, body, now)
    return None if found is None else found.strikes


def test_two_deaths_that_are_blamed_on_a_payload_make_it_poisoned() -> None:
    tracker = PoisonTracker(PoisonPolicy())
    assert tracker.find("m", b"x", 0.0) is None
    tracker.add("m", b"x", 7, 0.0, blamed=False)
    assert tracker.find("m", b"x", 1.0) == Suspicion(strikes=0, place=7, at=0.0)
    tracker.add("m", b"x", 9, 1.0, blamed=True)
    assert tracker.find("m", b"x", 1.0) == Suspicion(strikes=1, place=9, at=1.0)
    assert (count(tracker, b"y", 1.0), count(tracker, b"x", 1.0, "n")) == (None, None)
    assert tracker.next_is_last(tracker.find("m", b"x", 1.0))
    assert not tracker.poisons(tracker.find("m", b"x", 1.0))
    tracker.add("m", b"x", 9, 1.0, blamed=True)
    assert tracker.poisons(tracker.find("m", b"x", 1.0))


def test_a_death_that_is_blamed_on_others_changes_no_count() -> None:
    tracker = PoisonTracker(PoisonPolicy())
    for blamed in (True, False, False):
        tracker.add("m", b"x", 0, 0.0, blamed=blamed)
    assert count(tracker, b"x", 0.0) == 1


def test_they_are_remembered_for_a_while_after_the_last_death_and_forgotten_when_it_ends_well() -> None:
    tracker = PoisonTracker(PoisonPolicy(window_s=600))
    tracker.add("m", b"x", 0, 0.0, blamed=True)
    tracker.add("m", b"x", 0, 500.0, blamed=True)
    assert count(tracker, b"x", 1100.0) == 2, "the last one counts"
    assert count(tracker, b"x", 1100.1) is None
    tracker.add("m", b"x", 0, 1101.0, blamed=True)
    assert count(tracker, b"x", 1101.0) == 1
    tracker.clear("m", b"x")
    assert count(tracker, b"x", 1102.0) is None


@pytest.mark.parametrize(("limit", "last"), [(1, [0]), (2, [1]), (5, [4])])
def test_which_strike_is_the_last_follows_from_the_limit(limit: int, last: list[int]) -> None:
    tracker = PoisonTracker(PoisonPolicy(limit=limit))
    found = [Suspicion(n, 0, 0.0) for n in range(limit)]
    assert [suspicion.strikes for suspicion in found if tracker.next_is_last(suspicion)] == last
    assert tracker.next_is_last(None) == (limit == 1)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "MOST", 3)
    tracker = PoisonTracker(PoisonPolicy())
    for n in range(5):
        tracker.add("m", bytes([n]), 0, 0.0, blamed=True)
    assert [count(tracker, bytes([n]), 0.0) for n in range(5)] == [None, None, 1, 1, 1]
