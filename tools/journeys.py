"""List the product's files that take part in four journeys: a request in, a token out, a start, a death.

python -m tools.journeys [--write PAGE]

The tool serves a demo model on the CPU, and traces every Python function in the supervisor, in its worker and in
their helpers (``sys.setprofile``, which a ``sitecustomize`` on the path of these processes turns on; no product code
knows of it). A file takes part if one of its functions ran between the begin and the end of the journey. What runs
while a module is imported does not count. Compiled code cannot be seen, nor can processes without ``site``: the
guard, NVML, templates.

a request in  from the client's frame to the first step of the engine with the request
a token out   from one step of the engine, in the middle of an answer, to the next one. Meanwhile the supervisor sends
              the token before to the client
a start       from the client's order to the log's line that the model is ready
a death       from SIGKILL for a worker that computes an answer to the log's line that the next one is spawned

Each is traced several times, since timers run now and then. A file counts if it took part in most of them. A start
and a death last for seconds. Functions that ran in an idle supervisor, too, do not count there, unless they called
one that did not.

This file stands by itself: it runs in a checkout of an old commit, too, when it is copied there. ``--write`` puts the
lists into a page behind the comments ``<!-- files of the journey: NAME -->``.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

ROOT = Path.cwd()
PACKAGES = ("answer_formats", "exporter", "gateway", "model_worker", "modelctl", "protocol", "supervisor")
MODEL = "stories"
REQUESTS = 9
STARTS = 3
TOKENS = 24
READY_NS = 20_000_000
"""Nanoseconds after the line "ready" in which the supervisor does what follows from that."""
IDLE_S = 8.0
"""Seconds in which all timers of an idle supervisor have run."""
WITHIN = 120.0
"""Seconds in which anything happens. Traced code takes several times as long as usual."""

TRACER = """
import os, sys, threading, time

