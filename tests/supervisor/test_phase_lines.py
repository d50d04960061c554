"""A log gets one line at the beginning of each long phase, and then one every ten seconds."""

import pytest

from supervisor.config.spelling import PHASE_EVERY_S, PhaseLines, percentage_of, phase_of


def test_a_phase_is_told_when_it_begins_and_every_ten_seconds() -> None:
    lines = PhaseLines()
    told = [(now, line) for now in range(35) if (line := lines.due("a", "a: loading", now, percentage=now * 2))]
    assert told == [
        (0, "a: loading"),
        (10, "a: loading (20% after 10 s)"),
        (20, "a: loading (40% after 20 s)"),
        (30, "a: loading (60% after 30 s)"),
    ]


def test_another_phase_is_told_at_once_and_counts_from_its_own_beginning() -> None:
    lines = PhaseLines()
    assert lines.due("a", "a: starting", 0) == "a: starting"
    assert lines.due("a", "a: starting", PHASE_EVERY_S) == "a: starting (for 10 s)"
    assert lines.due("a", "a: loading", PHASE_EVERY_S + 1) == "a: loading"
    assert not lines.due("a", "a: loading", PHASE_EVERY_S + 9)
    assert lines.due("a", "a: loading", 2 * PHASE_EVERY_S + 1) == "a: loading (for 10 s)"


def test_what_nobody_waits_for_is_told_once() -> None:
    lines = PhaseLines()
    assert lines.due("a", "a: ready", 0, lasts=False) == "a: ready"
    assert not lines.due("a", "a: ready", 1000, lasts=False)


def test_labels_are_counted_apart_and_can_be_forgotten() -> None:
    lines = PhaseLines()
    assert lines.due("a", "loading", 0) == lines.due("b", "loading", 5) == "loading"
    assert lines.due("a", "loading", PHASE_EVERY_S)
    assert not lines.due("b", "loading", PHASE_EVERY_S)
    lines.forget("b")
    assert lines.due("b", "loading", PHASE_EVERY_S) == "loading"


@pytest.mark.parametrize(
    ("progress", "phase", "percentage"),
    [
        (None, "loading", None),
        ({"phase": "loading", "done": 0, "total": 0}, "loading", None),
        ({"phase": "loading", "done": 1, "total": 3}, "loading", 33),
        ({"phase": "warmup", "done": 5, "total": 4}, "loading: warmup", 100),
    ],
)
def test_a_phase_names_the_part_of_a_load(
    progress: dict[str, object] | None, phase: str, percentage: int | None
) -> None:
    assert (phase_of("loading", progress), percentage_of(progress)) == (phase, percentage)
