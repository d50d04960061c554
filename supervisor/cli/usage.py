"""The command usage: show requests and tokens by key, model, day and month."""

import csv
import io
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from protocol.client.model_names import means, unknown_among
from protocol.errors import ErrorCode, WireError
from protocol.unknown_models import nearest
from supervisor.cli import exit_codes
from supervisor.cli.chosen_models import is_pattern
from supervisor.cli.command import Command
from supervisor.cli.errors import CommandFailure
from supervisor.cli.options import as_json, connect, supervisor_options
from supervisor.cli.tables import Column, table, terminal_width
from supervisor.cli.watch import show, watch

if TYPE_CHECKING:
    from protocol.client.sync_client import Client

BY: Final = ("day", "key", "model", "month")
_NUMBERS: Final = (Column("REQUESTS", drop=2), Column("IN", drop=1), Column("CACHED", drop=3), Column("OUT"))
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


def _by(context: click.Context, option: click.Parameter, given: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in given.split(",")))
    for name in names:
        if name not in BY:
            raise click.BadParameter(f"{name!r} is none of {', '.join(BY)}")
    return names


@click.command(
    cls=Command,
    examples={
        "modelctl usage": "Show the tokens of every key, model and day",
        "modelctl usage --key laptop --since 7d": "Show those of one key in the last seven days",
        "modelctl usage --by key --since 30d": "Show the sum of each key over thirty days",
        "modelctl usage --by month,model --csv": "Print the sum of each month and model for a spreadsheet",
        "modelctl usage --model llama-8b --since 2026-01-01 --json": "Print those of one model as JSON",
    },
)
@click.option("--key", metavar="NAME", help="Only this key; an empty text for requests without a key.")
@click.option("--model", metavar="NAME", help="Only this model, or those of a quoted pattern: 'llama-*'.")
@click.option("--since", metavar="DAY", callback=_since, help="First day: 2026-01-31, or 7d for the last seven days.")
@click.option(
    "--by",
    metavar="WHAT",
    callback=_by,
    default="day,key,model",
    show_default=True,
    help="Sums by key, model, day or month; several with commas.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values, without the sum of all.")
@watch
@as_json
@supervisor_options
def usage(
    key: str | None,
    model: str | None,
    since: str | None,
    by: tuple[str, ...],
    as_csv: bool,
    watch: bool,
    as_json: bool,
    runtime_dir: Path,
) -> None:
    """Show requests and tokens by key, model and day (UTC), or by what --by names.

    IN are tokens of prompts, CACHED those of them that the model's cache had, and OUT tokens of answers. A key without
    the rights status and admin sees its own usage only.
    """
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    with connect(runtime_dir) as client:
        show(
            lambda: grouped(_read(client, key, model, since), by),
            lambda answer: csv_of(answer, by) if as_csv else text_of(answer, terminal_width(), by),
            as_json=as_json, again=watch,
        )  # fmt: skip


def _read(client: "Client", key: str | None, model: str | None, since: str | None) -> dict[str, Any]:
    """Return the reply to the verb "usage". If ``model`` is a pattern, return what it would be for the matching models.

    Raises CommandFailure or WireError for a key or model that is neither known now nor in the records, CommandFailure
    for a pattern that matches no row, or if the supervisor has more rows than a reply may hold.
    """
    if model is None or not is_pattern(model):
        answer = client.usage(key, model, since)
        if not answer["rows"]:
            _check_names(client, key, model)
        return answer
    answer = client.usage(key, None, since)
    rows = [row for row in answer["rows"] if fnmatchcase(row["model"], model)]
    if answer["more"]:
        wrong = f"there are too many rows for the pattern {model!r}: narrow them with --key or --since"
        raise CommandFailure(exit_codes.FAILED, "too_many", wrong)
    if not rows:
        raise CommandFailure(exit_codes.FAILED, "no_match", f"no model with usage matches {model!r}")
    return answer | {"rows": rows, "total": {name: sum(row[name] for row in rows) for name in _COUNTS}}


def _check_names(client: "Client", key: str | None, model: str | None) -> None:
    """Raise CommandFailure or WireError for a key or model that is neither known now nor in the records."""
    if model is not None and not client.usage(None, model)["rows"]:
        listed = client.models()["models"]
        if not any(means(each, model) for each in listed):
            raise unknown_among(listed, model)
    if key and not client.usage(key)["rows"]:
        known = _keys_of(client)
        if known is not None and key not in known:
            near = nearest(key, known)
            hint = f"there is {', '.join(sorted(known)) or 'none'}" if near is None else f"did you mean {near!r}?"
            message = f"no key {key!r} is admitted, and none of that name has used anything: {hint}"
            raise CommandFailure(exit_codes.FAILED, "no_match", message)


def _keys_of(client: "Client") -> set[str] | None:
    """Return the names of the keys that are admitted; None if the supervisor does not name all of them."""
    try:
        supervisor = client.status()["supervisor"]
    except WireError as e:
        if e.code is not ErrorCode.FORBIDDEN:
            raise
        return None  # a key that sees its own usage only
    http = supervisor["http_keys"]
    keys = [*http["keys"], *((supervisor["tcp"] or {}).get("keys") or ())]
    return {each["name"] for each in keys} if http["listed"] == len(http["keys"]) else None


def grouped(answer: dict[str, Any], by: Sequence[str]) -> dict[str, Any]:
    """Return the reply to the verb "usage" with one row for each combination of what ``by`` names.

    The rows are in the order of their first rows in the reply: the latest day first. Raises CommandFailure if the
    reply does not hold all rows, because the sums would be too small.
    """
    if answer["more"] and not {"day", "key", "model"} <= set(by):
        wrong = "there are too many rows for sums: narrow them with --key, --model or --since"
        raise CommandFailure(exit_codes.FAILED, "too_many", wrong)
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in answer["rows"]:
        labels = {name: row["day"][:7] if name == "month" else row[name] for name in by}
        found = sums.setdefault(tuple(labels.values()), labels | dict.fromkeys(_COUNTS, 0))
        for name in _COUNTS:
            found[name] += row[name]
    return answer | {"rows": [*sums.values()]}


def csv_of(answer: dict[str, Any], by: Sequence[str]) -> str:
    """Return the rows as comma-separated values, with a header. A request without a key has an empty key."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*by, *_COUNTS])
    writer.writerows([row[name] for name in (*by, *_COUNTS)] for row in answer["rows"])
    _warn_of_more(answer)
    return text.getvalue().rstrip("\n")


def text_of(answer: dict[str, Any], width: int | None, by: Sequence[str] = ("day", "key", "model")) -> str:
    """Return the table of the reply to the verb "usage", with the sums in its last row.

    width  columns of the terminal; None: all columns
    by     the columns before the numbers
    """
    columns = (*(Column(name.upper()) for name in by), *_NUMBERS)
    rows = [_row(row, *(NO_KEY if row[name] is None else row[name] for name in by)) for row in answer["rows"]]
    _warn_of_more(answer)
    return table(columns, [*rows, _row(answer["total"], "total", *[""] * (len(by) - 1))], width)


def _warn_of_more(answer: dict[str, Any]) -> None:
    if answer["more"]:
        click.echo(
            "modelctl: there are more rows than one answer holds, and the latest are shown; narrow it with --key, "
            "--model or --since",
            err=True,
        )


def _row(counts: dict[str, Any], *labels: str) -> tuple[object, ...]:
    return *labels, *(counts[name] for name in _COUNTS)
