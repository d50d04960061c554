"""Run episodes on one supervisor after another. Each supervisor is checked after each episode.

A new supervisor uses the directories of the one before.
"""

import contextlib
import io
from collections.abc import Iterable, Iterator
from itertools import groupby

import psutil

from protocol.process.compiled import SWITCH
from tests.chaos import vitals
from tests.chaos.episode import Episode, Outcome
from tests.chaos.faults import begin_limited
from tests.chaos.invariants import Violation
from tests.chaos.load import warm_up
from tests.chaos.machines import DRIVER, NOTICED, Machines
from tests.chaos.plan import BLOCK, RIVALS, STOP, WATCH, BlockPlan, EpisodePlan, plan_block, plan_episode
from tests.serving import Serving
from tests.stopped_reader import StoppableReader

MIB = 1 << 20


def _sections(block: BlockPlan) -> dict[str, object]:
    return {"stop": STOP, "restart": block.restart, "poison": block.poison, "watch": WATCH}


def _start(block: BlockPlan, serving: Serving, mutant: str) -> None:
    """Start a supervisor for a block, in the directories of the one before."""
    serving._beside["groups"] = {"rivals": {"models": [*RIVALS]}} if RIVALS[0] in block.models else None
    serving.environment[SWITCH] = "1" if block.compiled else "0"
    serving.environment[NOTICED] = str(block.noticed_s)
    script = begin_limited(serving.directory, block.descriptors, mutant, DRIVER if block.noticed_s else "")
    serving.start_again(block.models, script, stall=block.stall, **_sections(block))


def run(
    seed: int,
    episodes: Iterable[int],
    *,
    only: tuple[str, ...] = (),
    mutant: str = "",
    patience_s: float = 40.0,
    nodes: bool = False,
) -> Iterator[Outcome]:
    """Run these episodes in order and yield their outcomes. Replace the supervisor after a broken invariant."""
    warm_up()
    reader = StoppableReader("pipe")
    serving = Serving({}, begin=False, output=reader)
    machines = Machines(serving.directory / "machines", serving._mark) if nodes else None
    serving._beside["cluster"] = machines and machines.section
    try:
        for number, numbers in groupby(episodes, key=lambda episode: episode // BLOCK):
            block = plan_block(seed, number, nodes)
            waiting = list(numbers)
            while waiting:
                _start(block, serving, mutant)
                had: set[int] = set()
                while waiting and waiting[0] not in had:  # a repeated prompt may be poisoned
                    had.add(waiting[0])
                    plan = plan_episode(seed, waiting.pop(0), only, nodes)
                    outcome = _one(serving, plan, block, patience_s, machines)
                    yield outcome
                    if outcome.violations or outcome.plan.final:
                        break
                _end(serving)
    finally:
        if hasattr(serving, "process"):
            _end(serving)
            with contextlib.redirect_stdout(io.StringIO()):
                serving.__exit__(None, None, None)
        if machines is not None:
            machines.close()
        reader.__exit__()


_baselines: dict[int, tuple[vitals.Vitals, vitals.Logs]] = {}


def _one(
    serving: Serving, plan: EpisodePlan, block: BlockPlan, patience_s: float, machines: Machines | None
) -> Outcome:
    """Run an episode. Add violations for prompts in logs and for memory that the supervisor did not give back."""
    if serving.pid not in _baselines:
        _baselines.clear()
        serving.overview()  # opens the connection for such questions, so that the baseline includes it
        _baselines[serving.pid] = vitals.take(serving), vitals.Logs(serving.runtime_dir / "logs")
    before, logs = _baselines[serving.pid]
    outcome = Episode(serving, plan, block, before, patience_s, machines).run()
    outcome.violations += logs.look()
    if serving.process.poll() is None:
        rss = psutil.Process(serving.pid).memory_info().rss
        if rss > before.rss + vitals.MEMORY_MIB * MIB:
            message = f"{rss // MIB} MiB, {before.rss // MIB} before"
            outcome.violations.append(Violation("memory is bounded", message))
    return outcome


def _end(serving: Serving) -> None:
    """Kill the supervisor if it still runs, and wait for its processes to end."""
    if serving.process.poll() is None:
        serving.process.kill()
        serving.process.wait()
    serving._killed = True
    for process in serving.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.wait(10)
