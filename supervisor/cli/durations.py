"""The type of options that take a duration."""

from typing import Any

import click

from supervisor.spelling import CLOCK_UNITS, parse_duration


class Duration(click.ParamType[float]):
    """Seconds, given as ``90s``, ``15m``, ``1h`` or ``2d``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds of a text."""
        try:
            return parse_duration(value, (*CLOCK_UNITS, "d"))
        except ValueError:
            self.fail(f"{value!r} is no duration: give one such as 90s, 15m, 1h or 2d, a week at most", param, ctx)
