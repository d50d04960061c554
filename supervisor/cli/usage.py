"""The command usage: show requests and tokens by key, model and day."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from supervisor.cli import exit_codes
from supervisor.cli.chosen_models import is_pattern
from supervisor.cli.command import Command
from supervisor.cli.errors import CommandFailure
from supervisor.cli.options import as_json, connect, supervisor_options
from supervisor.cli.tables import Column, table, terminal_width
from supervisor.cli.watch import show, watch

if TYPE_CHECKING:
    from protocol.client.sync_client import Client

COLUMNS: Final = (
    Column("DAY"), Column("KEY"), Column("MODEL"), Column("REQUESTS", drop=2), Column("IN", drop=1),
    Column("CACHED", drop=3), Column("OUT"),
)  # fmt: skip
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
@click.option("--model", metavar="NAME", help="Only this model, or those of a quoted pattern: 'llama-*'.")
@click.option("--since", metavar="DAY", callback=_since, help="First day: 2026-01-31, or 7d for the last seven days.")
@watch
@as_json
@supervisor_options
def usage(key: str | None, model: str | None, since: str | None, watch: bool, as_json: bool, runtime_dir: Path) -> None:
    """Show requests and tokens by key, model and day (UTC).

    IN are tokens of prompts, CACHED those of them that the model's cache had, and OUT tokens of answers. A key without
    the rights status and admin sees its own usage only.
    """
    with connect(runtime_dir) as client:
        show(
            lambda: _read(client, key, model, since),
            lambda answer: text_of(answer, terminal_width()),
            as_json=as_json, again=watch,
        )  # fmt: skip


def _read(client: "Client", key: str | None, model: str | None, since: str | None) -> dict[str, Any]:
    """Return the reply to the verb "usage". If ``model`` is a pattern, return what it would be for the matching models.

    Raises CommandFailure for a pattern that matches no row, or if the supervisor has more rows than a reply may hold.
    """
    if model is None or not is_pattern(model):
        return client.usage(key, model, since)
    answer = client.usage(key, None, since)
    rows = [row for row in answer["rows"] if fnmatchcase(row["model"], model)]
    if answer["more"]:
        wrong = f"there are too many rows for the pattern {model!r}: narrow them with --key or --since"
        raise CommandFailure(exit_codes.FAILED, "too_many", wrong)
    if not rows:
        raise CommandFailure(exit_codes.FAILED, "no_match", f"no model with usage matches {model!r}")
    return answer | {"rows": rows, "total": {name: sum(row[name] for row in rows) for name in _COUNTS}}


def text_of(answer: dict[str, Any], width: int | None) -> str:
    """Return the table of the reply to the verb "usage", with the sums in its last row.

    width  columns of the terminal; None: all columns
    """
    rows = [_row(row, row["day"], NO_KEY if row["key"] is None else row["key"], row["model"]) for row in answer["rows"]]
    if answer["more"]:
        click.echo(
            f"modelctl: only the first {len(rows)} rows are shown; narrow it with --key, --model or --since", err=True
        )
    return table(COLUMNS, [*rows, _row(answer["total"], "total", "", "")], width)


def _row(counts: dict[str, Any], *labels: str) -> tuple[object, ...]:
    return *labels, *(counts[name] for name in _COUNTS)
