"""Read the docstrings of this project: prose, indented code, and columns of names and their meanings.

name         its meaning, which may take
             several lines
other, third the meaning of these two
"""

import inspect
import re
from collections.abc import Iterator

from tools.docs.markdown import table, text

_ROW = re.compile(r"(\S.*?) {2,}(\S.*)")


def render(docstring: str, header: tuple[str, str] = ("name", "meaning")) -> str:
    """Return a docstring as Markdown. Columns become a table below the line that announces them, if there is one."""
    blocks = re.split(r"\n{2,}", inspect.cleandoc(docstring))
    return "\n\n".join(part for block in blocks for part in _block(block.splitlines(), header))


def _block(lines: list[str], header: tuple[str, str]) -> Iterator[str]:
    if all(line.startswith("    ") for line in lines):
        yield "\n".join(["```python", *(line.removeprefix("    ") for line in lines), "```"])
        return
    first = next((i for i, line in enumerate(lines) if _ROW.fullmatch(line)), len(lines))
    if first:
        yield text("\n".join(lines[:first]))
    if lines[first:]:
        yield table(header, _rows(lines[first:]))


def _rows(lines: list[str]) -> list[tuple[str, str]]:
    """Return the rows of columns. An indented line continues the row above it."""
    rows: list[tuple[str, str]] = []
    for line in lines:
        if (match := _ROW.fullmatch(line)) and not line.startswith(" "):
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            rows.append((names, text(match[2])))
        elif rows and line.startswith(" "):
            rows[-1] = rows[-1][0], f"{rows[-1][1]} {text(line.strip())}"
        else:
            raise ValueError(f"a docstring has {line!r} among columns: indent it, or put an empty line before it")
    return rows
