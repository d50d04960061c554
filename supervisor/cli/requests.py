"""The commands requests and cancel: the unfinished requests of all clients, and the last ones that have ended. They
never show a text."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from supervisor.cli import chosen_models, figures
from supervisor.cli.command import Command
from supervisor.cli.options import as_json, connect, supervisor_options
from supervisor.cli.tables import Column, table, terminal_width
from supervisor.cli.watch import show, watch
from supervisor.spelling import duration

if TYPE_CHECKING:
    from protocol.client.sync_client import Client

MOST: Final = 500
"""The most unfinished requests that the supervisor lists."""
MOST_ENDED: Final = 1000
"""The most ended requests that the supervisor lists."""
COLUMNS = (
    Column("ID"), Column("MODEL"), Column("STATE", state=True), Column("KEY", drop=3),
    Column("PROMPT", drop=4, right=True), Column("ANSWER", drop=2), Column("PRIORITY", drop=5),
    Column("AGE", drop=1, right=True), Column("WORKER", drop=6),
)  # fmt: skip
ENDED_COLUMNS = (
    Column("CAME", drop=5), Column("ID"), Column("MODEL"), Column("KEY", drop=6), Column("END"),
    Column("PROMPT", drop=4, right=True), Column("CACHED", drop=7, right=True), Column("ANSWER", drop=3, right=True),
    Column("WAITED", drop=9, right=True), Column("FIRST TOKEN", drop=8, right=True), Column("TOOK", drop=1, right=True),
    Column("TOK/S", drop=2, right=True), Column("WORKER", drop=10), Column("WHY", drop=11, least=20),
)  # fmt: skip


@click.command(
    cls=Command,
    examples={
        "modelctl requests": "List the unfinished requests, the oldest first",
        "modelctl requests 'llama-*'": "List those of some models",
        "modelctl requests --json": "The same for a program, with all that is known",
        "modelctl requests --ended -n 20": "List the last 20 requests that have ended, the newest last",
    },
)
@chosen_models.some
@click.option("--ended", is_flag=True, help="List the last requests that have ended, the newest last.")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, MOST_ENDED),
    default=100,
    show_default=True,
    help=f"The most to list. At most {MOST} unfinished requests are listed.",
)
@watch
@as_json
@supervisor_options
def requests(models: tuple[str, ...], ended: bool, limit: int, watch: bool, as_json: bool, runtime_dir: Path) -> None:
    """List the unfinished requests, or those of each MODEL; a pattern such as 'llama-*' needs quotes.

    PROMPT, CACHED and ANSWER count tokens; ~ marks an estimate. With --ended: END is the finish reason or the error,
    WAITED the time until a worker began, FIRST TOKEN and TOOK the time until the first token and the end, and TOK/S the
    speed behind the first token.
    """
    if not ended and limit > MOST:
        raise click.BadParameter(f"{limit} is more than {MOST} unfinished requests.", param_hint="--limit")
    with connect(runtime_dir, admin=True) as client:
        wanted = _wanted(client, models) if models else None

        def read() -> dict[str, Any]:
            if ended:
                if wanted is None:
                    return client.ended_requests(limit=limit)
                reply = client.ended_requests(limit=MOST_ENDED)
                return reply | {"requests": [each for each in reply["requests"] if _is_of(each, wanted)][-limit:]}
            return client.requests(limit) if wanted is None else of_models(client.requests(MOST), wanted, limit)

        text = ended_text_of if ended else text_of
        show(read, lambda reply: text(reply, terminal_width()), as_json=as_json, again=watch)


def _wanted(client: "Client", given: Sequence[str]) -> set[str]:
    """Return the names of the models and workers that names, aliases and patterns mean.

    Raises CommandFailure for a pattern that matches nothing, and the supervisor's own error for an unknown name.
    """
    workers = client.status()["models"]
    known = {name for worker in workers for name in (worker["name"], worker["model"])}
    found: set[str] = set()
    for name in chosen_models.expanded(given, workers):
        found |= {name} if name in known else {worker["model"] for worker in client.status(name)["models"]}
    return found


def of_models(reply: dict[str, Any], wanted: set[str], limit: int) -> dict[str, Any]:
    """Return the reply to the verb "requests" with the requests of some models or workers only.

    ``total`` counts these requests. ``unread`` counts the requests of any model that are not in the reply.
    """
    found = [each for each in reply["requests"] if _is_of(each, wanted)]
    return {"requests": found[:limit], "total": len(found), "unread": reply["total"] - len(reply["requests"])}


def _is_of(each: dict[str, Any], wanted: set[str]) -> bool:
    return each["model"] in wanted or each["worker"] in wanted


def text_of(reply: dict[str, Any], width: int | None) -> str:
    """Return the table of the reply to the verb "requests", and how many requests it lacks.

    width  columns of the terminal; None: all columns
    """
    lines = [table(COLUMNS, [_row(each) for each in reply["requests"]], width)]
    if (more := reply["total"] - len(reply["requests"])) > 0:
        lines.append(f"{more} more; --limit shows up to {MOST}")
    if unread := reply.get("unread"):
        lines.append(f"the {unread} youngest requests of all models were not looked at")
    return "\n".join(lines)


def ended_text_of(reply: dict[str, Any], width: int | None) -> str:
    """Return the table of the reply to the verb "ended_requests".

    width  columns of the terminal; None: all columns
    """
    return table(ENDED_COLUMNS, [_ended_row(each) for each in reply["requests"]], width)


@click.command(
    cls=Command,
    examples={
        "modelctl cancel 12-3": "End a request, which `modelctl requests` lists as 12-3",
        "modelctl cancel req_0a1b2c": "End a request by the header x-request-id of its HTTP answer",
    },
)
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@as_json
@supervisor_options
def cancel(ids: tuple[str, ...], as_json: bool, runtime_dir: Path) -> None:
    """Cancel requests of any client.

    ID is the name of a request in `modelctl requests`, or the id of an HTTP request or of its answer, as for
    `modelctl story`. The client gets what was computed until then, with the finish reason `cancelled`.
    """
    with connect(runtime_dir, admin=True) as client:
        for each in ids:
            client.cancel_request(each)
            if not as_json:
                click.echo(f"{each}: cancelled")
    if as_json:
        click.echo(json.dumps({"cancelled": list(dict.fromkeys(ids))}))


def _row(each: dict[str, Any]) -> tuple[object, ...]:
    before = each["queue_position"]
    state = each["state"] if before is None else f"queued, {before} before" if before else "queued, next"
    prompt = f"~{each['prompt_tokens_estimate']}" if each["prompt_tokens"] is None else each["prompt_tokens"]
    return (
        each["id"], each["model"], state, each["key"], prompt, each["tokens"], each["priority"],
        duration(each["age_ms"] / 1000), each["worker"],
    )  # fmt: skip


def _ended_row(each: dict[str, Any]) -> tuple[object, ...]:
    def span(ms: float | None) -> str | None:
        return None if ms is None else figures.seconds(ms / 1000)

    return (
        datetime.fromtimestamp(each["accepted"]).strftime("%Y-%m-%d %H:%M:%S"), each["id"], each["model"], each["key"],
        each["error"] or each["finish_reason"], each["prompt_tokens"], each["cached_tokens"], each["tokens"],
        span(each["queue_ms"]), span(each["first_token_ms"]), span(each["total_ms"]), each["tokens_per_s"],
        each["worker"], each["error_message"],
    )  # fmt: skip
