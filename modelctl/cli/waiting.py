"""Wait for models to reach a state, and show progress meanwhile."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modelctl.cli import exit_codes, options
from modelctl.cli.live_lines import LiveLines, Shown
from modelctl.cli.options import connect
from modelctl.cli.root import CommandFailure
from protocol.client.sync_client import Client
from supervisor.logs.phases import phase_of
from supervisor.workers.life import AT_REST, GOING_DOWN, WorkerState

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
) -> Iterator[tuple[Client, list[str]]]:
    """Connect for orders. Yield the client and the names of the models to give them for.

    given, every  see ``options.ordered``
    what          as for ``goes_on``, with ``{}`` in the place of the models' names
    """
    with connect(runtime_dir, admin=True) as client:
        names = options.ordered(client, given, every=every)
        words = ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} models"
        with goes_on(what.format(words)):
            yield client, names


def wait_for(
    client: Client, names: list[str], done: Callable[[ModelStatus], bool], *, up: bool = False, for_people: bool = True
) -> list[ModelStatus]:
    """Show the models' states until all are done. Returns their last status, in the order of ``names``.

    Raises ConnectionLost if the supervisor ends meanwhile.

    up  the models are to become ready. A supervisor that shuts down stops them first, and answers until it ends. A
        stopped model is no reason then: this function waits for the supervisor's end
    """
    live = LiveLines(for_people=for_people)
    while True:
        status = client.status()
        by_name = {m["name"]: m for m in status["models"]}
        models = [by_name[name] for name in names if name in by_name]  # a reload may have taken one out meanwhile
        live.show({m["name"]: shown(m) for m in models})
        if all(map(done, models)) and not (up and status["supervisor"].get("shutting_down")):
            return models
        time.sleep(POLL_S)


def wait_for_turnovers(client: Client, numbers: Collection[int], *, for_people: bool = True) -> list[TurnoverReport]:
    """Show the workers of turnovers (reload, rolling restart) until the turnovers are done. Return their reports.

    Raises ConnectionLost if the supervisor ends meanwhile.
    """
    live = LiveLines(for_people=for_people)
    while True:
        status = client.status()
        turnovers = [turnover for turnover in status["supervisor"]["turnovers"] if turnover["number"] in numbers]
        concerned = {report["model"] for turnover in turnovers for report in turnover["models"] if "how" in report or
                     report["state"] == "running"}  # fmt: skip
        live.show({model["name"]: shown(model) for model in status["models"] if model["model"] in concerned})
        if not any(turnover["running"] for turnover in turnovers):
            return turnovers
        time.sleep(POLL_S)


def wait_for_gateway(client: Client) -> str | None:
    """Wait until the gateway serves or reports a problem. Return the problem; None if it serves, or if there is none.

    Raises ConnectionLost if the supervisor ends meanwhile.
    """
    while (gateway := client.status()["supervisor"]["gateway"]) is not None and not gateway["ready"]:
        if gateway["problem"]:
            problem: str = gateway["problem"]
            return problem
        time.sleep(POLL_S)
    return None


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


def why_not_ready(model: ModelStatus) -> str:
    """Return a line that says why a model that was to be started is not ready. It begins with the model's name."""
    name, state = model["name"], model["state"]
    if state == WorkerState.STOPPED:
        return f"{name}: somebody else's order stopped it before it was ready"
    if state == WorkerState.ASLEEP:
        return f"{name}: it sleeps ({model['unloaded']}); the next request wakes it"
    if state == WorkerState.UNLOADED:
        return f"{name}: it was unloaded before a request came ({model['unloaded']}); the next request starts it"
    again = "; it is tried again by itself" if is_away(model) else ""
    return f"{name}: {model.get('reason') or 'is ' + state}{again} (log: {model['log']})"
