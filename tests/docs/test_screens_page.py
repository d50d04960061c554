"""The pictures of the page docs/operate.md are there, and show the whole screen in a grid."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tools.docs.terminal_svg import CELL, MARGIN, Cell, Style, draw

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES = sorted((DOCS / "images" / "screens").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def test_the_page_shows_every_picture() -> None:
    shown = set(re.findall(r"!\[[^]]+\]\((images/screens/[^)]+)\)", (DOCS / "operate.md").read_text()))
    assert {str(path.relative_to(DOCS)) for path in PICTURES} == shown
    assert len(shown) == 12


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_no_text_is_outside_its_picture(path: Path) -> None:
    root = ET.fromstring(path.read_text())
    width = float(root.attrib["width"])
    columns = int(path.stem.rpartition("-")[2])
    assert width == columns * CELL + 2 * MARGIN
    texts = list(root.iter(f"{SVG}text"))
    assert (texts[0].text or "").startswith("$ modelctl ")
    for text in texts:
        assert float(text.attrib["x"]) + float(text.attrib["textLength"]) <= width - MARGIN
    assert len(texts) > 3


def test_runs_of_a_style_keep_their_columns() -> None:
    green = Style("green", bold=True)
    line: list[Cell] = (
        [(c, Style()) for c in "a  "] + [(c, green) for c in "<日"] + [("", green), ("b", Style(reverse=True))]
    )
    root = ET.fromstring(draw('the "title" & more', [line, []], 10))
    assert root.attrib["aria-label"] == 'the "title" & more'
    at = [(text.text, float(text.attrib["x"]), float(text.attrib["textLength"])) for text in root.iter(f"{SVG}text")]
    assert at == [
        ("a", MARGIN, CELL), ("<日", MARGIN + 3 * CELL, 3 * CELL), ("b", MARGIN + 6 * CELL, CELL),
    ]  # fmt: skip
