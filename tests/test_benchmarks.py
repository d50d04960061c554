"""Result files share one schema, and the README's figures are made from them."""

import json
from pathlib import Path

import pytest

from benchmarks import report

FILES = sorted(report.RESULTS.glob("*.json"))


def test_there_are_result_files() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_result_file_follows_the_schema(path: Path) -> None:
    report.check(json.loads(path.read_text()))


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"machine": "m", "commit": "c", "command": "x", "date": "2026-01-01", "results": []},
        {"machine": "m", "commit": "c", "command": "x", "date": "no date", "results": [{}]},
        {
            "machine": "m",
            "commit": "c",
            "command": "x",
            "date": "2026-01-01",
            "results": [{"name": "n", "value": 1.0, "unit": "s", "target": "<= 0.5", "meets": True}],
        },
    ],
)
def test_a_broken_result_file_is_refused(broken: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        report.check(broken)


def test_a_miss_is_shown_as_a_miss() -> None:
    assert report.Result("n", 1.0, "s", "<= 0.5").meets is False
    assert report.Result("n", 0.5, "s", "<= 0.5").meets is True
    assert report.Result("n", 0.5, "s").meets is None


def test_the_readme_shows_the_figures_of_the_result_files() -> None:
    text = report.README.read_text()
    assert report.readme_with_figures(text) == text, "run `python -m benchmarks.report`"
