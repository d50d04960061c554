"""Tables for people."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from supervisor.cli.colours import painted, title
from supervisor.cli.text_width import clean, columns_of, cut, cut_apart, padded

GAP = "  "
"""The space between two columns."""
SHORTEST = 4
"""The least width of a key column."""


def terminal_width() -> int | None:
    """Return the columns of the terminal; None if standard output is no terminal and so has no width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@dataclass(frozen=True)
class Column:
    """A column of a table.

    right  whether the cells stand on the right; None: if all of them are numbers
    drop   where a table is too wide, the column with the greatest number is left out first; 0: a key column: it stays
    least  for texts: the width to which they are shortened before any column is left out; None: they stay whole
    state  whether the cells are painted in the colour of the state with which they begin
    """

    title: str
    right: bool | None = None
    drop: int = 0
    least: int | None = None
    state: bool = False


def table(columns: Sequence[Column | str], rows: Sequence[Sequence[object]], width: int | None = None) -> str:
    """Return the rows as text, each in one line. Columns are as wide as their widest cell, None is '-'.

    The heading is bold, and states are painted: ``click.echo`` takes that out again where it is not wanted.

    columns  a text stands for a column that is never left out
    width    columns of the terminal. Of a table that is wider, columns are shortened or left out (``fit``), because a
             terminal would break lines in the middle of a cell. None: all is shown, because programs read it
    """
    made = [Column(each) if isinstance(each, str) else each for each in columns]
    cells = [["-" if cell is None else clean(str(cell)) for cell in row] for row in rows]
    for i, column in enumerate(made):
        if column.right is None:
            numbers = bool(rows) and all(isinstance(row[i], (int, float, type(None))) for row in rows)
            made[i] = replace(column, right=numbers)
    heading, *lines = lined_up(made, cells, width)
    return "\n".join([title(heading.rstrip()), *(line.rstrip() for line in lines)])


def lined_up(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None, *, paint: bool = True
) -> list[str]:
    """Return the heading and the rows of a table as lines, with spaces at their ends.

    paint  whether to paint the states
    """
    lines: list[list[str]] = [[] for _ in range(len(rows) + 1)]
    for i, room in fit(columns, rows, width).items():
        column = columns[i]
        for number, cell in enumerate(_cells_of(column, [column.title, *(row[i] for row in rows)], room)):
            shown = padded(cell, room, right=bool(column.right))
            lines[number].append(painted(cell) + shown[len(cell) :] if paint and number and column.state else shown)
    return [GAP.join(line) for line in lines]


def fit(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int | None) -> dict[int, int]:
    """Return the number of each column that is shown, with its width.

    If the table is too wide, this is done in turn until it fits:

    1. Columns without a value in any row are left out, the greatest ``drop`` first.
    2. Texts are shortened to ``least``.
    3. Columns are left out, the greatest ``drop`` first.
    4. The widest key column is shortened.

    Room that is left then goes to the texts.
    """
    natural = {
        i: max([columns_of(column.title), *(columns_of(row[i]) for row in cells)]) for i, column in enumerate(columns)
    }
    if width is None:
        return natural
    kept = dict(natural)

    def excess() -> int:
        return sum(kept.values()) + len(GAP) * (len(kept) - 1) - width

    droppable = sorted((i for i in kept if columns[i].drop), key=lambda i: -columns[i].drop)
    texts = [i for i in kept if columns[i].least is not None]
    for i in droppable:
        if excess() > 0 and all(row[i] == "-" for row in cells):
            del kept[i]
    for i in texts:
        if i in kept and excess() > 0:
            kept[i] = max(min(kept[i], columns[i].least or 0), kept[i] - excess())
    for i in droppable:
        if i in kept and excess() > 0:
            del kept[i]
    while excess() > 0:
        widest = max(kept, key=kept.__getitem__)
        if kept[widest] <= SHORTEST:
            break
        kept[widest] -= 1
    for i in texts:
        if i in kept:
            kept[i] = min(natural[i], kept[i] - min(0, excess()))
    return kept


def _cells_of(column: Column, cells: list[str], room: int) -> list[str]:
    """Return a column's title and cells, shortened to its width. Names of key columns stay different."""
    if column.drop or column.least is not None:
        return [cut(cell, room) for cell in cells]
    return [cut(cells[0], room), *cut_apart(cells[1:], room)]
