"""Measure, shorten and wrap text in columns of a terminal. Pure.

A character of East Asian scripts takes two columns, and so do most emoji. A combining character takes none. A character
that Unicode calls ambiguous takes one, as in most terminals outside East Asia.
"""

from collections.abc import Sequence
from typing import Final
from unicodedata import category, east_asian_width

ELLIPSIS: Final = "…"
"""Stands for what was cut off."""


def clean(text: str) -> str:
    """Return the text as one line that a terminal shows as it is.

    Line ends and tabs become spaces. Other characters without a shape, such as escape sequences and marks that turn the
    direction of the text, become U+FFFD: a message may hold what a model's directory or a client made up.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def columns_of(text: str) -> int:
    """Return the columns that a cleaned text takes."""
    return len(text) if text.isascii() else sum(map(_columns_of_character, text))


def _columns_of_character(character: str) -> int:
    if category(character) in ("Mn", "Me"):
        return 0
    return 2 if east_asian_width(character) in "WF" else 1


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Return the text with spaces up to a width, on its left side if ``right``."""
    spaces = " " * (width - columns_of(text))
    return f"{spaces}{text}" if right else f"{text}{spaces}"


def head(text: str, width: int) -> str:
    """Return the longest beginning of a text that fits into a width."""
    taken = 0
    for at, character in enumerate(text):
        taken += _columns_of_character(character)
        if taken > width:
            return text[:at]
    return text


def cut(text: str, width: int) -> str:
    """Return the text, with an ellipsis in place of its end if it is wider than ``width``."""
    return text if columns_of(text) <= width else head(text, width - 1) + ELLIPSIS if width > 0 else ""


def cut_apart(texts: Sequence[str], width: int) -> list[str]:
    """Return names that are at most ``width`` columns wide, with an ellipsis inside those that were wider.

    The ellipsis is where different names stay different, if there is such a place.
    """
    different = len(set(texts))
    made: list[str] = []
    for share in (1 / 2, 1 / 4, 3 / 4, 0, 1):
        made = [_cut_inside(text, width, share) for text in texts]
        if len(set(made)) == different:
            return made
    return [_cut_inside(text, width, 1 / 2) for text in texts]


def _cut_inside(text: str, width: int, share: float) -> str:
    """Return the text with an ellipsis inside. The text after the ellipsis takes a share of the width."""
    if columns_of(text) <= width:
        return text
    after = int((width - 1) * share)
    end = head(text[::-1], after)[::-1]
    return head(text, width - 1 - columns_of(end)) + ELLIPSIS + end


def wrapped(text: str, width: int | None, indent: int = 0) -> str:
    """Return the text in lines of at most ``width`` columns, all but the first indented.

    A word that is wider than a line is not broken, because people copy paths and addresses.

    width   None: leave it in one line, because programs read it
    indent  columns of the spaces, and of the label with which the text may begin: after it the line is not broken
    """
    if width is None or columns_of(text) <= width:
        return text
    lines, line = [], ""
    for number, word in enumerate(text.split(" ")):
        if number == 0:
            line = word
        elif columns_of(line) + 1 + columns_of(word) > width and columns_of(line) >= indent and line.strip():
            lines.append(line)
            line = " " * indent + word
        else:
            line = f"{line} {word}"
    return "\n".join([*lines, line])
