"""The command events: show what the supervisor and its workers did, and why. It works without a running supervisor,
too."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from protocol.client.model_names import means, names_of
from protocol.errors import ConnectionLost
from protocol.unknown_models import unknown_model
from supervisor.cli import chosen_models, exit_codes
from supervisor.cli.colours import painted
from supervisor.cli.command import Command
from supervisor.cli.durations import Duration
from supervisor.cli.errors import CommandFailure
from supervisor.cli.options import as_json, connect, is_remote, supervisor_options
from supervisor.cli.tables import terminal_width
from supervisor.cli.text_width import clean, wrapped
from supervisor.event_file import read_events
from supervisor.event_history import KEPT
from supervisor.logs import log_dir

POLL_S = 0.5
EVENT_INDENT = 4
"""Columns by which the further lines of an event's message are indented on a narrow terminal."""
Event = dict[str, Any]


@click.command(
    cls=Command,
    examples={
        "modelctl events": "Show the last 50 events",
        "modelctl events --since 8h": "Show what happened tonight",
        "modelctl events llama-8b --follow": "Show the events of a model, and each new one",
    },
)
@chosen_models.some
@click.option("-f", "--follow", is_flag=True, help="Go on printing, also when the supervisor is started again.")
@click.option("--since", type=Duration(), metavar="DURATION", help="Show the events of the last 90s, 15m, 1h, 2d.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), default=None, help="The most events to show.  [default: 50, or all"
    " with --since]",
)  # fmt: skip
@as_json
@supervisor_options
def events(
    models: tuple[str, ...], follow: bool, since: float | None, lines: int | None, as_json: bool, runtime_dir: Path
) -> None:
    """Show starts, deaths, reloads, evictions and other events, with their causes: all, or those of each MODEL.

    MODEL may be a pattern in quotes, such as 'llama-*', or a model that only the events still know.
    Events are kept on disk. So those of a supervisor that has ended can be shown, too. With --json, each event is a
    line of JSON.
    """
    begin = 0.0 if since is None else time.time() - since
    most = (50 if since is None else None) if lines is None else lines
    live = _Live(runtime_dir)
    kept = [] if is_remote() else list(read_events(log_dir(runtime_dir)))
    if not (known := live.new()) and not live.connected:
        click.echo("modelctl: no supervisor is running: these are the events of the last ones", err=True)
    every = list(_joined(kept, known))
    models = _meant(models, live.workers() if models else (), every)
    shown = [event for event in every if event["time"] >= begin and _is_about(event, models)]
    for event in shown if most is None else shown[-most:] if most else []:
        _print(event, as_json)
    while follow:
        for event in live.new():
            if _is_about(event, models):
                _print(event, as_json)
        time.sleep(POLL_S)


class _Live:
    """The events of the running supervisor, and of the one that is started after it."""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._client: Any = None
        self._after: int | None = None
        self._newest = 0.0  # time of the newest event that was returned

    @property
    def connected(self) -> bool:
        return self._client is not None

    def new(self) -> list[Event]:
        """Return the events since the last call, the oldest first. The first call returns all that are remembered.

        Raises ConnectionLost if a supervisor on another machine cannot be reached.
        """
        try:
            if self._client is None:
                self._client, self._after = connect(self._runtime_dir, admin=True), None
            fresh = list(self._read())
        except ConnectionLost:
            if is_remote():
                raise
            self._client = None
            return []
        self._newest = max((event["time"] for event in fresh), default=self._newest)
        return fresh

    def workers(self) -> Sequence[chosen_models.Worker]:
        """Return the status of the workers of the supervisor that runs; nothing if none does."""
        if self._client is None:
            return ()
        workers: Sequence[chosen_models.Worker] = self._client.status()["models"]
        return workers

    def _read(self) -> Iterator[Event]:
        again = self._after is None  # a new supervisor also remembers the events of the one before
        more = True
        while more:
            reply = self._client.events(after=self._after or 0, limit=KEPT)
            yield from (event for event in reply["events"] if not again or event["time"] > self._newest)
            self._after = reply["last"]
            more = reply["last"] < reply["newest"]


def _joined(kept: Sequence[Event], known: Sequence[Event]) -> Iterator[Event]:
    """Yield the events of the file that the supervisor does not remember, then those that it does."""
    first = known[0]["time"] if known else float("inf")
    yield from (event for event in kept if event["time"] < first)
    yield from known


def _meant(given: Sequence[str], workers: Sequence[chosen_models.Worker], events: Sequence[Event]) -> tuple[str, ...]:
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
            if chosen_models.is_pattern(name):
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


def _print(event: Event, as_json: bool) -> None:
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
