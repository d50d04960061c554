"""``modelctl bench`` computes its rates, quantiles and counts of failed answers correctly."""

import pytest

from modelctl.cli.bench import COLUMNS, MeasuredAnswer, errors, plot, row


def answer(*times: float, error: str | None = None, accepted: bool = True) -> MeasuredAnswer:
    """Return an answer with a token at each of these times."""
    return MeasuredAnswer([(at, 1) for at in times], accepted, error)


def test_the_rate_is_the_median_of_the_runs_to_their_last_token() -> None:
    runs = [[answer(0.5, 1.0), answer(0.5, 2.0)], [answer(0.1, 1.0)], [answer(0.1, 0.2, 0.3, 1.0)]]
    assert row("m", 2, runs).rate == pytest.approx(2.0)


def test_times_are_of_all_requests_and_in_milliseconds() -> None:
    found = row("m", 2, [[answer(0.1, 0.2, 0.3), answer(0.3, 0.7)]])
    assert found.first == (pytest.approx(200), pytest.approx(298))
    assert found.gap[0] == pytest.approx(100)
    assert found.gap[1] == pytest.approx(394)
    assert len(found.cells) == len(COLUMNS)


def test_refused_is_told_from_failed_and_both_are_explained() -> None:
    refused, failed = answer(error="overloaded", accepted=False), answer(0.1, 0.2, error="worker_died")
    runs = [[answer(0.1, 0.2), refused, refused], [failed]]
    found = row("m", 3, runs)
    assert (found.refused, found.failed) == (2, 1)
    assert errors(runs) == ["2 requests: overloaded", "worker_died"]


def test_nothing_came() -> None:
    found = row("m", 1, [[answer(error="no", accepted=False)]])
    assert (found.rate, found.first, found.gap) == (None, (None, None), (None, None))
    assert [result["name"] for result in found.results()] == ["m, 1 streams: refused", "m, 1 streams: failed"]


def test_an_answer_of_one_token_has_no_gap() -> None:
    found = row("m", 1, [[answer(0.25)]])
    assert (found.first, found.gap) == ((250.0, 250.0), (None, None))


def test_a_plot_of_one_number_of_streams_has_dots_and_one_of_nothing_is_none() -> None:
    image = plot([row("one & only", 8, [[answer(0.1, 0.2)]])])
    assert image is not None
    assert image.count("<circle") == 2
    assert "one &amp; only" in image
    assert plot([row("m", 1, [[answer(error="no", accepted=False)]])]) is None
