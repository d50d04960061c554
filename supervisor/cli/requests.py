"""The commands requests and cancel: the unfinished requests of all clients. They never show a text."""

import json
from pathlib import Path
from typing import Any

import click

from supervisor.cli import figures
from supervisor.cli.command import Command
from supervisor.cli.options import as_json, connect, supervisor_options
from supervisor.cli.tables import Column, table, terminal_width
from supervisor.cli.watch import show, watch

COLUMNS = (
    Column("ID"), Column("MODEL"), Column("STATE", state=True), Column("KEY", drop=3),
    Column("PROMPT", drop=4, right=True), Column("ANSWER", drop=2), Column("PRIORITY", drop=5),
    Column("AGE", drop=1, right=True), Column("WORKER", drop=6),
)  # fmt: skip


@click.command(
    cls=Command,
    examples={
        "modelctl requests": "List the unfinished requests, the oldest first",
        "modelctl requests --json": "The same for a program, with all that is known",
    },
)
@click.option("-n", "--limit", type=click.IntRange(1, 500), default=100, show_default=True, help="The most to list.")
@watch
@as_json
@supervisor_options
def requests(limit: int, watch: bool, as_json: bool, runtime_dir: Path) -> None:
    """List the unfinished requests. PROMPT and ANSWER count tokens; ~ marks an estimate."""
    with connect(runtime_dir, admin=True) as client:
        show(
            lambda: client.requests(limit), lambda reply: text_of(reply, terminal_width()), as_json=as_json, again=watch
        )


def text_of(reply: dict[str, Any], width: int | None) -> str:
    """Return the table of the reply to the verb "requests", and how many requests it lacks.

    width  columns of the terminal; None: all columns
    """
    more = reply["total"] - len(reply["requests"])
    shown = table(COLUMNS, [_row(each) for each in reply["requests"]], width)
    return f"{shown}\n{more} more; --limit shows up to 500" if more > 0 else shown


@click.command(
    cls=Command,
    examples={
        "modelctl cancel 12-3": "End a request, which `modelctl requests` lists as 12-3",
    },
)
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@as_json
@supervisor_options
def cancel(ids: tuple[str, ...], as_json: bool, runtime_dir: Path) -> None:
    """Cancel requests of any client. ID is the name of a request in `modelctl requests`.

    The client gets what was computed until then, with the finish reason `cancelled`.
    """
    with connect(runtime_dir, admin=True) as client:
        for each in ids:
            client.cancel_request(each)
    if as_json:
        click.echo(json.dumps({"cancelled": list(dict.fromkeys(ids))}))


def _row(each: dict[str, Any]) -> tuple[object, ...]:
    before = each["queue_position"]
    state = each["state"] if before is None else f"queued, {before} before" if before else "queued, next"
    prompt = f"~{each['prompt_tokens_estimate']}" if each["prompt_tokens"] is None else each["prompt_tokens"]
    return (
        each["id"], each["model"], state, each["key"], prompt, each["tokens"], each["priority"],
        figures.duration(each["age_ms"] / 1000), each["worker"],
    )  # fmt: skip
