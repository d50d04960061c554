"""The type of options that take a duration."""

from typing import Any

import click

from supervisor.config_values import parse_duration


class Duration(click.ParamType[float]):
    """Seconds, given as ``90s``, ``15m``, ``1h`` or ``2d``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds of a text."""
        try:
            if isinstance(value, str) and value.endswith("d"):
                return parse_duration(float(value[:-1]) * 86400)
            return parse_duration(value)
        except ValueError:
            self.fail(f"{value!r} is no duration: give one such as 90s, 15m, 1h or 2d, a week at most", param, ctx)
