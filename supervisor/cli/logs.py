"""The command logs: show the log of a model's worker, or of the supervisor. It works without a running supervisor,
too. With --connect the supervisor of another machine reads the log."""

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from protocol.limits import MODEL_NAME_PATTERN, SUPERVISOR_NAME
from protocol.unknown_models import nearest
from supervisor.cli import completion, exit_codes
from supervisor.cli.command import Command
from supervisor.cli.durations import Duration
from supervisor.cli.errors import CommandFailure
from supervisor.cli.hints import say
from supervisor.cli.options import as_json, connect, is_remote, supervisor_options
from supervisor.cli.streams import take_text
from supervisor.log_reading import MOST_LINES, read_log
from supervisor.logs import log_dir, log_path, tail

POLL_S = 0.1
REMOTE_POLL_S = 0.5
BYTES_PER_LINE = 400
Read = Callable[..., dict[str, Any]]
"""Reads a log: ``read_log`` without its path, or ``Client.logs`` without its model."""


@click.command(
    cls=Command,
    examples={
        "modelctl logs": "Show the last lines of the supervisor's log",
        "modelctl logs -f llama-8b": "Follow a model's log",
        "modelctl logs gateway --since 1h": "Show what the gateway has said in the last hour",
    },
)
@click.argument("model", default=SUPERVISOR_NAME, shell_complete=completion.models)
@click.option("-f", "--follow", is_flag=True, help="Go on printing as the log grows.")
@click.option("--since", type=Duration(), metavar="DURATION", help="Show the lines of the last 90s, 15m, 1h, 2d.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=None, help="The most lines to show, the last ones."
    "  [default: 50, or all with --since]",
)  # fmt: skip
@click.option("--raw", is_flag=True, help="Print control characters as they are.")
@as_json
@supervisor_options
def logs(
    model: str, follow: bool, since: float | None, lines: int | None, raw: bool, as_json: bool, runtime_dir: Path
) -> None:
    """Show a model's log, or the supervisor's own; MODEL may be `gateway`, too.

    Where MODEL has several workers, MODEL:2 is the second. With --connect, at most the last 1000 lines are shown
    without --since, and the key needs the right `admin`. On a terminal, control characters are shown as U+FFFD.
    """
    take_text(raw=raw)
    begin = None if since is None else time.time() - since
    most = (50 if since is None else None) if lines is None else lines
    if is_remote():
        with connect(runtime_dir, admin=True) as client:
            _show_remote(partial(client.logs, model), begin, most, follow, as_json)
        return
    name, colon, number = model.partition(":")  # NAME:2, the second of several workers
    if not re.fullmatch(MODEL_NAME_PATTERN, name) or (colon and not re.fullmatch("[1-9][0-9]?", number)):
        # An unchecked name must never become part of a path.
        raise click.UsageError(f"{model!r} is no model name: {_hint(model, runtime_dir)}")
    path = log_path(runtime_dir, model)
    if not path.exists():
        raise CommandFailure(exit_codes.FAILED, "no_log", f"no log at {path}: {_hint(model, runtime_dir)}")
    if begin is None:
        position = path.stat().st_size
        count = most or 0
        for line in tail(path, max(8192, count * BYTES_PER_LINE), since=None)[-count:] if count else []:
            _print(line, as_json)
    else:
        last = _show_since(partial(read_log, path), begin, most, as_json)
        position = int(last["position"].partition("-")[2])
        if not follow and last["unfinished"]:
            _print(last["unfinished"], as_json)
    if os.statvfs(path).f_bavail == 0:
        click.echo(f"modelctl: the disk of {path} is full: lines may be lost", err=True)
    if follow:
        _follow(path, position, as_json)


def _show_remote(read: Read, begin: float | None, most: int | None, follow: bool, as_json: bool) -> None:
    """Print lines of a log that a supervisor reads, and with ``follow`` those that are added to it.

    begin  the time of the first line, in seconds since 1970; None for the last lines
    most   the number of lines; None for all from ``begin`` on
    """
    if begin is None:
        if most is not None and most > MOST_LINES:
            say(f"modelctl: the last {MOST_LINES} lines; --since shows more")
        last = read(lines=min(max(most or 0, 1), MOST_LINES), after=None, since=None)
        for line in last["lines"] if most else []:
            _print(line, as_json)
    else:
        last = _show_since(read, begin, most, as_json)
    if last["unfinished"] and most != 0 and not follow:
        _print(last["unfinished"], as_json)
    while follow:
        if not last["more"]:
            time.sleep(REMOTE_POLL_S)
        last = read(lines=MOST_LINES, after=last["position"], since=None)
        for line in last["lines"]:
            _print(line, as_json)


def _show_since(read: Read, begin: float, most: int | None, as_json: bool) -> dict[str, Any]:
    """Print the lines from a time on: all, or the last ``most``. Return the last reply."""
    kept: deque[str] = deque(maxlen=most)
    last = read(lines=MOST_LINES, after=None, since=begin)
    while True:
        if most is None:
            for line in last["lines"]:
                _print(line, as_json)
        else:
            kept.extend(last["lines"])
        if not last["more"]:
            break
        last = read(lines=MOST_LINES, after=last["position"], since=None)
    for line in kept:
        _print(line, as_json)
    return last


def _print(line: str, as_json: bool) -> None:
    click.echo(_as_object(line) if as_json else line)


def _hint(name: str, runtime_dir: Path) -> str:
    """Return the log that was probably meant by a name without a log, else all logs. A model that never started has no
    log."""
    try:
        names = sorted(path.stem for path in log_dir(runtime_dir).glob("[a-z0-9]*.log"))
    except OSError:  # no permission
        names = []
    if (near := nearest(name, names)) is not None:
        return f"did you mean {near!r}?"
    return f"there are logs of {', '.join(names)}" if names else "there are no logs; was anything ever served here?"


def _as_object(line: str) -> str:
    return json.dumps({"line": line}, ensure_ascii=False)


def _follow(path: Path, position: int, as_json: bool) -> None:
    """Print lines that are added to the log, also after the log was renamed, or copied and emptied. Ctrl-C ends the
    loop."""
    unfinished = ""
    file = open(path, errors="replace")  # noqa: SIM115
    file.seek(position)
    while True:
        chunk = file.read()
        if not chunk and os.fstat(file.fileno()).st_size < (read := os.lseek(file.fileno(), 0, os.SEEK_CUR)):
            chunk = _rest_of_copy(path, read)
            file.seek(0)
        if chunk and as_json:
            *complete, unfinished = (unfinished + chunk).split("\n")
            for line in complete:
                click.echo(_as_object(line))
        elif chunk:
            click.echo(chunk, nl=False)
        if chunk:
            continue
        try:
            rotated = path.stat().st_ino != _inode(file.fileno())
        except FileNotFoundError:
            rotated = False  # the log is being rotated right now: the next look finds the new file
        if rotated:
            if unfinished:
                click.echo(_as_object(unfinished))
                unfinished = ""
            file.close()
            file = open(path, errors="replace")  # noqa: SIM115
            continue
        time.sleep(POLL_S)


def _rest_of_copy(path: Path, begin: int) -> str:
    """Return what follows a position in the copy of a log that was emptied; "" if it is not the copy of the log that
    was read."""
    try:
        with open(path.with_name(path.name + ".1"), errors="replace") as file:
            file.seek(begin)
            return file.read()
    except OSError:
        return ""


def _inode(fd: int) -> int:
    return os.fstat(fd).st_ino
