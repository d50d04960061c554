"""Colours: whether to use them, and which colour a state has.

Everything is printed with colours by ``click.echo``, which takes them out again where ``in_colour`` says no.
"""

import os
import sys
from typing import Final

import click

_GOOD, _BUSY, _WRONG = "green", "yellow", "red"
STATES: Final = {
    "ready": _GOOD, "running": _GOOD, "ok": _GOOD,
    "starting": _BUSY, "loading": _BUSY, "waking": _BUSY, "falling_asleep": _BUSY, "draining": _BUSY,
    "stopping": _BUSY, "queued": _BUSY, "warn": _BUSY, "WARNING": _BUSY,
    "backoff": _WRONG, "failed": _WRONG, "bad": _WRONG, "ERROR": _WRONG, "CRITICAL": _WRONG,
}  # fmt: skip
"""The colour of a state of a model or a request, of a verdict of the doctor, and of the level of an event. Other states
have the terminal's own colour."""


def chosen() -> bool | None:
    """Return whether the environment asks for colours or forbids them; None leaves it to whether there is a terminal.

    See https://bixense.com/clicolors: NO_COLOR forbids colours, and CLICOLOR_FORCE asks for them, even in a pipe.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return False if os.environ.get("TERM") == "dumb" else None


def in_colour() -> bool:
    """Return whether standard output gets colours."""
    asked = chosen()
    return sys.stdout.isatty() if asked is None else asked


def title(text: str) -> str:
    """Return the text in bold."""
    return click.style(text, bold=True)


def painted(text: str, state: str | None = None) -> str:
    """Return the text in the colour of a state.

    state  None: the text itself begins with it
    """
    colour = STATES.get((text if state is None else state).partition(" ")[0].rstrip(","))
    return text if colour is None else click.style(text, fg=colour)
