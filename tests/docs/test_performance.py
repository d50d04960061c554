"""The page of figures shows every result file and each missed target, and its pictures show the right figures."""

import re
import xml.etree.ElementTree as ET

import pytest

from tools.docs import performance
from tools.docs.bars import Chart, draw, shown
from tools.docs.performance import ResultFile, charts, headline, performance_page, result_files


def figure(name: str, target: str | None = None, meets: bool | None = None, unit: str = "ms") -> dict[str, object]:
    return {"name": name, "value": 1.0, "unit": unit, "target": target, "meets": meets}


def test_every_result_file_has_a_section_with_its_origin() -> None:
    files = result_files()
    page = performance_page(files)
    for name, file in files.items():
        part = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        (machine,) = re.findall(r"`, (M\d+), ", part)
        assert f"| {machine} | {file.content['machine']} |\n" in page, name
        for key in ("commit", "command"):
            assert file.content[key] in part, name
        assert file.content["date"][:10] in part


def test_every_missed_target_stands_at_the_top_and_in_its_section() -> None:
    files = result_files()
    misses = [(file.name, r["name"]) for file in files.values() for r in file.results if r["meets"] is False]
    page = performance_page(files)
    top = page.partition("## Missed targets")[2].partition("\n## ")[0]
    assert len(top.strip().splitlines()) == len(misses) + 2
    for file, name in misses:
        assert f"| [{file}](#{file}) | {name} |" in top
        section = page.partition(f"\n### {file}\n")[2].partition("\n### ")[0]
        assert re.search(rf"\| {re.escape(name)} \|.*\*\*missed\*\*", section)


def test_a_new_file_is_shown_and_a_file_that_is_gone_is_not_missed() -> None:
    files = result_files()
    content = files["footprint"].content
    files["brand-new"] = ResultFile("brand-new", content)
    del files["cycles"]
    page = performance_page(files)
    assert "\n### brand-new\n" in page.partition("\n## More\n")[2]
    assert "### cycles" not in page
    assert not {name for names in performance.GROUPS.values() for name in names} - result_files().keys()


def test_what_has_no_target_is_left_out_but_no_miss() -> None:
    plain = [figure(f"n{i}") for i in range(20)]
    missed, ratio = figure("missed", "<= 0.5", meets=False), figure("over", unit="ratio")
    assert headline([*plain, missed, ratio]) == [missed]
    assert headline([*plain, ratio]) == [ratio]
    assert headline(plain[:3]) == plain[:3]
    assert headline(plain) == plain[: performance.SHORT]


def test_pictures_show_the_figures_of_their_files() -> None:
    files = result_files()
    pictures = list(charts(files))
    assert len(pictures) >= 5
    assert all(f"]({name})" in performance_page(files) for name in performance.pictures())
    for chart, names in pictures:
        values = {value for name in names for value in files[name].values.values()}
        for series in chart.series.values():
            assert len(series) == len(chart.labels)
            assert values >= set(series)


def test_bars_are_as_long_as_their_values() -> None:
    svg = draw(Chart("A & B", "s", ["x < y", "z"], {"one": [1.0, 4.0], "two": [2.0, 0.0]}))
    root = ET.fromstring(svg)
    bars = [float(each.attrib["width"]) for each in root.iter("{http://www.w3.org/2000/svg}rect")][2:]
    assert bars == pytest.approx([bars[2] / 4, bars[2] / 2, bars[2], 0.0])
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"one", "two", "x < y", "z", "1 s", "2 s", "4 s", "0 s"} == set(texts)


def test_figures_have_four_digits_or_all_before_the_point() -> None:
    assert [shown(value) for value in (10000.0, 1434455.88, 0.96317, 12.5, 0)] == [
        "10,000", "1,434,456", "0.9632", "12.5", "0",
    ]  # fmt: skip
