"""The commands requests, cancel, story and usage: unfinished and ended requests, one request's story, and sums. They
never show a text."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from modelctl.cli import exit_codes, options, tables
from modelctl.cli.logs import line_of
from modelctl.cli.options import connect, is_pattern, json_options, show, watch
from modelctl.cli.root import CommandFailure, command
from modelctl.cli.tables import Column, clean, table, terminal_width, wrapped
from protocol.errors import ErrorCode, WireError
from protocol.names import means, nearest, unknown_among
from supervisor.config.spelling import duration

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


@command(
    ("modelctl requests --ended -n 20", "List the last 20 requests that have ended"),
)
@options.some
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
@json_options
def requests(models: tuple[str, ...], ended: bool, limit: int, watch: bool, as_json: bool, runtime_dir: Path) -> None:
    """List the unfinished requests, or those of each MODEL; a pattern such as 'llama-*' needs quotes.

    PROMPT, CACHED and ANSWER count tokens; ~ marks an estimate. With --ended, WAITED is the time until a worker began,
    and TOK/S the speed behind the first token.
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

        show(read, ended_text_of if ended else requests_text, as_json=as_json, again=watch)


def _wanted(client: "Client", given: Sequence[str]) -> set[str]:
    """Return the names of the models and workers that names, aliases and patterns mean.

    Raises CommandFailure for a pattern that matches nothing, and the supervisor's own error for an unknown name.
    """
    workers = client.status()["models"]
    known = {name for worker in workers for name in (worker["name"], worker["model"])}
    found: set[str] = set()
    for name in options.expanded(given, workers):
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


def requests_text(reply: dict[str, Any], width: int | None) -> str:
    """Return the table of the reply to the verb "requests", and how many requests it lacks.

    width  columns of the terminal; None: all columns
    """
    lines = [table(COLUMNS, [_request_row(each) for each in reply["requests"]], width)]
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


@command(
    ("modelctl cancel 12-3", "End a request, which `modelctl requests` lists as 12-3"),
)
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@json_options
def cancel(ids: tuple[str, ...], as_json: bool, runtime_dir: Path) -> None:
    """Cancel requests of any client.

    ID is one as for `modelctl story`. The client gets what was computed until then, with the finish reason `cancelled`.
    """
    with connect(runtime_dir, admin=True) as client:
        for each in ids:
            client.cancel_request(each)
            if not as_json:
                click.echo(f"{each}: cancelled")
    if as_json:
        click.echo(json.dumps({"cancelled": list(dict.fromkeys(ids))}))


def _request_row(each: dict[str, Any]) -> tuple[object, ...]:
    before = each["queue_position"]
    state = each["state"] if before is None else f"queued, {before} before" if before else "queued, next"
    prompt = f"~{each['prompt_tokens_estimate']}" if each["prompt_tokens"] is None else each["prompt_tokens"]
    return (
        each["id"], each["model"], state, each["key"], prompt, each["tokens"], each["priority"],
        duration(each["age_ms"] / 1000), each["worker"],
    )  # fmt: skip


def _ended_row(each: dict[str, Any]) -> tuple[object, ...]:
    def span(ms: float | None) -> str | None:
        return None if ms is None else tables.seconds(ms / 1000)

    return (
        datetime.fromtimestamp(each["accepted"]).strftime("%Y-%m-%d %H:%M:%S"), each["id"], each["model"], each["key"],
        each["error"] or each["finish_reason"], each["prompt_tokens"], each["cached_tokens"], each["tokens"],
        span(each["queue_ms"]), span(each["first_token_ms"]), span(each["total_ms"]), each["tokens_per_s"],
        each["worker"], each["error_message"],
    )  # fmt: skip


# The command story: what became of one request. It never shows a text.


Values = dict[str, Any]
INDENT = 12
"""Columns by which the further lines of a step are indented on a narrow terminal."""


@command(
    ("modelctl story 12-3", "Tell what became of request 12-3 of `modelctl requests`"),
    ("modelctl story req_0a1b2c", "The same by the header x-request-id of an HTTP answer"),
)
@click.argument("id_", metavar="ID")
@json_options
def story(id_: str, as_json: bool, runtime_dir: Path) -> None:
    """Tell what became of a request: when it was accepted, given to a worker, and ended, and how.

    ID is the name of a request in `modelctl requests`, or the id of an HTTP request or of its answer. The supervisor
    remembers the last 2000 requests that have ended.
    """
    with connect(runtime_dir, admin=True) as client:
        reply = client.story(id_)
    click.echo(json.dumps(reply, ensure_ascii=False) if as_json else story_text(reply, terminal_width()))


def story_text(reply: Values, width: int | None) -> str:
    """Return the reply to the verb "story" for people.

    width  columns of the terminal; None: lines are not wrapped
    """
    return "\n\n".join("\n".join(_lines(each, width)) for each in reply["requests"])


