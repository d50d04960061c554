"""Wait for models to reach a state, and show progress meanwhile: a bar for each thing, redrawn in place on a terminal;
elsewhere a line for each phase."""

import math
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from modelctl.cli import exit_codes, options
from modelctl.cli.options import connect
from modelctl.cli.root import CommandFailure, completed
from modelctl.cli.tables import GAP
from protocol.process.shown import steer
from supervisor.config.spelling import PhaseLines, duration, percentage_of, phase_of, size
from supervisor.workers.life import AT_REST, GOING_DOWN, WorkerState

if TYPE_CHECKING:
    from protocol.client.sync_client import Client

# How fast things get on, and how long they still take: ``1.2 GiB of 4.2 GiB, 610 MiB/s, 5 s left``. Pure.


WINDOW_S: Final = 15.0
"""The rate is that of the last seconds, because a load from a cold disk begins more slowly than it goes on."""
FEWEST: Final = 4
"""Samples that are kept even if they are older. A compiler may need a minute for a file."""
SHORTEST_S: Final = 1.0
"""Seconds before a rate is shown. What is over by then needs none."""
SAMPLE_S: Final = 0.2
"""Seconds between two samples."""


class Rate:
    """The pace of one thing, which has phases one after the other.

    All times are seconds of a monotonic clock. A phase's progress is {done, total, unit}, of which ``unit`` may be
    missing: "bytes", or a noun in the plural.
    """

    def __init__(self) -> None:
        self._phase: str | None = None
        self._began = 0.0
        self._samples: deque[tuple[float, int]] = deque()

    def text(self, phase: str, progress: Mapping[str, Any] | None, now: float) -> str:
        """Return how far the phase is, its rate and the time left. Without a total, return how long it has lasted; ""
        in its first second."""
        if phase != self._phase:
            self._phase, self._began = phase, now
            self._samples.clear()
        if progress is None or progress["total"] <= 0:
            return duration(now - self._began) if now - self._began >= SHORTEST_S else ""
        done, total, unit = int(progress["done"]), int(progress["total"]), progress.get("unit") or ""
        parts = [_amount(done, total, unit)]
        if (rate := self._rate(done, now)) > 0:
            if unit:
                parts.append(f"{size(round(rate)) if unit == 'bytes' else f'{rate:.3g} {unit}'}/s")
            if done < total:
                parts.append(f"{_whole((total - done) / rate)} left")
        return ", ".join(parts)

    def _rate(self, done: int, now: float) -> float:
        """Note a sample. Return how much is done in a second; 0 if that is not known yet."""
        samples = self._samples
        if samples and done < samples[-1][1]:
            samples.clear()  # it has begun anew
        if not samples or (done > samples[-1][1] and now - samples[-1][0] >= SAMPLE_S):
            samples.append((now, done))
        while len(samples) > FEWEST and now - samples[1][0] > WINDOW_S:
            samples.popleft()
        began, first = samples[0]
        return (done - first) / (now - began) if now - began >= SHORTEST_S else 0.0


def _whole(seconds: float) -> str:
    left = math.ceil(seconds)
    return f"{left} s" if left < 10 else duration(left)


def _amount(done: int, total: int, unit: str) -> str:
    if unit == "bytes":
        return f"{size(done)} of {size(total)}"
    return f"{done} of {total} {unit}".rstrip()


Progress = Mapping[str, Any]
"""{done, total, unit} of a phase. ``unit`` may be missing: "bytes", or a noun in the plural."""
REDRAW_S: Final = 0.5
"""Seconds between two looks of ``ticking``."""
WIDEST_BAR: Final = 24
NARROWEST_BAR: Final = 6
"""Characters between the brackets of a bar. If the terminal has no room for so many, the bar is left out."""


def bar(done: int, total: int, width: int = WIDEST_BAR) -> str:
    """Return a progress bar: ``[######------]  50%``."""
    share = min(1.0, done / total) if total > 0 else 0.0
    filled = int(share * width)
    return f"[{'#' * filled}{'-' * (width - filled)}] {int(share * 100):3d}%"


@dataclass(frozen=True)
class Shown:
    """What ``LiveLines`` shows about one thing.

    line      the text for a terminal, before the bar
    phase     the text for a log; a change of this text begins a phase
    progress  None if it is not known
    lasts     false if the command does not wait for the end of the phase
    """

    line: str
    phase: str
    progress: Progress | None = None
    lasts: bool = True


