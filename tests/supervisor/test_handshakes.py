"""A key can make only so many connections over time."""

from supervisor.keys.ring import AT_ONCE, PER_S, Handshakes


def admitted(handshakes: Handshakes, key: str, times: int, now: float) -> int:
    return sum(handshakes.admit(key, now) for _ in range(times))


def test_each_key_has_a_budget_of_its_own() -> None:
    handshakes = Handshakes()
    assert admitted(handshakes, "a", 2 * AT_ONCE, 0.0) == AT_ONCE
    assert admitted(handshakes, "b", AT_ONCE, 0.0) == AT_ONCE
    assert handshakes.refused == AT_ONCE


def test_it_fills_evenly_up_to_its_size() -> None:
    handshakes = Handshakes()
    admitted(handshakes, "a", AT_ONCE, 0.0)
    assert admitted(handshakes, "a", 1000, 1.0) == PER_S
    assert not handshakes.admit("a", 1.0 + 0.5 / PER_S), "half a handshake is left"
    assert handshakes.admit("a", 1.0 + 1.5 / PER_S)
    assert admitted(handshakes, "a", 1000, 1e6) == AT_ONCE


def test_a_key_that_left_the_list_is_forgotten() -> None:
    handshakes = Handshakes()
    admitted(handshakes, "a", AT_ONCE, 0.0)
    handshakes.forget("a")
    handshakes.forget("a")
    assert handshakes.admit("a", 0.0)
