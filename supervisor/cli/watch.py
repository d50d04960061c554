"""The option --watch, and the printing of what a command has read: once, or again and again, as text or as JSON."""

import json
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from protocol.process.terminal_text import steer
from supervisor.cli.colours import in_colour
from supervisor.cli.text_width import ELLIPSIS

T = TypeVar("T")
EVERY_S: Final = 1.0
"""Seconds between two looks."""

watch = click.option("-w", "--watch", is_flag=True, help="Look again each second, until Ctrl-C.")


def show(
    read: Callable[[], T],
    text: Callable[[T], str],
    *,
    as_json: bool,
    again: bool = False,
    as_data: Callable[[T], Any] = lambda value: value,
) -> None:
    """Print what ``read`` returns, as JSON or as the text that ``text`` makes of it.

    as_json  print JSON; with ``again``, each look is one line
    as_data  makes of the value what is printed as JSON; without it, that is the value itself
    again    go on until Ctrl-C. On a terminal, a further look takes the place of the one before
    """

    def look() -> str:
        value = read()
        return json.dumps(as_data(value), indent=None if again else 2) if as_json else text(value)

    click.echo(look())
    in_place = again and not as_json and sys.stdout.isatty()
    if in_place:
        steer(sys.stdout, "\x1b[2J")
    while again:
        if in_place:
            _replace(look())
        else:
            click.echo(look())
        time.sleep(EVERY_S)


def _replace(text: str) -> None:
    """Write a text over the terminal's screen. The lines that do not fit are counted in the last one.

    Lines are overwritten and not cleared before, so that the screen does not flicker.
    """
    lines, room = text.split("\n"), shutil.get_terminal_size().lines - 1
    if len(lines) > room > 0:
        lines = [*lines[: room - 1], f"{ELLIPSIS} {len(lines) - room + 1} more lines: the terminal is too low"]
    shown = lines if in_colour() else [click.unstyle(line) for line in lines]
    steer(sys.stdout, "\x1b[H")
    for line in shown:
        sys.stdout.write(line)
        steer(sys.stdout, "\x1b[K\n")
    steer(sys.stdout, "\x1b[J")
    sys.stdout.flush()
