"""A command that shows examples at the end of its help."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import click

from supervisor.cli.mistyped import NamesOptions


class Command(NamesOptions):
    """A click command with examples. The page ``docs/commands.md`` shows them, too.

    examples  {command line: what it does}
    """

    def __init__(self, *args: Any, examples: Mapping[str, str] = MappingProxyType({}), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line, meaning in self.examples.items():
                    # Do not wrap the lines: nobody could copy a command line that is wrapped.
                    formatter.write(f"  # {meaning}\n  {line}\n")
        super().format_epilog(ctx, formatter)
