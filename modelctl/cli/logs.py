"""The commands logs, events and log-level.

logs shows the log of a model's worker, or of the supervisor. It works without a running supervisor, too. With --connect
the supervisor of another machine reads the log.
"""

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import click

from modelctl.cli import exit_codes, options
from modelctl.cli.options import connect, duration_of, is_remote, json_options
from modelctl.cli.root import CommandFailure, command, painted, say, take_text
from modelctl.cli.tables import Column, clean, table, terminal_width, wrapped
from protocol.errors import ConnectionLost
from protocol.limits import MODEL_NAME_PATTERN, SUPERVISOR_NAME
from protocol.names import means, names_of, nearest, unknown_model
from protocol.process.shown import LEVELS
from supervisor.logs.events import KEPT, read_events
from supervisor.logs.files import log_dir, log_path, tail
from supervisor.logs.reading import MOST_LINES, read_log

POLL_S = 0.1
REMOTE_POLL_S = 0.5
BYTES_PER_LINE = 400
Read = Callable[..., dict[str, Any]]
"""Reads a log: ``read_log`` without its path, or ``Client.logs`` without its model."""


@command(
    ("modelctl logs -f llama-8b", "Follow a model's log"),
    ("modelctl logs gateway --since 1h", "Show the gateway's last hour"),
)
@click.argument("model", default=SUPERVISOR_NAME, shell_complete=options.models)
@click.option("-f", "--follow", is_flag=True, help="Go on printing as the log grows.")
@click.option("--since", type=duration_of, metavar="DURATION", help="Show the lines of the last 90s, 15m, 1h, 2d.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=None, help="The most lines to show, the last ones."
    "  [default: 50, or all with --since]",
)  # fmt: skip
@click.option("--raw", is_flag=True, help="Print control characters as they are.")
@json_options
def logs(
    model: str, follow: bool, since: float | None, lines: int | None, raw: bool, as_json: bool, runtime_dir: Path
) -> None:
    """Show a model's log, or the supervisor's own; MODEL may be `gateway`, too.

    MODEL:2 is the second worker of MODEL. With --connect, at most the last 1000 lines are shown without --since, and
    the key needs the right `admin`.
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
            rotated = path.stat().st_ino != os.fstat(file.fileno()).st_ino
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


# The command events: show what the supervisor and its workers did, and why. It works without a running supervisor,
# too.


EVENTS_POLL_S = 0.5
EVENT_INDENT = 4
"""Columns by which the further lines of an event's message are indented on a narrow terminal."""
Event = dict[str, Any]


