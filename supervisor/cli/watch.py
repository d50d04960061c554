"""The option --watch: print what a command prints again and again, in place on a terminal."""

import sys
import time
from collections.abc import Callable
from typing import Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., object])
EVERY_S: Final = 1.0
"""Seconds between two looks."""

watch = click.option("-w", "--watch", is_flag=True, help="Look again each second, until Ctrl-C.")


def look(read: Callable[[], str], *, again: bool) -> None:
    """Print what ``read`` returns. On a terminal, a further look takes the place of the one before.

    again  whether to go on until Ctrl-C
    """
    click.echo(read())
    in_place = again and sys.stdout.isatty()
    if in_place:
        click.echo("\x1b[2J", nl=False)
    while again:
        text = read()
        # Lines are overwritten and not cleared before, so that the screen does not flicker.
        click.echo("\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[K\n\x1b[J" if in_place else text, nl=not in_place)
        time.sleep(EVERY_S)