class LiveLines:
    """Lines on stderr. On a terminal they are redrawn in place, with a bar, a rate and the time left. Elsewhere a line
    is printed when a phase begins, and then every ten seconds.

    for_people  false if a program reads the command's output; then lines are shown on a terminal only
    """

    def __init__(self, *, for_people: bool = True) -> None:
        self._drawn: list[str] = []
        self._phases = PhaseLines()
        self._paces: dict[str, Rate] = {}
        self._live = sys.stderr.isatty()
        self._silent = not (for_people or self._live)

    def show(self, shown: Mapping[str, Shown]) -> None:
        """Show lines, by the label of what they are about."""
        if self._silent:
            return
        now = time.monotonic()
        if self._live:
            width = shutil.get_terminal_size().columns
            self._draw([self._line(label, each, now, width) for label, each in shown.items()], width)
        else:
            for label, each in shown.items():
                phase = completed(each.phase)
                percentage = percentage_of(each.progress)
                if line := self._phases.due(label, phase, now, percentage=percentage, lasts=each.lasts):
                    sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Remove the lines from the terminal, because something else is printed there."""
        if self._drawn:
            self._draw([], shutil.get_terminal_size().columns)
            sys.stderr.flush()

    def _line(self, label: str, shown: Shown, now: float, width: int) -> str:
        line = completed(shown.line)
        tail = self._paces.setdefault(label, Rate()).text(shown.phase, shown.progress, now) if shown.lasts else ""
        return with_bar(line, shown.progress, tail, width)

    def _draw(self, lines: list[str], width: int) -> None:
        if self._drawn:
            # A line that is longer than the terminal's width takes several rows. All of them are cleared.
            rows = sum(max(1, -(-len(text) // width)) for text in self._drawn)
            steer(sys.stderr, f"\x1b[{rows}A\x1b[J")
        for text in lines:
            sys.stderr.write(f"{text}\n")
        self._drawn = lines


@contextmanager
def ticking(shown: Mapping[str, Shown]) -> Iterator[None]:
    """Redraw lines on a terminal twice a second, while the body of a with statement does something that may take long.
    Then remove the lines. Show nothing elsewhere.

    shown  as for ``LiveLines.show``. It may change meanwhile
    """
    lines, over = LiveLines(for_people=False), threading.Event()

    def tick() -> None:
        with suppress(OSError):  # the terminal has gone, which is no reason to give up the work
            while not over.wait(REDRAW_S):
                lines.show(dict(shown))

    thread = threading.Thread(target=tick, daemon=True)
    if sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
        with suppress(OSError):
            lines.clear()


def with_bar(line: str, progress: Progress | None, tail: str, width: int) -> str:
    """Return a line with a bar that takes the room that the terminal leaves, and the text behind the bar. Pure.

    width  columns of the terminal
    """
    parts = [line]
    if progress is not None and progress["total"] > 0:
        frame = len(bar(0, 1, 0)) + len(GAP) * (1 + bool(tail))
        room = width - 1 - len(line) - len(tail) - frame
        if room >= NARROWEST_BAR:
            parts.append(bar(progress["done"], progress["total"], min(WIDEST_BAR, room)))
        else:
            parts.append(f"{percentage_of(progress)}%")
    return GAP.join([*parts, tail] if tail else parts)


# Wait for models to reach a state.


T = TypeVar("T")
POLL_S = 0.05
MOST_NAMED = 5

ModelStatus = dict[str, Any]
TurnoverReport = dict[str, Any]
"""{number, cause, running, models: [{model, change, state, how?, message?}]}"""


@contextmanager
def goes_on(what: str) -> Iterator[None]:
    """Say what goes on without the command if the user presses Ctrl-C in the body, which gives an order and waits.

    Raises CommandFailure then.

    what  names the order, and says how to see or end what it has begun
    """
    try:
        yield
    except KeyboardInterrupt:
        raise CommandFailure(exit_codes.INTERRUPTED, "interrupted", f"interrupted; {what}") from None


@contextmanager
def ordering(
    runtime_dir: Path, given: Sequence[str], what: str, *, every: bool = False
) -> Iterator[tuple["Client", list[str]]]:
    """Connect for orders. Yield the client and the names of the models to give them for.

    given, every  see ``options.ordered``
    what          as for ``goes_on``, with ``{}`` in the place of the models' names
    """
    with connect(runtime_dir, admin=True) as client:
        names = options.ordered(client, given, every=every)
        words = ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} models"
        with goes_on(what.format(words)):
            yield client, names


def until(client: "Client", found: Callable[[dict[str, Any]], T | None]) -> T:
    """Ask for the supervisor's status until ``found`` finds something in it. Return that.

    Raises ConnectionLost if the supervisor ends meanwhile.
    """
    while (result := found(client.status())) is None:
        time.sleep(POLL_S)
    return result


def wait_for(
    client: "Client", names: Collection[str], done: Callable[[ModelStatus], bool], lines: LiveLines, *, up: bool = False
) -> list[ModelStatus]:
    """Show the models' states until all are done. Returns their last status, in the order of ``names``.

    Raises ConnectionLost if the supervisor ends meanwhile.

    up  the models are to become ready. A supervisor that shuts down stops them first, and answers until it ends. A
        stopped model is no reason then: this function waits for the supervisor's end
    """

    def look(status: dict[str, Any]) -> list[ModelStatus] | None:
        by_name = {m["name"]: m for m in status["models"]}
        models = [by_name[name] for name in names if name in by_name]  # a reload may have taken one out meanwhile
        lines.show({m["name"]: shown(m) for m in models})
        ends = up and status["supervisor"].get("shutting_down")
        return models if all(map(done, models)) and not ends else None

    return until(client, look)


def wait_for_turnovers(client: "Client", numbers: Collection[int], lines: LiveLines) -> list[TurnoverReport]:
    """Show the workers of turnovers (reload, rolling restart) until the turnovers are done. Return their reports.

    Raises ConnectionLost if the supervisor ends meanwhile.
    """

    def look(status: dict[str, Any]) -> list[TurnoverReport] | None:
        turnovers = [turnover for turnover in status["supervisor"]["turnovers"] if turnover["number"] in numbers]
        concerned = {report["model"] for turnover in turnovers for report in turnover["models"] if "how" in report or
                     report["state"] == "running"}  # fmt: skip
        lines.show({model["name"]: shown(model) for model in status["models"] if model["model"] in concerned})
        return None if any(turnover["running"] for turnover in turnovers) else turnovers

    return until(client, look)


def problem_of_gateway(status: dict[str, Any]) -> str | None:
    """Return the problem of the gateway; "" if it serves, or if there is none. None if that is not known yet."""
    gateway = status["supervisor"]["gateway"]
    return "" if gateway is None or gateway["ready"] else gateway["problem"] or None


def shown(model: ModelStatus) -> Shown:
    """Return what is shown about a model while a command waits for it.

    In backoff the phase has the reason, because the command goes on waiting. The reason of a failed model is left out,
    because the command prints it at its end.
    """
    progress, state = model.get("progress"), model["state"]
    phase = f"{model['name']}: {phase_of(state, progress)}"
    if state == WorkerState.BACKOFF and model.get("reason"):
        phase = f"{phase}: {model['reason']}"
    lasts = state not in (*AT_REST, WorkerState.READY, WorkerState.ASLEEP)
    return Shown(_line(model), phase, progress, lasts)


def coming_generation(reply: dict[str, Any]) -> int:
    """Return the generation that an order to start leads to, from the reply to the order.

    A model that is going down gets a new generation.
    """
    generation: int = reply["generation"]
    return generation + (reply["state"] in GOING_DOWN)


def settled_up(model: ModelStatus, wanted: int = 0) -> bool:
    """Return whether a model is ready, or will not become ready by itself.

    wanted  the ordered generation. An older generation that is ready only makes room for it

    One that goes down is not settled: only at rest it is certain whether somebody has stopped it, another model took
    its place, or it starts again.
    """
    if model["state"] in (*AT_REST, WorkerState.ASLEEP) or is_away(model):
        return True
    return bool(model["generation"] >= wanted and model["state"] == WorkerState.READY)


def is_away(model: ModelStatus) -> bool:
    """Return whether a model's files cannot be read. The supervisor tries again for as long as that lasts."""
    return model["state"] == WorkerState.BACKOFF and (model.get("last_exit") or {}).get("reason") == "away"


