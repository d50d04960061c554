"""Check that workers that hang are killed in time, and that workers that are only slow are not killed.

    python -m benchmarks.hangs [--count 20] [--seconds 60]

First, workers are stopped (SIGSTOP: idle, decoding and loading) and deadlocked with the GIL held (in a step),
``--count`` times each, while another model streams. The result is the time from the end of each worker's lease until
the worker was gone. The lease is counted from the signal, or from the last token before the deadlock. (An idle worker's
last heartbeat may be up to 0.2 s older than the signal. That is added.) The requests of these workers are resumed, and
each answer is checked. The engine is a deterministic one that needs no torch.

Then, for ``--seconds``, the parts of loads and the steps of prompts take 70 % of their leases, while the supervisor
itself is stopped for 2.5 leases again and again. At the end both are done once more on the embedded engine.
"""

import os
import select
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Server, arguments_for
from benchmarks.report import Result, write
from modelctl import Client
from protocol.errors import ConnectionLost
from supervisor.workers.environment import DEMO_DIR
from tests.deterministic_engine import answer
from tools.demo_models import corpus

LEASE_S = 2.0
SLOW_S = 0.7 * LEASE_S
IDLE_TURN_S = 0.2
SETTINGS: dict[str, Any] = {
    "restart": {"limit": 1000, "window": "1m", "initial": 0, "max": 0},
    "poison": {"limit": 1000, "window": "10m"},
    "watch": {"start": "60s", "load": LEASE_S, "idle": LEASE_S, "step": LEASE_S},
}
TOKENS = 60


@dataclass
class Tally:
    """The results of one kind of hang. ``late``: seconds from the lease's end until the process was gone."""

    late: list[float] = field(default_factory=list)
    wrong: int = 0
    other_reasons: int = 0


def custom(directory: Path, target: str, **options: Any) -> dict[str, Any]:
    return {"model_dir": str(directory), "engine": target, "gpu": "cpu", "options": options, "max_batch_size": 8}


def fake(directory: Path, kind: str, **options: Any) -> dict[str, Any]:
    module = "deterministic_engine" if kind in ("DeterministicEngine", "SlowLoad") else "hanging_engines"
    return custom(directory, f"tests.{module}:{kind}", **{"step_s": 0.005, "context": 100_000, **options})


def wait_gone(pidfd: int) -> float:
    """Wait for a process's end and return its time."""
    select.select([pidfd], [], [], 60)
    os.close(pidfd)
    return time.monotonic()


class Hanger:
    """The driver that makes one model hang again and again, over a connection of its own."""

    def __init__(self, server: Server, model: str, tally: Tally) -> None:
        self.server, self.model, self.tally = server, model, tally

    def stopped_idle(self, number: int) -> None:
        status = self.server.wait_state(self.model, "ready")
        self._stop(status["pid"], IDLE_TURN_S)
        self._check()

    def stopped_loading(self, number: int) -> None:
        self.server.wait_state(self.model, "ready")
        with Client(runtime_dir=self.server.runtime_dir, admin=True) as admin:
            admin.call("restart", model=self.model)
        while not (status := self.server.wait_state(self.model, "loading"))["progress"]:
            time.sleep(0.02)  # from the first progress on, the worker renews its lease every 10 ms
        self._stop(status["pid"], 0.0)
        self._check()

    def stopped_decoding(self, number: int) -> None:
        status = self.server.wait_state(self.model, "ready")
        with self.server.client() as client:
            prompt = f"{self.model} {number}"
            stream = client.generate(self.model, prompt, max_tokens=TOKENS)
            next(stream)
            self._stop(status["pid"], 0.0)
            self.tally.wrong += stream.complete().text != answer(prompt, TOKENS)
        self._check()

    def deadlocked(self, number: int) -> None:
        status = self.server.wait_state(self.model, "ready")
        with self.server.client() as client:
            prompt = f"hang gil {number}"
            stream = client.generate(self.model, prompt, max_tokens=TOKENS)
            pidfd, seen = os.pidfd_open(status["pid"]), 0
            while seen < 5:
                seen += len(next(stream).token_ids)
            begun = time.monotonic()
            self.tally.late.append(wait_gone(pidfd) - begun - LEASE_S)
            self.tally.wrong += stream.complete().text != answer(prompt, TOKENS)
        self._check()

    def _stop(self, pid: int, older_s: float) -> None:
        pidfd, begun = os.pidfd_open(pid), time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        self.tally.late.append(wait_gone(pidfd) - begun - LEASE_S + older_s)

    def _check(self) -> None:
        status = self.server.wait_state(self.model, "ready")
        self.tally.other_reasons += (status["last_exit"] or {}).get("reason") != "hung"


