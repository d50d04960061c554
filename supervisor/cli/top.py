"""The command top: models and requests, live and in place, in a terminal."""

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click

from protocol.errors import ConnectionLost, WireError
from protocol.process.terminal_text import steer
from supervisor.cli import exit_codes
from supervisor.cli.colours import in_colour
from supervisor.cli.command import Command
from supervisor.cli.errors import CommandFailure
from supervisor.cli.options import connect, is_remote, supervisor_options, way_to
from supervisor.cli.top_screen import SORTS, Readings, View, moved, screen

MOST_REQUESTS: Final = 200
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Use the terminal's second screen without a cursor, and go back to the first one as it was."""
ARROWS: Final = {"\x1b[A": -1, "\x1bOA": -1, "k": -1, "\x1b[B": 1, "\x1bOB": 1, "j": 1}

_KEY: Final = re.compile(r"\x1b[\[O][A-Z]|.", re.DOTALL)
"""A key as the terminal sends it. Several may come at once."""


@click.command(
    cls=Command,
    examples={
        "modelctl top": "Watch the models and the requests of this machine",
        "modelctl top --interval 5 --connect tcp://192.168.1.5:5570 --key-file ops.key": "Watch another machine",
    },
)
@click.option(
    "--interval", type=click.FloatRange(0.2, 60), default=1.0, show_default=True, help="Seconds between looks."
)
@supervisor_options
def top(interval: float, runtime_dir: Path) -> None:
    """Show models, GPUs and requests live. The last line names the keys. No text of a request is shown."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        text = "top needs a terminal: use `modelctl ps`, `modelctl requests` or `modelctl metrics`"
        raise CommandFailure(exit_codes.USAGE, "no_terminal", text)
    with connect(runtime_dir, admin=True) as client:
        _Top(client, interval, runtime_dir).run()


class _Top:
    def __init__(self, client: Any, interval: float, runtime_dir: Path) -> None:
        self._client, self._interval, self._runtime_dir = client, interval, runtime_dir
        self._readings, self._view = Readings(), View()
        self._colours = in_colour()
        self._asked: str | None = None  # the model that a second `s` stops

    def run(self) -> None:
        """Show the screen until the user leaves, or the supervisor does."""
        self._read()  # before the screen is taken: an error stands where the user sees it
        with _own_screen() as resized:
            due = time.monotonic() + self._interval
            while True:
                self._draw()
                ready, _, _ = select.select([sys.stdin, resized], [], [], max(0.0, due - time.monotonic()))
                if resized in ready:
                    os.read(resized, 4096)
                if sys.stdin in ready:
                    typed = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
                    if not typed:  # the terminal has gone
                        return
                    if any(self._press(key) for key in _KEY.findall(typed)):
                        return
                if time.monotonic() >= due:
                    self._read()
                    due = time.monotonic() + self._interval

    def _read(self) -> None:
        self._readings.update(self._client.status(), self._client.requests(MOST_REQUESTS), time.monotonic())
        for pane, names in self._names().items():
            self._view.chosen[pane] = moved(names, self._view.chosen[pane], 0)

    def _names(self) -> dict[str, list[str]]:
        """Return the names of the rows of both panes, in the order in which they are shown."""
        return {
            "models": [model["name"] for model in self._readings.status["models"]],
            "requests": [request["id"] for request in self._readings.ordered(self._view.order)],
        }

    def _draw(self) -> None:
        size = shutil.get_terminal_size()
        lines = screen(self._readings, self._view, size.columns, size.lines, colours=self._colours)
        steer(sys.stdout, "\x1b[H")
        for number, line in enumerate(lines):
            steer(sys.stdout, "\x1b[K\r\n" if number else "")
            sys.stdout.write(line)
        steer(sys.stdout, "\x1b[K\x1b[J")
        sys.stdout.flush()

    def _press(self, key: str) -> bool:
        """Do what a key says. Return whether the user wants to leave."""
        view = self._view
        asked, self._asked = self._asked, None
        view.message = ""
        if key in ("q", "Q", "\x1b"):
            return True
        if key in ARROWS:
            view.chosen[view.pane] = moved(self._names()[view.pane], view.chosen[view.pane], ARROWS[key])
        elif key == "\t":
            view.pane = "requests" if view.pane == "models" else "models"
        elif key == "o":
            view.order = SORTS[(SORTS.index(view.order) + 1) % len(SORTS)]
        elif key == "c":
            self._cancel(view.chosen["requests"])
        elif key == "s":
            self._stop(view.chosen["models"], asked)
        elif key == "l":
            self._show_log(view.chosen["models"])
        return False

    def _cancel(self, request: str | None) -> None:
        if self._view.pane != "requests" or request is None:
            self._view.message = "c cancels the marked request: Tab goes to the requests"
            return
        try:
            self._client.cancel_request(request)
            self._view.message = f"request {request} is cancelled"
        except ConnectionLost:
            raise
        except WireError as e:
            self._view.message = str(e)

    def _stop(self, worker: str | None, asked: str | None) -> None:
        if worker is None:
            return
        model = worker.partition(":")[0]
        if asked != model:
            self._asked = model
            self._view.message = f"press s again to stop {model}; its requests finish first"
            return
        try:
            self._client.call("stop", reply_timeout=self._client.timeout, model=model)
            self._view.message = f"{model} is being stopped"
        except ConnectionLost:
            raise
        except WireError as e:
            self._view.message = str(e)

    def _show_log(self, worker: str | None) -> None:
        if worker is None:
            return
        way = way_to(self._runtime_dir)
        to = ["--runtime-dir", str(self._runtime_dir)]
        if is_remote():
            to = ["--connect", str(way["endpoint"]), "--key-file", str(way["key"])]
        with _first_screen():
            command = [
                sys.executable,
                "-m",
                "supervisor",
                "logs",
                "-f",
                worker,
                *to,
            ]
            click.echo(f"modelctl: the log of {worker}; Ctrl-C goes back to top", err=True)
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the log
            try:
                shown = subprocess.run(
                    command,
                    check=False,
                    stderr=subprocess.PIPE,
                    text=True,
                    preexec_fn=lambda: signal.signal(signal.SIGINT, before),
                )
                if shown.returncode not in (exit_codes.OK, exit_codes.INTERRUPTED):
                    self._view.message = shown.stderr.strip().rpartition("\n")[2]
            finally:
                signal.signal(signal.SIGINT, before)


@contextmanager
def _own_screen() -> Iterator[int]:
    """Take the terminal, and give it back as it was. Yield a descriptor that is readable when its size has changed."""
    mode = termios.tcgetattr(sys.stdin)
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    steer(sys.stdout, ENTER)
    tty.setcbreak(sys.stdin)
    try:
        yield reading
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, mode)
        steer(sys.stdout, LEAVE)
        sys.stdout.flush()
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGWINCH, before)
        os.close(reading)
        os.close(writing)


@contextmanager
def _first_screen() -> Iterator[None]:
    """Lend the terminal, in its usual mode, to another program."""
    mode = termios.tcgetattr(sys.stdin)
    usual = termios.tcgetattr(sys.stdin)
    usual[3] |= termios.ICANON | termios.ECHO
    steer(sys.stdout, LEAVE)
    sys.stdout.flush()
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, usual)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, mode)
        steer(sys.stdout, ENTER)
