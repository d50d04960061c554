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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from modelctl.cli import exit_codes, tables
from modelctl.cli.options import connect, is_remote, supervisor_options, way_to
from modelctl.cli.root import CommandFailure, command, in_colour, painted
from modelctl.cli.tables import GAP, Column, clean, head, lined_up
from protocol.errors import ConnectionLost, WireError
from protocol.process.shown import steer
from supervisor.config.spelling import duration, size

# The screen of ``modelctl top``, as lines of text. Pure: what is shown depends on what was read, not on the clock.


Values = Mapping[str, Any]
HISTORY: Final = 24
"""Values of a line of speeds."""
BARS: Final = " ▁▂▃▄▅▆▇█"
BAR: Final = 20
"""Columns of a bar."""
SORTS: Final = ("age", "tokens", "speed", "model", "key")
"""What requests can be sorted by. The first row has the greatest age, number or speed, or the first name."""
KEYS: Final = (
    "q quit  ↑↓ choose  Tab models/requests  o order: {order}  c cancel  s stop  l log",
    "q quit  ↑↓  Tab  o {order}  c cancel  s stop  l log",
)
"""The last line, and the one of a narrow terminal."""
REVERSE, BOLD, DIM, PLAIN = "\x1b[7m", "\x1b[1m", "\x1b[2m", "\x1b[0m"
MODELS: Final = (
    Column("NAME"), Column("STATE"), Column("NODE", drop=4, rare=True), Column("GPU", drop=4),
    Column("ACTIVE", True), Column("QUEUED", True, 2), Column("TOK/S", True, 1), Column("SPEED", drop=6),
    Column("CACHE", True, 3), Column("VRAM", True, 5), Column("RESTARTS", True, 7), Column("REASON", drop=8, least=24),
)  # fmt: skip
REQUESTS: Final = (
    Column("ID"), Column("MODEL"), Column("KEY", drop=5), Column("STATE", drop=3), Column("PROMPT", True, 6),
    Column("ANSWER", True, 2), Column("TOK/S", True, 4), Column("AGE", True, 1),
)  # fmt: skip


@dataclass
class TopView:
    """What the user sees, and where.

    chosen    the name of the model and the id of the request that are marked
    pane      "models" or "requests": where the arrows move the mark
    message   the result of the last key
    """

    order: str = SORTS[0]
    pane: str = "models"
    chosen: dict[str, str | None] = field(default_factory=lambda: {"models": None, "requests": None})
    message: str = ""


class Readings:
    """What was read last, and what earlier readings say about speeds.

    ``update`` takes the answers to ``status`` and ``requests``, and the time in monotonic seconds.
    """

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self.requests: list[dict[str, Any]] = []
        self.unlisted = 0
        self.speeds: dict[str, deque[float]] = {}
        self._tokens: dict[str, tuple[float, int]] = {}

    def update(self, status: dict[str, Any], requests: dict[str, Any], now: float) -> None:
        """Take in new answers."""
        self.status = status
        for model in status["models"]:
            self.speeds.setdefault(model["name"], deque(maxlen=HISTORY)).append(model["tokens_per_s"])
        self.requests = [each | {"speed": self._speed(each, now)} for each in requests["requests"]]
        self.unlisted = requests["total"] - len(self.requests)
        self._tokens = {each["id"]: (now, each["tokens"]) for each in self.requests}

    def _speed(self, request: Values, now: float) -> float | None:
        """Return the tokens per second of a request since the last reading; None at its first one."""
        before = self._tokens.get(request["id"])
        if before is None or now <= before[0]:
            return None
        return max(0.0, float(request["tokens"] - before[1]) / (now - before[0]))

    def ordered(self, order: str) -> list[dict[str, Any]]:
        """Return the requests in one of the orders SORTS."""
        keys = {
            "age": lambda r: -r["age_ms"],
            "tokens": lambda r: -r["tokens"],
            "speed": lambda r: -(r["speed"] or 0),
            "model": lambda r: (r["model"], -r["age_ms"]),
            "key": lambda r: (r["key"] or "", -r["age_ms"]),
        }
        return sorted(self.requests, key=keys[order])


def moved(names: Sequence[str], chosen: str | None, by: int) -> str | None:
    """Return the name that is ``by`` rows below the chosen one. What has gone is replaced by the first."""
    if not names:
        return None
    at = names.index(chosen) + by if chosen in names else 0
    return names[max(0, min(len(names) - 1, at))]


