"""Say what was probably meant by a command or an option that does not exist."""

from collections.abc import Iterable

import click


class NamesOptions(click.Command):
    """A command that says which option was probably meant by one that it does not have."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as e:
            raise unknown_option(ctx, e.option_name) from None


def unknown_command(context: click.Context, given: str, known: Iterable[str]) -> click.UsageError:
    """Return the error for a command that does not exist."""
    return click.UsageError(f"unknown command {given!r}{_or_rather(given, known)}", context)


def unknown_option(context: click.Context, given: str) -> click.UsageError:
    """Return the error for an option that the context's command does not have.

    If the option looks like an argument of the command, the error says that the argument has no dashes.
    """
    parameters = context.command.get_params(context)
    arguments = {f"--{each.name}": each for each in parameters if isinstance(each, click.Argument)}
    options = [
        name
        for each in parameters
        if isinstance(each, click.Option) and not each.hidden
        for name in (*each.opts, *each.secondary_opts)
    ]
    nearest = _nearest(given, [*options, *arguments])
    if nearest in arguments:
        meant = f"; {arguments[nearest].human_readable_name} is an argument: give it without a name"
    else:
        meant = _or_rather(given, options)
    return click.UsageError(f"unknown option {given!r}{meant}", context)


def _or_rather(given: str, known: Iterable[str]) -> str:
    nearest = _nearest(given, known)
    return "" if nearest is None else f"; did you mean {nearest!r}?"


def _nearest(given: str, known: Iterable[str]) -> str | None:
    from difflib import get_close_matches  # only after a mistake, as commands have to answer at once

    return next(iter(get_close_matches(given, list(known), n=1)), None)
