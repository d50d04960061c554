"""The restart policy decides correctly when to start a worker again and when to give up."""

from hypothesis import given
from hypothesis import strategies as st

from supervisor.workers.life import RestartHistory, RestartPolicy

POLICY = RestartPolicy(limit=5, window_s=60, initial_s=0.5, max_s=30, jitter=0.2)


def test_at_once_then_doubling_then_given_up() -> None:
    history = RestartHistory(POLICY)
    assert [history.failed(float(n), 0.0) for n in range(5)] == [0.0, 0.5, 1.0, 2.0, None]
    assert history.recent == 5


def test_uptime_does_not_matter_only_the_window_does() -> None:
    """One crash every 14 s is five in a window. One every 16 s is fewer, and may go on for ever."""
    history = RestartHistory(POLICY)
    assert [history.failed(14.0 * n, 0.0) for n in range(5)][-1] is None
    history = RestartHistory(POLICY)
    assert all(history.failed(16.0 * n, 0.0) is not None for n in range(1000))


def test_a_quiet_window_forgets() -> None:
    history = RestartHistory(POLICY)
    for n in range(4):
        history.failed(float(n), 0.0)
    assert history.failed(64.0, 0.0) == 0.0
    assert history.recent == 1


def test_an_operator_forgives() -> None:
    history = RestartHistory(POLICY)
    for n in range(5):
        history.failed(float(n), 0.0)
    history.forgive()
    assert history.failed(5.0, 0.0) == 0.0


def test_files_that_are_away_are_tried_again_for_ever_and_count_as_no_failure() -> None:
    history = RestartHistory(RestartPolicy(limit=2))
    assert [history.away(0.0) for _ in range(9)] == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert history.away(0.999) == 300
    assert [history.away(0.0) for _ in range(2000)][-1] == 300
    assert history.failed(0.0, 0.0) == 0.0
    history.loaded()
    assert history.away(0.5) == 5 * 1.1
    history.forgive()
    assert history.away(0.0) == 5


def test_a_limit_of_one_allows_no_retry() -> None:
    assert RestartHistory(RestartPolicy(limit=1)).failed(0.0, 0.0) is None


times = st.lists(st.floats(0, 30), min_size=1, max_size=60)


@given(
    gaps=times,
    chance=st.floats(0, 1, exclude_max=True),
    limit=st.integers(1, 10),
    window=st.floats(0.1, 100),
    initial=st.floats(0.01, 5),
    longest=st.floats(0.01, 60),
)
def test_the_limit_holds_in_every_window(
    gaps: list[float], chance: float, limit: int, window: float, initial: float, longest: float
) -> None:
    policy = RestartPolicy(limit=limit, window_s=window, initial_s=initial, max_s=longest)
    history = RestartHistory(policy)
    now = 0.0
    failures: list[float] = []
    for gap in gaps:
        now += gap
        failures.append(now)
        pause = history.failed(now, chance)
        within = [t for t in failures if now - t <= window]
        assert history.recent == len(within)
        assert (pause is None) == (len(within) >= limit)
        if pause is None:
            break
        if len(within) == 1:
            assert pause == 0.0
        else:
            least = min(longest, initial * 2 ** (len(within) - 2))
            assert least <= pause <= least * (1 + policy.jitter)