def together(works: list[Callable[[], None]]) -> None:
    """Run all functions at once. Raises RuntimeError if one of them raises."""
    failed: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(works)} failed") from failed[0]


def hang_all(scratch: Path, count: int) -> list[Result]:
    models = {name: fake(scratch, "DeterministicEngine") for name in ("idle", "decoding", "other")}
    models |= {"loading": fake(scratch, "SlowLoad", load_s=1.0)}
    models |= {name: fake(scratch, "HangsOnce") for name in ("gil-1", "gil-2")}
    stops, deadlocks, bystander_wrong = Tally(), Tally(), []
    done = threading.Event()
    with Server(models, settings=SETTINGS) as server:

        def rounds(model: str, how: Callable[[Hanger, int], None], tally: Tally, times: int) -> Callable[[], None]:
            hanger = Hanger(server, model, tally)

            def run() -> None:
                for number in range(times):
                    how(hanger, number)

            return run

        def bystander() -> None:
            with server.client() as client:
                number = 0
                while not done.is_set():
                    number += 1
                    text = client.complete("other", f"other {number}", max_tokens=200).text
                    bystander_wrong.append(text != answer(f"other {number}", 200))

        beside = threading.Thread(target=bystander)
        beside.start()
        try:
            idle, decoding = count - 2 * (count // 3), count // 3
            together(
                [
                    rounds("idle", Hanger.stopped_idle, stops, idle),
                    rounds("decoding", Hanger.stopped_decoding, stops, decoding),
                    rounds("loading", Hanger.stopped_loading, stops, count // 3),
                    rounds("gil-1", Hanger.deadlocked, deadlocks, count // 2),
                    rounds("gil-2", Hanger.deadlocked, deadlocks, count - count // 2),
                ]
            )
        finally:
            done.set()
            beside.join()
        others = server.status("other")["generation"] - 1
    return [
        *of_tally("SIGSTOP", stops, count),
        *of_tally("GIL held for ever", deadlocks, count),
        Result("the other model: wrong answers", sum(bystander_wrong), "answers", "<= 0"),
        Result("the other model: answers", len(bystander_wrong), "answers"),
        Result("the other model: restarts", others, "times", "<= 0"),
    ]


def of_tally(what: str, tally: Tally, count: int) -> list[Result]:
    return [
        Result(f"{what}: workers killed as hung", len(tally.late) - tally.other_reasons, "times", f">= {count}"),
        Result(f"{what}: gone after the lease's end, median", statistics.median(tally.late), "s"),
        Result(f"{what}: gone after the lease's end, most", max(tally.late), "s", "<= 2"),
        Result(f"{what}: before the lease's end, most", max(0.0, -min(tally.late)), "s", "<= 0"),
        Result(f"{what}: answers that did not go on as they should", tally.wrong, "answers", "<= 0"),
    ]


def be_slow(server: Server, seconds: float, slow_loads: list[str], prompts: dict[str, tuple[str, int]]) -> list[Result]:
    """Restart models, send long prompts and pause the supervisor for ``seconds``.

    prompts  model → a prompt, and tokens of its answer
    """
    until = time.monotonic() + seconds
    answers, pauses = [0], [0]
    log = server.runtime_dir / "logs" / "supervisor.log"
    loaded_before = log.read_text().count("loading -> ready")
    pid = server.overview()["supervisor"]["pid"]

    def again_and_again(work: Callable[[Client], object], admin: bool = False) -> None:
        """Repeat some work, and reconnect when needed: ipc connections end if the supervisor is silent for 4 s."""
        while time.monotonic() < until:
            try:
                with Client(runtime_dir=server.runtime_dir, admin=admin, timeout=30) as client:
                    while time.monotonic() < until:
                        work(client)
            except ConnectionLost:
                time.sleep(0.1)

    def load(model: str) -> None:
        def restart(admin: Client) -> None:
            if admin.status(model)["models"][0]["state"] == "ready":
                admin.call("restart", model=model)  # the model drains before this call is answered
            while admin.status(model)["models"][0]["state"] != "ready":
                time.sleep(0.05)

        again_and_again(restart, admin=True)

    def ask(model: str) -> None:
        prompt, tokens = prompts[model]

        def complete(client: Client) -> None:
            client.complete(model, prompt, max_tokens=tokens, temperature=0)
            answers[0] += 1

        again_and_again(complete)

    def pause() -> None:
        while time.monotonic() < until:
            time.sleep(4 * LEASE_S)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(2.5 * LEASE_S)
            os.kill(pid, signal.SIGCONT)
            pauses[0] += 1

    works = [partial(load, model) for model in slow_loads] + [partial(ask, model) for model in prompts]
    together([*works, pause])
    output = log.read_text()
    return [
        Result("slow loads", output.count("loading -> ready") - loaded_before, "times"),
        Result("answers with slow steps", answers[0], "answers"),
        Result("pauses of the supervisor", pauses[0], "times"),
        Result("false kills", output.count("killing pid"), "times", "<= 0"),
    ]


def slow_all(scratch: Path, seconds: float) -> list[Result]:
    models = {
        "loads-1": fake(scratch, "LoadsInParts", parts=4, part_s=SLOW_S),
        "loads-2": fake(scratch, "LoadsInParts", parts=2, part_s=SLOW_S),
        "prefills": fake(scratch, "DeterministicEngine", step_s=SLOW_S),
        "fast": fake(scratch, "DeterministicEngine"),
        "idle": fake(scratch, "DeterministicEngine"),
    }
    prompts = {"prefills": ("x" * 10_000, 4), "fast": ("y" * 10_000, 500)}
    with Server(models, settings=SETTINGS) as server:
        return be_slow(server, seconds, ["loads-1", "loads-2"], prompts)


def embedded(scratch: Path, seconds: float) -> list[Result]:
    directory = scratch / "letters"
    shutil.copytree(DEMO_DIR / "letters", directory)
    target = "benchmarks.hanging_embedded:HangsEmbedded"
    prompt, wanted = max(corpus.TEST_PROMPTS["letters"], key=lambda pair: len(pair[1]))
    settings = {**SETTINGS, "watch": {"start": "60s", "load": 60.0, "idle": LEASE_S, "step": LEASE_S}}
    stops, deadlocks = Tally(), Tally()
    models = {"a": custom(directory, target, step_s=0.005), "b": custom(directory, target, gil=True)}
    with Server(models, settings=settings) as server:
        for model, tally in (("a", stops), ("b", deadlocks)):
            status = server.wait_state(model, "ready")
            with server.client() as client:
                stream = client.generate(model, prompt, max_tokens=1000, temperature=0)
                next(stream)
                pidfd = os.pidfd_open(status["pid"])
                if model == "a":
                    os.kill(status["pid"], signal.SIGSTOP)
                begun = time.monotonic()
                tally.late.append(wait_gone(pidfd) - begun - LEASE_S)
                text = stream.complete().text
                tally.wrong += text != wanted
            reason = server.wait_state(model, "ready")["last_exit"]["reason"]
            tally.other_reasons += reason != "hung"
    models = {
        "slow": custom(directory, target, step_s=SLOW_S, parts=4, chunk_size=16),
        "prefills": custom(directory, target, step_s=SLOW_S, chunk_size=128),
    }
    with Server(models, settings=settings) as server:
        slow = be_slow(server, seconds, ["slow"], {"prefills": ((prompt * 100)[:300], 2)})
    results = [*of_tally("SIGSTOP", stops, 1), *of_tally("GIL held for ever", deadlocks, 1), *slow]
    return [Result(f"embedded engine: {r.name}", r.value, r.unit, r.target) for r in results]


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--count", type=int, default=20, help="hangs of each kind")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of slow loads, long prefills and a paused supervisor"
    )
    arguments = parser.parse_args()
    count, seconds = (3, 8.0) if arguments.quick else (arguments.count, arguments.seconds)
    with tempfile.TemporaryDirectory(prefix="modelctl-bench-") as scratch:
        results = hang_all(Path(scratch), count)
        results += slow_all(Path(scratch), seconds)
        results += embedded(Path(scratch), min(seconds, 30.0))
    write("hangs", results, arguments.out)


if __name__ == "__main__":
    main()
