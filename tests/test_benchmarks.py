"""Result files share one schema, and the README's figures are made from them."""

import json
from pathlib import Path

import pytest
import tokenizers

from benchmarks import models, report
from benchmarks.harness import Run

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


def test_the_readme_leaves_out_what_has_no_target_but_no_miss() -> None:
    plain = [{"name": f"n{i}", "value": 1.0, "unit": "ms", "target": None, "meets": None} for i in range(20)]
    missed = {"name": "missed", "value": 1.0, "unit": "ms", "target": "<= 0.5", "meets": False}
    ratio = {"name": "over", "value": 1.0, "unit": "ratio", "target": None, "meets": None}
    assert report.headline([*plain, missed, ratio]) == [missed]
    assert report.headline([*plain, ratio]) == [ratio]
    assert report.headline(plain[:3]) == plain[:3]
    assert report.headline(plain) == plain[: report.SHORT]


def test_gaps_and_bursts_are_of_the_time_when_all_streams_run() -> None:
    early = [(0.1 * i, 1) for i in range(1, 101)]
    late = [(5 + 0.1 * i, 1) for i in range(1, 101)]
    even = Run([early, late])
    assert even.gaps() == pytest.approx([0.1] * len(even.gaps()))
    assert even.last_tenth() == pytest.approx(1.0)
    assert even.rate == pytest.approx(200 / 15)
    # the last fifth at once
    burst = Run([[*early[:80], *((8.01, 1) for _ in range(20))]])
    assert burst.last_tenth() > 10
    assert Run([[*early[:80], (8.1, 20)]]).last_delta() == 20


@pytest.mark.parametrize("size", [300, 2048])
def test_a_tokenizer_of_random_models_has_a_text_for_every_id(tmp_path: Path, size: int) -> None:
    models.write_tokenizer(tmp_path, size)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == size
    words = [tokenizer.decode([i]) for i in range(258, size)]
    assert len(set(words)) == len(words)
    assert tokenizer.decode(tokenizer.encode("some words, or none").ids) == "some words, or none"


def test_the_readme_shows_the_figures_of_the_result_files() -> None:
    text = report.README.read_text()
    assert report.readme_with_figures(text) == text, "run `python -m benchmarks.report`"
