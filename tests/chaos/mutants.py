"""Supervisors and workers that are broken on purpose, to check that the chaos run notices. ``MUTANTS`` names them.

Each mutant changes classes of the process that imports it, before the main function of the supervisor or the worker.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from protocol.codec import encode
from protocol.messages import TERMINAL, Events
from protocol.process.logs import OutsideOutput
from supervisor.placement import eviction
from supervisor.ports.client_port import ClientPort
from supervisor.reactor import EarliestTimer
from supervisor.requests import table
from supervisor.requests.request import InFlight
from supervisor.requests.scheduler import Scheduler, WorkerEnds
from supervisor.requests.worker_events import WorkerEvents
from supervisor.workers import local
from supervisor.workers.life import HangDetector, HangVerdict, RestartHistory
from supervisor.workers.orphans import Descendants


def _forget_resume() -> None:
    """Drop a request from the table when its worker dies, so that its client waits for ever."""
    original = WorkerEnds._after_death

    def broken(self: Any, request: Any, *rest: Any, **how: Any) -> Any:
        if effects := original(self, request, *rest, **how):
            return effects
        self._table.queues[request.model].remove(request)
        self._table.leave(request)
        return []

    WorkerEnds._after_death = broken  # type: ignore[method-assign]


def _repeat_end() -> None:
    """Send every tenth end twice."""
    original, count = ClientPort.send, [0]

    def broken(self: Any, channel: int, frame: bytes) -> bool:
        sent = original(self, channel, frame)
        if b"finish_reason" in frame:
            count[0] += 1
            if count[0] % 10 == 0:
                original(self, channel, frame)
        return sent

    ClientPort.send = broken  # type: ignore[method-assign]


def _lose_event() -> None:
    """Drop one of 300 small frames to clients."""
    original, count = ClientPort.send, [0]

    def broken(self: Any, channel: int, frame: bytes) -> bool:
        count[0] += frame[:3] != b"" and len(frame) < 100
        if count[0] % 300 == 299:
            count[0] += 1
            return True
        return original(self, channel, frame)

    ClientPort.send = broken  # type: ignore[method-assign]


def _repeat_tokens() -> None:
    """Tell the next worker only how many events were delivered, but not their tokens."""
    original = table._carry

    def broken(request: InFlight) -> dict[str, object]:
        carry = original(request)
        carry.pop("token_ids", None)
        return carry

    table._carry = broken


def _mix_streams() -> None:
    """Now and then exchange the events of two streams of one frame."""
    original, count = WorkerEvents.events, [0]

    def broken(self: Any, worker: str, frame: bytes, message: Events, now: float) -> Any:
        index = message.index
        count[0] += 1
        alike = (
            len(index) == 2 and index[0].length == index[1].length and not (index[0].flags | index[1].flags) & TERMINAL
        )
        if count[0] % 20 == 0 and alike:
            at = index[0].length
            message = Events(message.channel, message.generation, index, message.body[at:] + message.body[:at])
            frame = encode(message)
        return original(self, worker, frame, message, now)

    WorkerEvents.events = broken  # type: ignore[method-assign]


def _keep_gone() -> None:
    """Compute the requests of a client that has left to their ends, and keep them in the table."""
    Scheduler.gone = lambda self, channel, now: []  # type: ignore[method-assign]


def _leak_descriptors() -> None:
    """Leave the pidfds of workers open."""
    original = local.os.close

    class Os:
        def __getattr__(self, name: str) -> Any:
            return getattr(__import__("os"), name)

        def close(self, descriptor: int) -> None:
            import os

            if "pidfd" not in os.readlink(f"/proc/self/fd/{descriptor}"):
                original(descriptor)

    local.os = Os()  # type: ignore[assignment]


def _tell_prompts() -> None:
    """Write requests into the log."""
    original = Scheduler.submit

    def broken(self: Any, channel: int, message: Any, *rest: Any) -> Any:
        import logging

        logging.getLogger("modelctl").info("request %s", message.body)
        return original(self, channel, message, *rest)

    Scheduler.submit = broken  # type: ignore[method-assign]


def _see_no_hang() -> None:
    """Never notice that a worker hangs."""
    HangDetector.check = lambda self, reading, passed_s: HangVerdict.FINE  # type: ignore[method-assign]


def _leave_orphans() -> None:
    """Tell the guard of no worker, do not end the child processes of a dead worker, and give workers marks that say
    nothing."""
    local.Guard.watch = lambda self, group: None  # type: ignore[method-assign]
    Descendants.new_mark = lambda self: os.urandom(8).hex()  # type: ignore[method-assign]
    local.WorkerProcess.end_group = lambda self: None  # type: ignore[method-assign]


def _miss_deadlines() -> None:
    """Never check the deadlines of requests."""
    EarliestTimer.set = lambda self, when: None  # type: ignore[method-assign]


def _wound_others() -> None:
    """Kill the ready workers of other models when a worker ends."""
    from supervisor.fleet.fleet import Fleet

    original = Fleet.on_exit

    def broken(self: Any, process: Any) -> None:
        mine = next(replica for replica in self.registry.replicas.values() if replica.process is process)
        original(self, process)
        for replica in self.registry.replicas.values():
            if replica.model != mine.model and str(replica.state) == "ready" and mine.killed_for is None:
                self.kill(replica, "a fault put in by a test")
                time.sleep(0)

    Fleet.on_exit = broken  # type: ignore[method-assign]


def _try_for_ever() -> None:
    """Start a worker again however often it ends."""
    original = RestartHistory.failed
    RestartHistory.failed = lambda self, now, chance: original(self, now, chance) or 0.1  # type: ignore[method-assign]


def _give_up_soon() -> None:
    """Give a worker up at its second recent end, before the limit is reached."""
    original = RestartHistory.failed

    def broken(self: RestartHistory, now: float, chance: float) -> float | None:
        again = original(self, now, chance)
        return None if self.recent == 2 else again

    RestartHistory.failed = broken  # type: ignore[method-assign]


def _keep_lost_machines() -> None:
    """Never give up a worker whose machine is silent."""
    from supervisor.cluster.launcher import RemoteLauncher

    original = RemoteLauncher.check

    def broken(self: Any, now: float) -> None:
        for worker in self._workers.values():
            worker.silent_s = 0.0
        original(self, now)

    RemoteLauncher.check = broken  # type: ignore[method-assign]


def _leave_agents() -> None:
    """Never tell the cluster to end an agent."""
    from supervisor.cluster.machines import RayStarter

    RayStarter.end = lambda self, number: None  # type: ignore[method-assign]


def _yield_never() -> None:
    """Let no busy model make room for another one."""
    eviction.who_yields = lambda *given, **how: ()  # type: ignore[assignment]


def _wait_for_readers() -> None:
    """Write to standard output and error on the loop's thread."""
    OutsideOutput.write = lambda self, data: os.write(self.fileno(), data)  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "forget resume": _forget_resume,
    "repeat end": _repeat_end,
    "lose event": _lose_event,
    "repeat tokens": _repeat_tokens,
    "mix streams": _mix_streams,
    "keep gone": _keep_gone,
    "leak descriptors": _leak_descriptors,
    "tell prompts": _tell_prompts,
    "see no hang": _see_no_hang,
    "leave orphans": _leave_orphans,
    "miss deadlines": _miss_deadlines,
    "wound others": _wound_others,
    "try for ever": _try_for_ever,
    "give up soon": _give_up_soon,
    "yield never": _yield_never,
    "keep lost machines": _keep_lost_machines,
    "leave agents": _leave_agents,
    "wait for readers": _wait_for_readers,
}
WITH_NODES = ("keep lost machines", "leave agents")
"""Mutants that concern workers on other machines."""
CAUGHT_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "forget resume": ("kill", ("every request ends",)),
    "repeat end": ("kill guard", ("nothing follows the end", "every end has a reason")),
    "lose event": ("kill guard", ("events are numbered without a gap", "every end has a reason")),
    "repeat tokens": ("kill", ("every token is its own",)),
    "mix streams": ("kill guard", ("every token is its own",)),
    "keep gone": ("kill guard", ("everything comes to rest",)),
    "leak descriptors": ("kill", ("everything comes to rest",)),
    "tell prompts": ("kill guard", ("no log holds a prompt",)),
    "see no hang": ("stop", ("everything comes to rest",)),
    "leave orphans": ("trouble", ("everything comes to rest",)),
    # A hang lasts longer than the deadlines and longer than the second after which a cancel counts as confirmed.
    "miss deadlines": ("stop", ("deadlines are kept", "who cancels is told soon")),
    "wound others": ("kill", ("other models are unharmed",)),
    "yield never": ("rival", ("every request ends", "a model gets its turn")),
    "try for ever": ("descriptors", ("a crash loop is given up",)),
    "give up soon": ("kill", ("a model fails for the stated reason",)),
    "keep lost machines": ("stop agent", ("everything comes to rest",)),
    "leave agents": ("stop agent", ("everything comes to rest",)),
    "wait for readers": ("reader stops,kill", ("every request ends", "the supervisor goes on and answers")),
}
"""For each mutant the faults that show it, and the invariants of which at least one is then broken. The client library
itself ends a stream with an error if an event is missing or follows the end."""
PROOF_SEED = 3
"""A seed whose first episodes contain what shows each mutant: a client that leaves, two streams in one frame, ..."""
PATIENCE_S = 8
"""Seconds to wait for something that a mutant never does."""
TOLD = 12
"""Number of first and of last lines of a run's output that are shown where a mutant is missed."""


def main() -> int:
    """Run the chaos test with each mutant, or with those named as arguments. Return 1 if one is not found, else 0."""
    import subprocess
    import sys

    from tests.serving import ROOT

    missed = 0
    for name in sys.argv[1:] or CAUGHT_BY:
        faults, invariants = CAUGHT_BY[name]
        command = [sys.executable, "-m", "tests.chaos", "--episodes", "60", "--seed", str(PROOF_SEED)]
        command += ["--patience", str(PATIENCE_S)]
        command += ["--nodes"] if name in WITH_NODES else []
        done = subprocess.run([*command, "--mutant", name, "--only", faults], cwd=ROOT, capture_output=True, text=True)
        found = [invariant for invariant in invariants if f"VIOLATION: {invariant}: " in done.stderr]
        missed += not found
        print(f"{name:<20} {'found: ' + found[0] if found else 'MISSED'}", flush=True)
        if not found:
            print("\n".join([*done.stderr.splitlines()[:TOLD], *done.stdout.splitlines()[-TOLD:]]), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