@command(
    ("modelctl events llama-8b --since 8h --follow", "Show what happened to a model tonight, and each new event"),
)
@options.some
@click.option("-f", "--follow", is_flag=True, help="Go on printing, also when the supervisor is started again.")
@click.option("--since", type=duration_of, metavar="DURATION", help="Show the events of the last 90s, 15m, 1h, 2d.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=None, help="The most events to show.  [default: 50, or all"
    " with --since]",
)  # fmt: skip
@json_options
def events(
    models: tuple[str, ...], follow: bool, since: float | None, lines: int | None, as_json: bool, runtime_dir: Path
) -> None:
    """Show starts, deaths, reloads, evictions and other events, with their causes: all, or those of each MODEL.

    MODEL may be a pattern in quotes, such as 'llama-*', or a model that only the events still know.
    """
    begin = 0.0 if since is None else time.time() - since
    most = (50 if since is None else None) if lines is None else lines
    live = _Live(runtime_dir)
    kept = [] if is_remote() else list(read_events(log_dir(runtime_dir)))
    if not (known := live.new()) and live.client is None:
        click.echo("modelctl: no supervisor is running: these are the events of the last ones", err=True)
    remembered = known[0]["time"] if known else float("inf")  # the first that the supervisor remembers
    every = [*(event for event in kept if event["time"] < remembered), *known]
    models = _meant(models, live.workers() if models else (), every)
    shown = [event for event in every if event["time"] >= begin and _is_about(event, models)]
    for event in shown if most is None else shown[-most:] if most else []:
        _print_event(event, as_json)
    while follow:
        for event in live.new():
            if _is_about(event, models):
                _print_event(event, as_json)
        time.sleep(EVENTS_POLL_S)


class _Live:
    """The events of the running supervisor, and of the one that is started after it."""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self.client: Any = None
        """None if none runs."""
        self._after: int | None = None
        self._newest = 0.0  # time of the newest event that was returned

    def new(self) -> list[Event]:
        """Return the events since the last call, the oldest first. The first call returns all that are remembered.

        Raises ConnectionLost if a supervisor on another machine cannot be reached.
        """
        try:
            if self.client is None:
                self.client, self._after = connect(self._runtime_dir, admin=True), None
            fresh = list(self._read())
        except ConnectionLost:
            if is_remote():
                raise
            self.client = None
            return []
        self._newest = max((event["time"] for event in fresh), default=self._newest)
        return fresh

    def workers(self) -> Sequence[options.Worker]:
        """Return the status of the workers of the supervisor that runs; nothing if none does."""
        workers: Sequence[options.Worker] = () if self.client is None else self.client.status()["models"]
        return workers

    def _read(self) -> Iterator[Event]:
        again = self._after is None  # a new supervisor also remembers the events of the one before
        more = True
        while more:
            reply = self.client.events(after=self._after or 0, limit=KEPT)
            yield from (event for event in reply["events"] if not again or event["time"] > self._newest)
            self._after = reply["last"]
            more = reply["last"] < reply["newest"]


def _meant(given: Sequence[str], workers: Sequence[options.Worker], events: Sequence[Event]) -> tuple[str, ...]:
    """Return the names and patterns that select events: the given ones, and the models of which they are other names.

    Raises WireError for a name, and CommandFailure for a pattern, that means no model of the supervisor and none of the
    events.
    """
    about = {name for event in events for name in (event["model"], event["worker"]) if name is not None}
    about |= {name for worker in workers for name in (worker["name"], worker["model"])}
    models = [{**worker, "name": worker["model"]} for worker in workers]
    found: list[str] = []
    for name in given:
        meant = [model["name"] for model in models if means(model, name) or _matches(names_of(model), name)]
        if not meant and not _matches(about, name):
            if options.is_pattern(name):
                there = ", ".join(sorted(about)) or "none"
                message = f"no model matches {name!r}, now or in the events: there is {there}"
                raise CommandFailure(exit_codes.FAILED, "no_match", message)
            raise unknown_model(name, about, (other for model in models for other in names_of(model)))
        found += [name, *meant]
    return tuple(dict.fromkeys(found))


def _matches(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _is_about(event: Event, models: tuple[str, ...]) -> bool:
    about = [name for name in (event["model"], event["worker"]) if name is not None]
    return not models or any(_matches(about, given) for given in models)


def _print_event(event: Event, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(event, ensure_ascii=False))
        return
    click.echo(line_of(event, terminal_width()))


def line_of(event: Event, width: int | None) -> str:
    """Return an event as text.

    width  columns of the terminal, to which the text is wrapped; None: one line
    """
    stamp = datetime.fromtimestamp(event["time"]).strftime("%Y-%m-%d %H:%M:%S")
    level = event["level"].upper()
    line = f"{stamp} {level:<7} {clean(event['message'])}"
    return wrapped(line, width, EVENT_INDENT).replace(level, painted(level), 1)


# The command log-level: show and set how much the processes write to their logs.


@command(
    ("modelctl log-level llama-8b debug", "Have the workers of a model write more"),
)
@click.argument("name", required=False, metavar="[NAME]", shell_complete=options.models)
@click.argument("level", required=False, metavar="[LEVEL]", type=click.Choice(LEVELS))
@json_options
def log_level(name: str | None, level: str | None, as_json: bool, runtime_dir: Path) -> None:
    """Show the levels of the logs, or set LEVEL: debug, info, warning or error.

    NAME is a model, `supervisor` or `gateway`. Without it, the level is set for all of them. It holds until the
    supervisor ends, or until a reload finds another `supervisor.log_level` in models.yaml.
    """
    if level is None and name in LEVELS:
        name, level = None, name
    with connect(runtime_dir, admin=True) as client:
        levels = client.log_level(name, level)
    if as_json:
        click.echo(json.dumps(levels))
    else:
        click.echo(table([Column("LOG"), Column("LEVEL")], [list(row) for row in levels.items()], terminal_width()))
