"""The command story: what became of one request. It never shows a text."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from supervisor.cli.command import Command
from supervisor.cli.events import line_of
from supervisor.cli.options import as_json, connect, supervisor_options
from supervisor.cli.tables import terminal_width
from supervisor.cli.text_width import clean, wrapped

Values = dict[str, Any]
INDENT = 12
"""Columns by which the further lines of a step are indented on a narrow terminal."""


@click.command(
    cls=Command,
    examples={
        "modelctl story 12-3": "Tell what became of request 12-3 of `modelctl requests`",
        "modelctl story req_0a1b2c": "The same by the header x-request-id of an HTTP answer",
        "modelctl story chatcmpl-4d5e6f --json": "By the id of an answer, for a program",
    },
)
@click.argument("id_", metavar="ID")
@as_json
@supervisor_options
def story(id_: str, as_json: bool, runtime_dir: Path) -> None:
    """Tell what became of a request: when it was accepted, given to a worker, and ended, and how.

    ID is the name of a request in `modelctl requests`, or the id of an HTTP request or of its answer. The supervisor
    remembers the last 2000 requests that have ended.
    """
    with connect(runtime_dir, admin=True) as client:
        reply = client.story(id_)
    click.echo(json.dumps(reply, ensure_ascii=False) if as_json else text_of(reply, terminal_width()))


def text_of(reply: Values, width: int | None) -> str:
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
