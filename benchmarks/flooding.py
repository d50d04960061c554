"""Flood a supervisor's sockets from a hostile local process, beside a client that must not notice.

    python -m benchmarks.flooding [--rounds 100000] [--seconds 8]

1. The sequence that made libzmq abort the supervisor: connect, send 2,000 small frames with a PING of ZMTP after every
   third one, and leave. There are 50 connections at once, in two processes, on ``front``. A tenth as many follow on
   ``admin``, and on ``back``, which refuses them.
2. Continuous floods, each with one connection and with 50: whole messages of 34 bytes, 2,000 and 100,000 bytes. A
   connection that the supervisor ends is opened again.

Every answer to the client beside the flood is compared with the right answer.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import RESULTS, ROOT, Result, write
from tests.fuzzing.live import WellBehaved, peak
from tests.serving import Serving, engine

AT_ONCE, PROCESSES = 50, 2
SIZES = (34, 2_000, 100_000)
MIB = 1 << 20


def start(serving: Serving, what: str, name: str, *numbers: float) -> "subprocess.Popen[str]":
    """Start an attacker in a process of its own. The last line that it prints is JSON."""
    command = [sys.executable, "-m", "tests.flooding", what, str(serving.runtime_dir / name), *map(str, numbers)]
    return subprocess.Popen(command, cwd=ROOT, env=serving.environment, stdout=subprocess.PIPE, text=True)


def report_of(attacker: "subprocess.Popen[str]") -> dict[str, int]:
    out, _ = attacker.communicate()
    found: dict[str, int] = json.loads(out)
    return found


class Attack:
    """A supervisor of its own, a client at work, and the figures of both afterwards. A context manager."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.results: list[Result] = []
        self.serving = Serving({"b": engine(step_s=0.001)})

    def __enter__(self) -> "Attack":
        self.serving.__enter__()
        self.before = peak(self.serving.pid)
        self.client = WellBehaved(self.serving)
        self.client.start()
        while len(self.client.waits) < 20 and not self.client.wrong:
            time.sleep(0.01)
        self.alone = len(self.client.waits)
        return self

    def __exit__(self, *raised: object) -> None:
        """Take the figures. If the supervisor is dead, there are only a few."""
        died = self.serving.process.poll() is not None
        self.client.leaving.set()
        self.client.join()
        beside = sorted(self.client.waits[self.alone :])
        self.results += [
            Result(f"{self.name}: aborts", int(died), "times", "<= 0"),
            Result(f"{self.name}: wrong or lost answers beside it", len(self.client.wrong), "answers", "<= 0"),
            Result(f"{self.name}: right answers beside it", len(beside), "answers", ">= 1"),
        ]
        if beside:
            self.results.append(Result(f"{self.name}: median wait beside it", 1000 * beside[len(beside) // 2], "ms"))
            self.results.append(Result(f"{self.name}: longest wait beside it", 1000 * beside[-1], "ms"))
        if not died:
            grown = (peak(self.serving.pid) - self.before) / MIB
            self.results.append(Result(f"{self.name}: memory grew by, most", grown, "MiB", "<= 512"))
            ended = self.serving.counters()["connections_cut_off"]
            self.results.append(Result(f"{self.name}: connections that were ended", ended, "connections"))
        self.serving.__exit__(*raised)  # type: ignore[arg-type]


def hit_and_run(name: str, rounds: int) -> list[Result]:
    with Attack(f"flood and leave, {name}") as attack:
        begun = time.monotonic()
        share = rounds // PROCESSES
        attackers = [start(attack.serving, "hit-and-run", name, share, AT_ONCE // PROCESSES) for _ in range(PROCESSES)]
        taken = sum(report_of(attacker)["whole"] for attacker in attackers)
        attack.results.append(Result(f"{attack.name}: rounds", share * PROCESSES, "rounds", f">= {rounds}"))
        attack.results.append(Result(f"{attack.name}: rounds that were read", taken, "rounds"))
        attack.results.append(Result(f"{attack.name}: seconds", time.monotonic() - begun, "s"))
    return attack.results


def flood(size: int, connections: int, seconds: float) -> list[Result]:
    what = "1 connection" if connections == 1 else f"{connections} connections"
    with Attack(f"{what}, {size:,} bytes a message") as attack:
        sent = report_of(start(attack.serving, "flood", "front", seconds, size, connections))["bytes"]
        attack.results.append(Result(f"{attack.name}: sent", sent / MIB, "MiB"))
    return attack.results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each flood")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    results: list[Result] = []
    for name, rounds in (
        ("front", arguments.rounds),
        ("admin", arguments.rounds // 10),
        ("back", arguments.rounds // 10),
    ):
        results += hit_and_run(name, rounds)
    for size in SIZES:
        for connections in (1, AT_ONCE):
            results += flood(size, connections, arguments.seconds)
    write("flooding", results, arguments.out)


if __name__ == "__main__":
    main()
