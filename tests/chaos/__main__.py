"""The command line of the chaos run. ``tests.chaos`` shows how to call it."""

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count

from tests.chaos import block
from tests.chaos.plan import BLOCK
from tests.chaos.report import Report
from tests.serving import ROOT

_PR_SET_PDEATHSIG = 1


class Ended(BaseException):
    """A signal told this process to end. It then reports the episodes that it has run."""


def _end(*_: object) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # a second signal must not keep this process from ending its supervisors
    raise Ended


def _cache_bytecode() -> Callable[[], None]:
    """Keep compiled bytecode in a new directory, since the run starts hundreds of processes.

    Returns a function that removes the directory.
    """
    directory = tempfile.mkdtemp(prefix="chaos-bytecode-")
    os.environ["PYTHONPYCACHEPREFIX"] = directory
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return lambda: shutil.rmtree(directory, ignore_errors=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Random faults against real processes.")
    parser.add_argument("--episodes", type=int, default=None, help="how many; 100 where no --minutes are given")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long")
    parser.add_argument("--seed", type=int, default=None, help="repeat the choices of another run")
    parser.add_argument("--lanes", type=int, default=1, help="supervisors that are tried beside one another")
    parser.add_argument("--replay", metavar="SEED:EPISODE", help="one episode, or SEED:FIRST-LAST, on a new supervisor")
    parser.add_argument("--times", type=int, default=1, help="of a replay")
    parser.add_argument("--nodes", action="store_true", help="workers on other machines, with faults of machines, too")
    parser.add_argument("--only", default="", help="kinds of faults to draw from, separated by commas")
    parser.add_argument("--patience", type=float, default=40.0, help="seconds until what does not happen is missed")
    parser.add_argument("--mutant", default="", help="break the supervisor in one of the ways of tests.chaos.mutants")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first violation")
    parser.add_argument("--verbose", action="store_true", help="tell each episode")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, last")
    parser.add_argument("--lane", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def _lane_of(arguments: argparse.Namespace, lane: int) -> Iterator[int]:
    """Yield the numbers of a lane's episodes. With n lanes, a lane runs every nth block."""
    first = arguments.first
    end = None if arguments.episodes is None else first + arguments.episodes
    for number in count(first // BLOCK + lane, arguments.lanes):
        for episode in range(max(first, number * BLOCK), (number + 1) * BLOCK):
            if end is not None and episode >= end:
                return
            yield episode


def _run(arguments: argparse.Namespace, episodes: Iterator[int]) -> Report:
    report = Report(arguments.seed)
    only = tuple(filter(None, arguments.only.split(",")))
    deadline = time.monotonic() + (arguments.minutes or 1e9) * 60
    running = block.run(
        arguments.seed, episodes, only=only, mutant=arguments.mutant, patience_s=arguments.patience,
        nodes=arguments.nodes,
    )  # fmt: skip
    try:
        for outcome in running:
            before = len(report.violations)
            report.add(outcome)
            if arguments.verbose:
                message = "; ".join(done for _, done in outcome.done)
                print(f"{outcome.plan.number:6} {outcome.took_s:6.2f} s  {message}", file=sys.stderr, flush=True)
            for message in report.violations[before:]:
                print(message, file=sys.stderr, flush=True)
            if (report.violations and not arguments.keep_going) or time.monotonic() > deadline:
                break
            if report.episodes % 200 == 0:
                print(f"{report.episodes} episodes, the last {outcome.plan.number}", file=sys.stderr, flush=True)
    except Ended:
        print(f"ended after {report.episodes} episodes", file=sys.stderr, flush=True)
    finally:
        running.close()
    return report


def _run_lanes(arguments: argparse.Namespace) -> Report:
    report = Report(arguments.seed)
    given = ["--seed", str(arguments.seed), "--json", "--lane"]
    command = [sys.executable, "-m", "tests.chaos", *sys.argv[1:], *given]
    lanes = [
        subprocess.Popen([*command, str(lane)], stdout=subprocess.PIPE, cwd=ROOT, env=dict(os.environ))
        for lane in range(arguments.lanes)
    ]
    try:
        for lane in lanes:
            out = _output(lane, lanes)
            try:
                report.merge(json.loads(out.splitlines()[-1]))
            except (IndexError, ValueError):
                report.violations.append(f"a lane ended with code {lane.returncode} and no report")
                report.brief.append(f"  {report.violations[-1]}")
    finally:
        for lane in lanes:
            if lane.poll() is None:
                lane.terminate()
    return report


def _output(lane: "subprocess.Popen[bytes]", lanes: list["subprocess.Popen[bytes]"]) -> bytes:
    """Wait until a lane ends, and return its output. If this process is told to end, tell all lanes to end."""
    try:
        return lane.communicate()[0]
    except Ended:
        for each in lanes:
            if each.poll() is None:
                each.terminate()
        return lane.communicate()[0]


def main() -> int:
    arguments = _arguments()
    if arguments.lane is not None:
        return _main(arguments)
    clean_up = _cache_bytecode()
    try:
        return _main(arguments)
    except Ended:
        return 143  # ended before there was a report
    finally:
        clean_up()


def _main(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    signal.signal(signal.SIGTERM, _end)  # `timeout` must not leave a supervisor behind
    signal.signal(signal.SIGINT, _end)
    if arguments.seed is None:
        arguments.seed = random.randrange(2**32)
    if arguments.episodes is None and arguments.minutes is None:
        arguments.episodes = 100
    if arguments.replay:
        seed, _, numbers = arguments.replay.partition(":")
        first, _, last = numbers.partition("-")
        arguments.seed = int(seed)
        episodes = list(range(int(first), int(last or first) + 1)) * arguments.times
        report = _run(arguments, iter(episodes))
    elif arguments.lane is not None:
        # the kernel sends this lane SIGTERM when the command that started it dies, so that it can end its supervisor
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        report = _run(arguments, _lane_of(arguments, arguments.lane))
    else:
        print(f"seed {arguments.seed}", flush=True)
        report = _run_lanes(arguments) if arguments.lanes > 1 else _run(arguments, _lane_of(arguments, 0))
    if arguments.lane is None:
        print(report.text())
        print(f"{time.monotonic() - began:.0f} s")
    if arguments.json:
        print(report.to_json())
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