ROOT, PACKAGES, DIRECTORY = {root!r}, {packages!r}, {directory!r}
descriptor = os.open(os.path.join(DIRECTORY, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
owner = os.getpid()
numbers = {{}}  # code -> its number in the trace; 0: not a function of the product; -1: a module that is being imported
state = threading.local()

def number_of(frame):
    code = frame.f_code
    path = code.co_filename
    own = path.startswith(ROOT) and path[len(ROOT):].split(os.sep)[0] in PACKAGES
    if not own or code.co_name == "<module>" and frame.f_globals.get("__name__") in ("__main__", "__mp_main__"):
        numbers[code] = 0
    elif code.co_name == "<module>":
        numbers[code] = -1
    elif not code.co_flags & 1:  # the body of a class
        numbers[code] = 0
    else:
        numbers[code] = number = len(numbers) + 1
        os.write(descriptor, f"= {{number}} {{path[len(ROOT):]}} {{code.co_name}}\\n".encode())
    return numbers[code]

def profile(frame, event, argument):
    if event == "call":
        number = numbers.get(frame.f_code)
        if number is None:
            number = number_of(frame)
        if number > 0:
            if not getattr(state, "imports", 0):
                caller = numbers.get(frame.f_back.f_code, 0) if frame.f_back else 0
                os.write(descriptor, f"{{time.time_ns()}} {{number}} {{max(caller, 0)}}\\n".encode())
        elif number < 0:
            state.imports = getattr(state, "imports", 0) + 1
    elif event == "return" and numbers.get(frame.f_code) == -1:
        state.imports -= 1

def forked():
    global descriptor
    sys.setprofile(None)  # the child of a fork; one that runs a program of ours comes here again

os.register_at_fork(after_in_child=forked)
threading.setprofile(profile)
sys.setprofile(profile)
"""


@dataclass
class Trace:
    """The calls in one process: when, in nanoseconds of the wall clock, and which functions ran."""

    times: list[int] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    """File and function of the callee."""
    callers: list[str] = field(default_factory=list)
    """File of the caller, or an empty text."""

    @classmethod
    def read(cls, path: Path) -> "Trace":
        trace = cls()
        functions = {"0": ("", "")}
        for line in path.read_text().splitlines():
            words = line.split(" ")
            if words[0] == "=":
                functions[words[1]] = (words[2], words[3])
            elif len(words) == 3:
                trace.times.append(int(words[0]))
                trace.calls.append(functions[words[1]])
                trace.callers.append(functions.get(words[2], ("", ""))[0])
        return trace

    def functions(self, begin: int, end: int) -> set[tuple[str, str]]:
        """Return the functions that were called between two times."""
        return {*self.calls[self._span(begin, end)]}

    def files(self, begin: int, end: int, idle: Collection[tuple[str, str]]) -> set[str]:
        """Return the files with a function that ran between two times, without those in ``idle``."""
        span = self._span(begin, end)
        counted = [pair for pair in zip(self.calls[span], self.callers[span], strict=True) if pair[0] not in idle]
        return {file for call, caller in counted for file in (call[0], caller)} - {""}

    def _span(self, begin: int, end: int) -> slice:
        return slice(bisect_left(self.times, begin), bisect_left(self.times, end))

    def when(self, wanted: Callable[[str, str], bool]) -> list[int]:
        """Return the times at which a function was called, by file and name."""
        return [time for time, call in zip(self.times, self.calls, strict=True) if wanted(*call)]


class Traces(dict[int, Trace]):
    """The trace of each process, by pid."""

    def functions(self, begin: int, end: int) -> set[tuple[str, str]]:
        return {function for trace in self.values() for function in trace.functions(begin, end)}

    def files(self, begin: int, end: int, idle: Collection[tuple[str, str]] = ()) -> set[str]:
        return {file for trace in self.values() for file in trace.files(begin, end, idle)}


def is_step(file: str, function: str) -> bool:
    return file.startswith("model_worker/engines/") and function == "step"


def in_most(found: list[set[str]]) -> list[str]:
    """Return the files that are in more than half of the sets."""
    count = Counter(file for files in found for file in files)
    return sorted(file for file, number in count.items() if 2 * number > len(found))


class Served:
    """A traced supervisor with one demo model."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._traces = directory / "traces"
        self._runtime_dir = directory / "run"
        self._output = directory / "output"
        self._seen = 0
        self._traces.mkdir()
        tracer = TRACER.format(root=f"{ROOT}{os.sep}", packages=PACKAGES, directory=str(self._traces))
        (directory / "sitecustomize.py").write_text(tracer)
        models = ROOT / "model_worker" / "demo_models"
        entry = {"model_dir": str(models / MODEL), "engine": "transformers", "gpu": "cpu", "autostart": False}
        config = directory / "models.yaml"
        config.write_text(yaml.safe_dump({"models": {MODEL: entry}, "supervisor": {"spare": 0}}))
        path = os.pathsep.join([str(directory), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        serve = ["serve", "-c", str(config), "--runtime-dir", str(self._runtime_dir)]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "import modelctl; modelctl.main()", *serve],
                env=os.environ | {"PYTHONPATH": path},
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def client(self, **options: Any) -> Any:
        from modelctl import Client

        return Client(runtime_dir=self._runtime_dir, timeout=WITHIN, **options)

    def until(self, pattern: str) -> int:
        """Wait for a line of the log that comes after those of earlier waits. Return its time, in nanoseconds."""
        end = time.monotonic() + WITHIN
        while time.monotonic() < end and self.process.poll() is None:
            text = self._output.read_text()
            for line in re.finditer(r".*\n", text[self._seen :]):
                if re.search(pattern, line[0].rstrip()):
                    self._seen += line.end()
                    return int(datetime.fromisoformat(line[0][:29]).timestamp() * 1000) * 1_000_000
            time.sleep(0.002)
        raise SystemExit(f"no line with {pattern!r} within {WITHIN:.0f} s:\n{self._output.read_text()}")

    def traces(self) -> Traces:
        return Traces({int(path.name): Trace.read(path) for path in self._traces.iterdir()})

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(WITHIN)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="journeys-") as directory:
        supervisor = Served(Path(directory))
        try:
            yield supervisor
        finally:
            supervisor.end()


def trace() -> dict[str, list[str]]:
    """Run the four journeys, and return the files of each."""
    starts, deaths = [], []
    with served() as supervisor:
        supervisor.until("modelctl .* serving")
        time.sleep(IDLE_S)  # the supervisor's own start is over
        with supervisor.client(admin=True) as admin, supervisor.client() as client:
            for turn in range(STARTS):
                begun = time.time_ns()
                admin.call("start", model=MODEL)
                supervisor.until(f"{MODEL}: spawned")
                starts.append((begun, supervisor.until(f"{MODEL}: loading -> ready")))
                time.sleep(1)  # what follows from "ready" is done
                (model,) = client.status()["models"]
                if turn == 0:
                    worker = model["pid"]
                    sent = [_ask(client) for _ in range(REQUESTS + 1)]
                    time.sleep(1)  # what the last request has left is done
                    rested = time.time_ns()
                    time.sleep(IDLE_S)
                    woken = time.time_ns()
                deaths.append(_kill(supervisor, client, model["pid"]))
                admin.call("stop", model=MODEL)
                supervisor.until(f"{MODEL}: .* -> stopped")
                time.sleep(IDLE_S)  # what the stop and the answers have left is done
        traces = supervisor.traces()
    steps = traces[worker].when(is_step)
    requests: list[tuple[int, int]] = []
    tokens: list[tuple[int, int]] = []
    for begin in sent[1:]:  # the first one warms up
        first = bisect_left(steps, begin)
        requests.append((begin, steps[first]))
        middle = range(first + TOKENS // 3, first + 2 * TOKENS // 3)
        tokens += [(steps[place], steps[place + 1]) for place in middle]
    idle = traces.functions(rested, woken)
    both = Traces({pid: traces[pid] for pid in (supervisor.process.pid, worker)})  # a helper's work is for later
    return {
        "a request in": in_most([both.files(*span) for span in quickest(requests)]),
        "a token out": in_most([both.files(*span) for span in quickest(tokens)]),
        "a start": in_most([traces.files(begin, end + READY_NS, idle) for begin, end in starts]),
        "a death": in_most([both.files(*span, idle) for span in deaths]),
    }


def quickest(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the shorter half of the spans. In the others, timers may have run."""
    return sorted(spans, key=lambda span: span[1] - span[0])[: (len(spans) + 1) // 2]


def _ask(client: Any) -> int:
    """Have one answer computed. Return the time of the request, in nanoseconds."""
    time.sleep(0.5)  # what the request before has left is done
    begun = time.time_ns()
    client.complete(MODEL, "Once upon a time", max_tokens=TOKENS, temperature=0)
    return begun


def _kill(supervisor: Served, client: Any, worker: int) -> tuple[int, int]:
    """Kill a worker that computes an answer. Return the times of the kill and of the next spawn."""
    prompt = f"Once upon a time, there was a girl of {worker} years"  # a request must not be blamed for two deaths
    stream = client.generate(MODEL, prompt, max_tokens=10 * TOKENS, temperature=0)
    for _, _ in zip(range(3), stream, strict=False):
        pass
    os.kill(worker, signal.SIGSTOP)
    time.sleep(0.2)  # the supervisor has sent what had come: it is part of another journey
    killed = time.time_ns()
    os.kill(worker, signal.SIGKILL)
    again = supervisor.until(f"{MODEL}: spawned")
    stream.close()
    return killed, again


def written(page: str, name: str, files: Iterable[str]) -> str:
    """Return the page with the files behind the comment for a journey, by directory."""
    listed = sorted(map(Path, files), key=lambda file: (file.parent, file.name))
    mark = f"<!-- files of the journey: {name} -->"
    if mark not in page:
        raise SystemExit(f"the page has no line {mark}")
    groups = groupby(listed, lambda file: file.parent)
    shown = [f"`{where}/`: " + ", ".join(f"`{file.name}`" for file in group) for where, group in groups]
    paragraph = textwrap.fill(f"{len(listed)} files: {'; '.join(shown)}.", 120, break_on_hyphens=False)
    return re.sub(re.escape(mark) + r"(\n\d+ files: .*(\n.+)*)?", lambda _: f"{mark}\n{paragraph}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description="List the files of four journeys.")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the lists into this page")
    given = parser.parse_args()
    journeys = trace()
    for name, files in journeys.items():
        print(f"{name}: {len(files)} files", *files, sep="\n    ")
    if given.write:
        page = given.write.read_text()
        for name, files in journeys.items():
            page = written(page, name, files)
        given.write.write_text(page)


if __name__ == "__main__":
    main()