def settled_down(model: ModelStatus, stopped: int) -> bool:
    """Return whether the generation that was ordered to stop is gone, and its VRAM is back or was given up.

    Somebody may have started the next generation meanwhile.
    """
    if model["generation"] > stopped:
        return True
    return model["state"] in AT_REST and model.get("vram_return") != "awaited"


def settled_asleep(model: ModelStatus) -> bool:
    """Return whether a model that was ordered to sleep does so, or will not."""
    return model["state"] in (*AT_REST, WorkerState.ASLEEP)


def _line(model: ModelStatus) -> str:
    text = f"{model['name']:<16} {model['state']:<9}"
    if progress := model.get("progress"):
        return f"{model['name']:<16} {phase_of(model['state'], progress):<9}"
    if model["state"] == "ready" and model.get("load_seconds") is not None:
        return f"{text} loaded in {model['load_seconds']:.1f} s on {model['device']}"
    return f"{text} {model['reason']}" if model.get("reason") else text


def check_ready(models: Sequence[ModelStatus], wanted: Collection[str] = ()) -> None:
    """Raise CommandFailure, with a line for each model that was to be started and is not ready.

    wanted  the names of all that were to be started. A reload may have taken one out
    """
    failed = [_why_not_ready(m) for m in models if m["state"] != WorkerState.READY]
    there = [m["name"] for m in models]
    failed += [f"{name}: a reload has removed it meanwhile" for name in wanted if name not in there]
    if failed:
        raise CommandFailure(exit_codes.FAILED, "not_ready", *failed)


def _why_not_ready(model: ModelStatus) -> str:
    name, state = model["name"], model["state"]
    if state == WorkerState.STOPPED:
        return f"{name}: somebody else's order stopped it before it was ready"
    if state == WorkerState.ASLEEP:
        return f"{name}: it sleeps ({model['unloaded']}); the next request wakes it"
    if state == WorkerState.UNLOADED:
        return f"{name}: it was unloaded before a request came ({model['unloaded']}); the next request starts it"
    again = "; it is tried again by itself" if is_away(model) else ""
    return f"{name}: {model.get('reason') or 'is ' + state}{again} (log: {model['log']})"
