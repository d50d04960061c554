"""Draw a terminal's screen as SVG: a grid of characters with colours, which needs no font of its own and no script."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final
from xml.sax.saxutils import escape

CELL: Final = 8.0
LINE: Final = 18.0
"""Pixels of a character's width, and of a line's height."""
MARGIN: Final = 12.0
BACK, FRONT, DIM = "#14171c", "#d5d9e0", "#8b93a1"
COLOURS: Final = {
    "red": "#ff7a72", "green": "#63d47e", "brown": "#e6b450", "blue": "#6cb2ff", "magenta": "#d59bf6",
    "cyan": "#62d1d8", "white": FRONT, "black": BACK,
}  # fmt: skip
"""The names are those of pyte, where yellow is brown."""


@dataclass(frozen=True)
class Style:
    """How a character looks. ``colour`` is a key of COLOURS, or "default"."""

    colour: str = "default"
    bold: bool = False
    dim: bool = False
    reverse: bool = False


Cell = tuple[str, Style]
"""A character of one column and its style. The second column of a wide character is ("", style)."""


def draw(title: str, lines: Sequence[Sequence[Cell]], columns: int) -> str:
    """Return the screen as an SVG element.

    title    says what is seen, for those who do not see the picture
    columns  width of the terminal
    """
    width, height = 2 * MARGIN + columns * CELL, 2 * MARGIN + len(lines) * LINE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
        f'aria-label="{escape(title, {chr(34): "&quot;"})}" font-size="13" '
        "font-family=\"ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace\">",
        f'<rect width="{width:g}" height="{height:g}" rx="6" fill="{BACK}"/>',
    ]
    for row, line in enumerate(lines):
        parts += _line(line, MARGIN + row * LINE)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(line: Sequence[Cell], top: float) -> list[str]:
    parts, column = [], 0
    for style, run in groupby(line, key=lambda cell: cell[1]):
        cells = [character for character, _ in run]
        text = "".join(cells)
        left, width = MARGIN + column * CELL, len(cells) * CELL
        column += len(cells)
        if style.reverse:
            parts.append(f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{LINE:g}" fill="{FRONT}"/>')
        if not text.strip():
            continue
        fill = BACK if style.reverse else DIM if style.dim else COLOURS.get(style.colour, FRONT)
        weight = ' font-weight="bold"' if style.bold else ""
        # Spaces at the ends are left out, and the length is said: a reader's font may be wider or narrower.
        before, shown = len(text) - len(text.lstrip()), text.strip()
        length = (len(cells) - before - (len(text) - len(text.rstrip()))) * CELL
        parts.append(
            f'<text x="{left + before * CELL:g}" y="{top + 13:g}" textLength="{length:g}" '
            f'lengthAdjust="spacingAndGlyphs" xml:space="preserve" fill="{fill}"{weight}>{escape(shown)}</text>'
        )
    return parts
