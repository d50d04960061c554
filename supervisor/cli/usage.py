"""The command usage: show requests and tokens by key, model and day."""

import json
from pathlib import Path
from typing import Any, Final

import click

from supervisor.cli.command import Command
from supervisor.cli.options import as_json, connect, supervisor_options
from supervisor.cli.tables import table, terminal_width

HEADER = ("DAY", "KEY", "MODEL", "REQUESTS", "IN", "CACHED", "OUT")
_LABELS: Final = 3
_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
NO_KEY = "(none)"
"""Stands for requests without a key: those of the supervisor's own user, and of a gateway with ``auth: none``."""


def _since(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    """Return the day of ``2026-01-31``, or of a number of days such as ``7d``, today included."""
    import datetime

    if given is None:
        return None
    try:
        if given.endswith("d") and given[:-1].isdecimal() and 1 <= int(given[:-1]) <= 36_500:
            today = datetime.datetime.now(datetime.UTC).date()
            return (today - datetime.timedelta(days=int(given[:-1]) - 1)).isoformat()
        return datetime.date.fromisoformat(given).isoformat()
    except ValueError:
        message = f"{given!r} is no day: write a day such as 2026-01-31, or a number of days such as 7d"
        raise click.BadParameter(message) from None


@click.command(
    cls=Command,
    examples={
        "modelctl usage": "Show the tokens of every key, model and day",
        "modelctl usage --key laptop --since 7d": "Show those of one key in the last seven days",
        "modelctl usage --model llama-8b --since 2026-01-01 --json": "Print those of one model as JSON",
    },
)
@click.option("--key", metavar="NAME", help="Only this key; an empty text for requests without a key.")
@click.option("--model", metavar="NAME", help="Only this model.")
@click.option("--since", metavar="DAY", callback=_since, help="First day: 2026-01-31, or 7d for the last seven days.")
@as_json
@supervisor_options
def usage(key: str | None, model: str | None, since: str | None, as_json: bool, runtime_dir: Path) -> None:
    """Show requests and tokens by key, model and day (UTC).

    IN are tokens of prompts, CACHED those of them that the model's cache had, and OUT tokens of answers. A key without
    the rights status and admin sees its own usage only.
    """
    with connect(runtime_dir) as client:
        answer = client.usage(key, model, since)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    rows = [_row(row, row["day"], NO_KEY if row["key"] is None else row["key"], row["model"]) for row in answer["rows"]]
    if answer["more"]:
        click.echo(
            f"modelctl: only the first {len(rows)} rows are shown; narrow it with --key, --model or --since", err=True
        )
    click.echo(table(HEADER, [*rows, _row(answer["total"], "total", "", "")], terminal_width(), labels=_LABELS))


def _row(counts: dict[str, Any], *labels: str) -> tuple[object, ...]:
    return *labels, *(counts[name] for name in _COUNTS)