def drawn(readings: Readings, view: TopView, width: int, height: int, *, colours: bool) -> list[str]:
    """Return the lines of the screen, at most ``height`` of at most ``width`` columns each."""
    first = [*_head(readings.status, readings.requests, width), ""]
    models = _models(readings, view, width)
    requests = _requests(readings, view, width)
    room = height - len(first) - 4  # two headings, an empty line and the last line
    most = max(3, min(len(models) - 1, room - min(len(requests) - 1, room // 2)))
    shown = _around(models, view.chosen["models"], most)
    rest = _around(requests, view.chosen["requests"], max(1, room - (len(shown) - 1)))
    lines = [*((text, None) for text in first), *shown, ("", None), *rest]
    lines = lines[: height - 1] + [("", None)] * (height - 1 - len(lines))
    keys = [each.format(order=view.order) for each in KEYS]
    last = view.message or next((each for each in keys if len(each) <= width), keys[-1])
    drawn = [_painted(head(text, width), mark, view, colours=colours) for text, mark in lines]
    return [*drawn, f"{DIM}{head(last, width)}{PLAIN}" if colours else head(last, width)]


Line = tuple[str, tuple[str, str, str] | None]
"""(text, (pane, name, state) of a row; None for other lines)"""


def _painted(text: str, mark: tuple[str, str, str] | None, view: TopView, *, colours: bool) -> str:
    if mark is None:
        return text
    pane, name, state = mark
    if not state:  # a heading
        return f"{BOLD}{text}{PLAIN}" if colours else text
    if view.chosen[pane] == name:
        if pane == view.pane:
            return f"{REVERSE}{text}{PLAIN}"  # the mark is no colour: without it nobody sees what a key acts on
        return f"{BOLD}{text}{PLAIN}" if colours else text
    before, found, after = text.partition(f"{GAP}{state}")
    return f"{before}{GAP}{painted(state)}{after}" if colours and found else text


def _around(lines: list[Line], chosen: str | None, most: int) -> list[Line]:
    """Return the heading and at most ``most`` rows, the chosen one among them."""
    heading, rows = lines[0], lines[1:]
    at = next((i for i, (_, mark) in enumerate(rows) if mark is not None and mark[1] == chosen), 0)
    first = max(0, min(at - most + 1, len(rows) - most)) if at >= most else 0
    return [heading, *rows[first : first + most]]


def _head(status: Values, requests: Sequence[Values], width: int) -> Iterator[str]:
    supervisor, models = status["supervisor"], status["models"]
    running = sum(model["active"] for model in models)
    waiting = sum({model["model"]: model["queued"] for model in models}.values())
    speed = sum(model["tokens_per_s"] for model in models)
    ready = sum(model["state"] == "ready" for model in models)
    parts = [
        "shutting down"
        if supervisor.get("shutting_down")
        else f"{ready} of {tables.counted(len(models), 'worker')} ready",
        f"{running} running, {waiting} waiting",
        f"{speed:.0f} tokens/s",
        f"up {duration(supervisor['uptime_s'])}",
        f"modelctl {supervisor['version']}",
    ]
    text = parts[0]
    for part in parts[1:]:
        text = f"{text}, {part}" if len(text) + len(part) + 2 <= width else text
    yield head(text, width)
    for gpu in status.get("gpus") or ():
        used, total = gpu["used_bytes"], gpu["total_bytes"]
        parts = [f"GPU {gpu['index']} {_bar(used, total)} {size(used)} of {size(total)}"]
        parts += [sensors] if (sensors := tables.sensors(gpu)) else []
        yield head(", ".join(parts), width)
    if why := status.get("gpus_unknown"):
        yield head(clean(f"the GPUs cannot be read: {why}"), width)
    if cluster := supervisor.get("cluster"):
        yield head(clean(f"cluster: {_machines(cluster)}"), width)


def _machines(cluster: Values) -> str:
    """Return the machines of a cluster in one line, or why it cannot be used."""
    if why := cluster["trouble"]:
        return str(why)
    total, free = (sum(node[key] for node in cluster["nodes"]) for key in ("gpus", "free"))
    text = f"{tables.counted(len(cluster['nodes']), 'machine')}, {total - free:g} of {total:g} GPUs leased"
    return f"{text}; gone: {', '.join(node['name'] for node in cluster['gone'])}" if cluster["gone"] else text


def _bar(part: float, whole: float) -> str:
    filled = round(BAR * min(1.0, part / whole)) if whole else 0
    return f"[{'#' * filled}{'-' * (BAR - filled)}]"


def _models(readings: Readings, view: TopView, width: int) -> list[Line]:
    rows = []
    for model in readings.status["models"]:
        stats = model.get("engine_stats") or {}
        progress = model.get("progress")
        state = model["state"]
        if progress and progress.get("total"):
            state = f"{state} {tables.percent(min(1.0, progress['done'] / progress['total']))}"
        cells = (
            model["name"], state, model.get("node") or "-", str(model["gpu"]), str(model["active"]),
            str(model["queued"]), f"{model['tokens_per_s']:.0f}", _line(readings.speeds[model["name"]]),
            tables.cache_in_use(stats) or "-",
            size(model["vram_bytes"]) if model.get("vram_bytes") else "-", str(model["restarts"]),
            model.get("reason") or "-",
        )  # fmt: skip
        rows.append((cells, ("models", model["name"], model["state"])))
    return _table(MODELS, rows, width, "models")


def _line(values: Sequence[float]) -> str:
    """Return values as a line of blocks, whose tallest is the greatest value."""
    top = max(values, default=0)
    if not top:
        return "".ljust(HISTORY)
    return "".join(BARS[round(value / top * (len(BARS) - 1))] for value in values).rjust(HISTORY)


def _requests(readings: Readings, view: TopView, width: int) -> list[Line]:
    rows = []
    for each in readings.ordered(view.order):
        state = each["state"] if each["queue_position"] is None else f"queued {each['queue_position']}"
        prompt = f"~{each['prompt_tokens_estimate']}" if each["prompt_tokens"] is None else str(each["prompt_tokens"])
        cells = (
            each["id"], each["model"], each["key"] or "-", state, prompt, str(each["tokens"]),
            "-" if each["speed"] is None else f"{each['speed']:.0f}", duration(each["age_ms"] / 1000),
        )  # fmt: skip
        rows.append((cells, ("requests", each["id"], each["state"])))
    lines = _table(REQUESTS, rows, width, "requests")
    if readings.unlisted > 0:
        lines.append((f"{readings.unlisted} more", None))
    return lines


def _table(
    columns: Sequence[Column], rows: Sequence[tuple[tuple[str, ...], tuple[str, str, str]]], width: int, pane: str
) -> list[Line]:
    """Return a heading and the rows, without the columns for which there is no room."""
    heading, *lines = lined_up(columns, [[clean(cell) for cell in cells] for cells, _ in rows], width, paint=False)
    return [(heading, (pane, "", "")), *((line, mark) for line, (_, mark) in zip(lines, rows, strict=True))]


MOST_REQUESTS: Final = 200
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Use the terminal's second screen without a cursor, and go back to the first one as it was."""
ARROWS: Final = {"\x1b[A": -1, "\x1bOA": -1, "k": -1, "\x1b[B": 1, "\x1bOB": 1, "j": 1}

_KEY: Final = re.compile(r"\x1b[\[O][A-Z]|.", re.DOTALL)
"""A key as the terminal sends it. Several may come at once."""


@command(
    ("modelctl top --interval 5 --connect tcp://192.168.1.5:5570 --key-file ops.key", "Watch another machine"),
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
        self._readings, self._view = Readings(), TopView()
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
        lines = drawn(self._readings, self._view, size.columns, size.lines, colours=self._colours)
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
        self._order(lambda: self._client.cancel_request(request), f"request {request} is cancelled")

    def _stop(self, worker: str | None, asked: str | None) -> None:
        if worker is None:
            return
        model = worker.partition(":")[0]
        if asked != model:
            self._asked = model
            self._view.message = f"press s again to stop {model}; its requests finish first"
            return
        order = partial(self._client.call, "stop", reply_timeout=self._client.timeout, model=model)
        self._order(order, f"{model} is being stopped")

    def _order(self, order: Callable[[], object], done: str) -> None:
        try:
            order()
            self._view.message = done
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
            command = [sys.executable, "-m", "supervisor", "logs", "-f", worker, *to]
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