def _lines(story: Values, width: int | None) -> Iterator[str]:
    begin = datetime.fromtimestamp(story["accepted"]).strftime("%Y-%m-%d %H:%M:%S")
    key = "" if story["key"] is None else f", key {story['key']}"
    head = f"request {story['id']}: model {story['model']}{key}, priority {story['priority']}, accepted {begin}"
    yield wrapped(clean(head), width, 2)
    if story["trace_ids"]:
        yield wrapped(clean(f"  also {', '.join(story['trace_ids'])}"), width, 2)
    for note in story.get("notes", ()):  # an older supervisor has none
        yield wrapped(clean(f"  {note}"), width, 2)
    happened = [(step["ms"], clean(_step(step, story))) for step in story["steps"]]
    happened += [(1000 * (event["time"] - story["accepted"]), _event(event)) for event in story["events"]]
    for ms, text in sorted(happened, key=lambda each: each[0]):
        yield wrapped(f"{ms / 1000:>9.3f} s  {text}", width, INDENT + 1)
    if story["total_ms"] is None:
        yield wrapped(f"  now {story['state']}, {_tokens(story)}", width, 2)


def _step(step: Values, story: Values) -> str:
    kind = step["step"]
    if kind == "accepted":
        waits = "" if step["ready"] else "; no worker of the model is ready"
        return f"accepted, {step['queue_position']} before it{waits}"
    if kind == "placed":
        where = step["gpu"] if step["gpu"] == "cpu" else f"GPU {step['gpu']}"
        return f"given to worker {step['worker']} on {where}"
    if kind == "ended":
        why = f": {story['error_message']}" if story.get("error_message") else ""  # an older supervisor has none
        how = f"with the error {story['error']}{why}" if story["error"] else f"({story['finish_reason']})"
        return f"ended {how}, {_tokens(story)}"
    return {
        "first_token": "first token",
        "parked": f"worker {step.get('worker')} compiles its constraint",
        "compiled": "its constraint is compiled",
        "worker_ended": f"worker {step.get('worker')} ended: {step.get('reason')}",
        "cancelled": "cancelled",
    }.get(kind) or str(kind)


def _event(event: Values) -> str:
    """Return an event of a worker without its time."""
    return line_of(event, None).split(" ", 2)[2].strip()


def _tokens(story: Values) -> str:
    known = story["prompt_tokens"] is not None
    prompt = story["prompt_tokens"] if known else f"~{story['prompt_tokens_estimate']}"
    cached = f" ({story['cached_tokens']} cached)" if story["cached_tokens"] else ""
    resumes = story["resumes"]
    resumed = "" if not resumes else ", resumed once" if resumes == 1 else f", resumed {resumes} times"
    return f"{prompt} tokens of prompt{cached}, {story['tokens']} of the answer{resumed}"


# The command usage: show requests and tokens by key, model, day and month.


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


@command(
    ("modelctl usage --key laptop --since 7d", "Show the tokens of one key in the last seven days"),
    ("modelctl usage --by month,model --csv", "Print the sum of each month and model for a spreadsheet"),
)
@click.option("--key", metavar="NAME", help="Only this key; an empty text for requests without a key.")
@click.option("--model", metavar="NAME", help="Only this model, or those of a pattern.")
@click.option("--since", metavar="DAY", callback=_since, help="First day: 2026-01-31, or 7d for the last seven days.")
@click.option(
    "--by",
    metavar="WHAT",
    callback=_by,
    default="day,key,model",
    show_default=True,
    help="Of key, model, day and month, with commas.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values, without the sum of all.")
@watch
@json_options
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
    """Show requests and tokens by key, model and day (UTC).

    IN are tokens of prompts, CACHED those of them that the model's cache had, and OUT tokens of answers. A key without
    the rights status and admin sees its own usage only.
    """
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    with connect(runtime_dir) as client:

        def text(answer: dict[str, Any], width: int | None) -> str:
            return csv_of(answer, by) if as_csv else usage_text(answer, width, by)

        show(lambda: grouped(_read(client, key, model, since), by), text, as_json=as_json, again=watch)


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


def usage_text(answer: dict[str, Any], width: int | None, by: Sequence[str] = ("day", "key", "model")) -> str:
    """Return the table of the reply to the verb "usage", with the sums in its last row.

    width  columns of the terminal; None: all columns
    by     the columns before the numbers
    """
    columns = (*(Column(name.upper()) for name in by), *_NUMBERS)
    rows = [_usage_row(row, *(NO_KEY if row[name] is None else row[name] for name in by)) for row in answer["rows"]]
    _warn_of_more(answer)
    return table(columns, [*rows, _usage_row(answer["total"], "total", *[""] * (len(by) - 1))], width)


def _warn_of_more(answer: dict[str, Any]) -> None:
    if answer["more"]:
        click.echo(
            "modelctl: there are more rows than one answer holds, and the latest are shown; narrow it with --key, "
            "--model or --since",
            err=True,
        )


def _usage_row(counts: dict[str, Any], *labels: str) -> tuple[object, ...]:
    return *labels, *(counts[name] for name in _COUNTS)
