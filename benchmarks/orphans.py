"""Check that nothing is left of a supervisor that is killed, whatever its workers are doing.

    python -m benchmarks.orphans [--rounds 5] [--embedded-rounds 1]

The supervisor gets SIGKILL in each phase of its workers' lives, with two workers each time. Then all processes that
carry the environment of that supervisor, orphans among them, are looked for until there is none: the supervisor, its
guard, the workers, their children and their children's children. The engine needs no torch. Each phase that the
embedded engine has is then tried on it with a demo model as well.
"""

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, Result, write
from tests.serving import Serving, describe, engine, wait_until

LONG = 100_000
GIVE_UP_S = 10.0
TARGET_MS = 500.0
LOAD_S = 120.0
EMBEDDED = {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu", "max_batch_size": 4}


def leave(serving: Serving) -> None:
    """Close the streams and the client that ``stream`` keeps."""
    for each in serving.kept:
        each.close()  # type: ignore[attr-defined]


def nothing(serving: Serving) -> None:
    pass


def stream(serving: Serving, prompt: str, length: int = LONG, **fields: Any) -> None:
    """Let both workers compute. Return when they have begun to answer."""
    client = serving.client()
    streams = [client.generate(model, prompt, max_tokens=length, **fields) for model in ("a", "b")]
    for each in streams:
        for _ in range(5):
            next(each)
    serving.kept += [*streams, client]


def decoding(serving: Serving) -> None:
    stream(serving, "long")


def hung(serving: Serving) -> None:
    stream(serving, "bad", length=50)


def embedded_decoding(serving: Serving) -> None:
    stream(serving, "count to 9000: 10 11 12 ->", length=1900, ignore_eos=True)


def embedded_children(serving: Serving) -> None:
    client = serving.client()
    for model in ("a", "b"):  # each compiles the constraint in a child of its own
        client.complete(model, "x", choice=["yes", "no"])
    serving.kept.append(client)
    assert len(serving.processes()) >= 6, describe(serving.processes())


def stopped(serving: Serving) -> None:
    for model in ("a", "b"):
        serving.worker(model).send_signal(signal.SIGSTOP)


def starting(serving: Serving) -> None:
    for model in ("a", "b"):
        serving.order("start", model=model)


def loading(serving: Serving) -> None:
    for model in ("a", "b"):
        serving.wait_state(model, "loading", LOAD_S)
    wait_until(lambda: serving.status("a")["progress"], LOAD_S, "load progress")


def families(serving: Serving) -> None:
    wait_until(lambda: len(serving.processes()) >= 8, what="two workers, with a child and its child each")


def draining(serving: Serving, compute: Callable[[Serving], None] = decoding) -> None:
    compute(serving)
    serving.order("shutdown")
    serving.wait_state("a", "draining")


def stopping(serving: Serving, compute: Callable[[Serving], None] = hung) -> None:
    compute(serving)
    for model in ("a", "b"):
        serving.order("stop", model=model, now=True)


def stopping_stopped(serving: Serving) -> None:
    stopped(serving)
    for model in ("a", "b"):
        serving.order("stop", model=model, now=True)


@dataclass(frozen=True)
class Phase:
    """A phase of a worker's life.

    entry  the entry of both models in models.yaml
    reach  returns when the phase has begun
    wait   whether both models must be ready before that
    """

    name: str
    entry: dict[str, Any]
    reach: Callable[[Serving], None]
    wait: bool = True


PLAIN = engine(context=2 * LONG)
FORKS = "tests.orphan_engines:ForksFamily"
ESCAPES = "tests.orphan_engines:EscapesBySession"
LOCKS = "tests.orphan_engines:HangsWithTheLock"
PHASES = [
    Phase("starting", engine(autostart=False), starting),
    Phase("loading", engine("SlowLoad"), loading, wait=False),
    Phase("idle", PLAIN, nothing),
    Phase("decoding", PLAIN, decoding),
    Phase("SIGSTOPped", PLAIN, stopped),
    Phase("hung, deaf to SIGTERM", engine("HangsDeaf"), hung),
    Phase("hung with the interpreter's lock", engine() | {"engine": LOCKS}, hung),
    Phase("with children and theirs", engine() | {"engine": FORKS}, families),
    Phase("with children in sessions of their own", engine() | {"engine": ESCAPES}, families),
    Phase("draining", PLAIN, draining),
    Phase("stopping", engine("HangsDeaf"), stopping),
]
EMBEDDED_PHASES = [
    Phase("starting", EMBEDDED | {"autostart": False}, starting),
    Phase("loading", EMBEDDED, loading, wait=False),
    Phase("idle", EMBEDDED, nothing),
    Phase("decoding", EMBEDDED, embedded_decoding),
    Phase("SIGSTOPped", EMBEDDED, stopped),
    Phase("with children", EMBEDDED, embedded_children),
    Phase("draining", EMBEDDED, lambda serving: draining(serving, embedded_decoding)),
    Phase("stopping", EMBEDDED, stopping_stopped),
]


def kill_in(phase: Phase) -> tuple[float, int, int]:
    """Return seconds from the kill until no process is found, the number of processes before, and the number that
    stayed."""
    with redirect_stdout(sys.stderr), Serving({"a": phase.entry, "b": phase.entry}, wait=False) as serving:
        for model in ("a", "b") if phase.wait and phase.entry.get("autostart", True) else ():
            serving.wait_state(model, "ready", LOAD_S)
        phase.reach(serving)
        there = len(serving.processes())
        began = time.perf_counter()
        serving.process.kill()
        while (left := serving.processes()) and time.perf_counter() - began < GIVE_UP_S:
            time.sleep(0.001)
        took = time.perf_counter() - began
        for process in left:
            print(f"  left: {describe([process])}")
            process.kill()
        serving.kill()
        leave(serving)
    return took, there, len(left)


def measure(what: str, phases: list[Phase], rounds: int) -> list[Result]:
    times, left, most = list[float](), 0, 0
    for phase in phases:
        own = []
        for _ in range(rounds):
            took, there, stayed = kill_in(phase)
            own.append(1000 * took)
            left, most = left + stayed, max(most, there)
        print(f"{what}, {phase.name}: {', '.join(f'{ms:.1f}' for ms in own)} ms", flush=True)
        times += own
    return [
        Result(f"{what}: supervisors killed", len(times), "times"),
        Result(f"{what}: processes each had, at most", most, "processes"),
        Result(f"{what}: processes left", left, "processes", "<= 0"),
        Result(f"{what}: all gone, median", statistics.median(times), "ms"),
        Result(f"{what}: all gone, at the latest", max(times), "ms", f"<= {TARGET_MS:g}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="kills in each phase")
    parser.add_argument("--embedded-rounds", type=int, default=1, help="the same on the embedded engine")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    results = measure("torch-free engine", PHASES, arguments.rounds)
    if arguments.embedded_rounds:
        results += measure("embedded engine", EMBEDDED_PHASES, arguments.embedded_rounds)
    write("orphans", results, arguments.out)


if __name__ == "__main__":
    main()
