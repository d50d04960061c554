"""The command logs: show the log of a model's worker, or of the supervisor. It works without a running supervisor,
too."""

import json
import os
import re
import time
from pathlib import Path

import click

from protocol.limits import MODEL_NAME_PATTERN, SUPERVISOR_NAME
from supervisor.cli import completion, exit_codes
from supervisor.cli.command import Command
from supervisor.cli.errors import CommandFailure
from supervisor.cli.options import as_json, runtime_dir_option
from supervisor.logs import log_dir, log_path, tail

POLL_S = 0.1
BYTES_PER_LINE = 400


@click.command(
    cls=Command,
    examples={
        "modelctl logs": "Show the last lines of the supervisor's log",
        "modelctl logs -f llama-8b": "Follow a model's log",
    },
)
@click.argument("model", default=SUPERVISOR_NAME, shell_complete=completion.models)
@click.option("-f", "--follow", is_flag=True, help="Go on printing as the log grows.")
@click.option("-n", "--lines", default=50, show_default=True, help="How many of the last lines to show.")
@as_json
@runtime_dir_option
def logs(model: str, follow: bool, lines: int, as_json: bool, runtime_dir: Path) -> None:
    """Show a model's log, or the supervisor's own.

    Where MODEL has several workers, MODEL:2 is the second.
    """
    name, colon, number = model.partition(":")  # NAME:2, the second of several workers
    if not re.fullmatch(MODEL_NAME_PATTERN, name) or (colon and not re.fullmatch("[1-9][0-9]?", number)):
        # An unchecked name must never become part of a path.
        raise click.UsageError(f"{model!r} is no model name: {_there_are(runtime_dir)}")
    path = log_path(runtime_dir, model)
    if not path.exists():
        raise CommandFailure(exit_codes.FAILED, "no_log", f"no log at {path}: {_there_are(runtime_dir)}")
    position = path.stat().st_size
    for line in tail(path, max(8192, lines * BYTES_PER_LINE))[-lines:] if lines > 0 else []:
        click.echo(_as_object(line) if as_json else line)
    if os.statvfs(path).f_bavail == 0:
        click.echo(f"modelctl: the disk of {path} is full: lines may be lost", err=True)
    if follow:
        _follow(path, position, as_json)


def _there_are(runtime_dir: Path) -> str:
    """Return the names of the logs, for the error about a name without a log. A model that never started has no log."""
    try:
        names = sorted(path.stem for path in log_dir(runtime_dir).glob("*.log"))
    except OSError:  # no permission
        names = []
    return f"there are logs of {', '.join(names)}" if names else "there are no logs; was anything ever served here?"


def _as_object(line: str) -> str:
    return json.dumps({"line": line}, ensure_ascii=False)


def _follow(path: Path, position: int, as_json: bool) -> None:
    """Print lines that are added to the log, also after a new start has rotated the log. Ctrl-C ends the loop."""
    unfinished = ""
    file = open(path, errors="replace")  # noqa: SIM115
    file.seek(position)
    while True:
        chunk = file.read()
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


def _inode(fd: int) -> int:
    return os.fstat(fd).st_ino
