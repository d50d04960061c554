"""Replace workers while requests go on: reload of models.yaml or of one model, and rolling restart.

One worker is replaced at a time. So a model with several replicas is never without one, and a GPU never holds more than
one worker too many. ``changes`` compares two configurations. ``Rollouts`` carries out the resulting steps one by one.
Each step has one of these kinds. Clients see the names on the left:

  beside    surge: start a successor, warm it up and give it the name; then the old worker finishes its requests and
            ends
  exchange  recreate: the old worker finishes its requests and ends while others wait in the queue; then start the
            successor
  add       start a worker where there was none
  retire    let a worker finish its requests and end it
  keep      the worker already has the wanted configuration and stays
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from supervisor.config import ModelSpec
from supervisor.event_history import EventKind, noted
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.replica import Replica
from supervisor.workers.lifecycle import AT_REST, WorkerState
from supervisor.workers.worker_life import Desired

KEPT = 16
"""Rollouts whose outcome can still be asked for."""
MOST_NAMED = 8
"""Unchanged models that the log names. A folder may have hundreds of models."""
TRIES = 3
"""Processes of a worker that may die before the worker is ready, until the rollout counts the worker as failed. The
supervisor goes on restarting the worker. But the next rollout may bring a models.yaml that repairs the worker. That
rollout must not wait for a worker that crashes for ever."""
_UP = (WorkerState.READY, WorkerState.DRAINING)


class How(StrEnum):
    """How a rollout replaces workers. AUTO: surge where the old and the new worker both fit, else recreate."""

    AUTO = "auto"
    SURGE = "beside"
    RECREATE = "exchange"


class Change(StrEnum):
    """The change that a new models.yaml makes to one model."""

    UNCHANGED = "unchanged"
    SETTINGS = "settings"
    """Only settings that the supervisor itself uses have changed. The workers stay."""
    WORKERS = "workers"
    ADDED = "added"
    REMOVED = "removed"


def changes(
    before: Mapping[str, Collection[ModelSpec]], after: Mapping[str, ModelSpec], forced: Collection[str] = ()
) -> dict[str, Change]:
    """Return the change of each model: first the models of ``after`` in their order, then those that are gone.

    before  model → the specification of each of its workers. After a reload that failed it may differ from
            models.yaml
    forced  models whose workers are replaced in any case
    """
    found = {}
    for name, spec in after.items():
        old = before.get(name)
        if not old:
            found[name] = Change.ADDED
        elif name in forced or len(old) != len(spec.workers) or any(o.process_key != spec.process_key for o in old):
            found[name] = Change.WORKERS
        elif any(o.config != spec.config for o in old):
            found[name] = Change.SETTINGS
        else:
            found[name] = Change.UNCHANGED
    return found | {name: Change.REMOVED for name in before if name not in after}


@dataclass
class RolloutStep:
    """One worker's part of a rollout.

    label   the worker's name for people
    spec    the specification of the worker's next process; None to remove the worker
    start   start a worker where there was none
    forced  replace the worker even if it already has this specification
    """

    model: str
    label: str
    spec: ModelSpec | None
    start: bool = True
    forced: bool = False
    old: Replica | None = None
    new: Replica | None = None
    kind: str = ""
    generation: int = 0
    handed_over: bool = False
    failure: str | None = None


class Plan(NamedTuple):
    """The changes and steps that an order results in."""

    found: Mapping[str, Change]
    steps: Sequence[RolloutStep]


@dataclass
class Rollout:
    """One order to replace workers.

    settings  keys of the section ``supervisor`` that the order has changed, and those of the section ``gateway``, as
              ``gateway.KEY``; they were applied when the order was given
    models    model → {change, state: "waiting", "running", "done" or "failed", how, message}, from the time the order
              begins
    """

    number: int
    cause: str
    how: How
    plan: Callable[[], Plan]
    settings: Sequence[str] = ()
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: deque[RolloutStep] | None = None
    running: bool = True

    def describe(self) -> dict[str, Any]:
        models = [{"model": model, **report} for model, report in self.models.items()]
        return {
            "number": self.number,
            "cause": self.cause,
            "running": self.running,
            "settings": list(self.settings),
            "models": models,
        }


class Rollouts:
    """The queue of orders. They are carried out one by one. Call ``advance`` whenever a worker's state has changed."""

    def __init__(self, fleet: Fleet, log: logging.Logger) -> None:
        self._fleet = fleet
        self._registry = fleet.registry
        self._log = log
        self._queue: deque[Rollout] = deque()
        self._recent: deque[Rollout] = deque()
        self._step: RolloutStep | None = None
        self._last = 0

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    def describe(self) -> list[dict[str, Any]]:
        """Return the last orders, the newest last."""
        return [rollout.describe() for rollout in self._recent]

    def order(self, cause: str, how: How, plan: Callable[[], Plan], settings: Sequence[str] = ()) -> int:
        """Queue an order: carry out ``plan`` when the earlier orders are done. Returns the order's number.

        settings  see ``Rollout``
        """
        self._last += 1
        rollout = Rollout(self._last, cause, how, plan, settings)
        self._queue.append(rollout)
        self._recent.append(rollout)
        while len(self._recent) > KEPT and not self._recent[0].running:
            self._recent.popleft()
        return rollout.number

    def abandon(self) -> None:
        """Mark every unfinished order as failed, because the supervisor is about to stop everything."""
        for rollout in self._queue:
            rollout.running = False
            for report in rollout.models.values():
                if report["state"] in ("waiting", "running"):
                    report.update(state="failed", message="the supervisor is shutting down")
        self._queue.clear()
        self._step = None

    def advance(self) -> None:
        """Carry out as many steps as is possible now."""
        while self._queue:
            rollout = self._queue[0]
            if rollout.steps is None:
                rollout.steps = self._planned(rollout)
            if self._step is None:
                if not rollout.steps:
                    self._queue.popleft()
                    rollout.running = False
                    continue
                self._step = rollout.steps.popleft()
                rollout.models[self._step.model]["state"] = "running"
                self._begin(self._step, rollout)
            if not self._is_over(self._step, rollout.cause):
                return
            step, self._step = self._step, None
            self._note(rollout, step)

    def _planned(self, rollout: Rollout) -> deque[RolloutStep]:
        found, steps = rollout.plan()
        busy = {step.model for step in steps}
        for model, change in found.items():
            rollout.models[model] = {"change": str(change), "state": "waiting" if model in busy else "done"}
        same = [model for model, change in found.items() if change is Change.UNCHANGED]
        short = len(same) > MOST_NAMED
        parts = [f"{m} {c}" for m, c in found.items() if not (short and c is Change.UNCHANGED)]
        what = ", ".join([*parts, *([f"{len(same)} models unchanged"] if short else [])])
        self._log.info("%s: %s", rollout.cause, what, extra=noted(EventKind.RELOAD))
        return deque(steps)

    def _note(self, rollout: Rollout, step: RolloutStep) -> None:
        report, others = rollout.models[step.model], rollout.steps or deque[RolloutStep]()
        report["how"] = step.kind
        if step.failure is not None:
            report.update(state="failed", message=step.failure)
            extra = noted(EventKind.RELOAD, step.label)
            self._log.error("%s: %s: %s", rollout.cause, step.label, step.failure, extra=extra)
            rollout.steps = deque(other for other in others if other.model != step.model)
        elif not any(other.model == step.model for other in others):
            report["state"] = "done"

    def _begin(self, step: RolloutStep, rollout: Rollout) -> None:
        fleet, registry, cause = self._fleet, self._registry, rollout.cause
        old = step.old = registry.shown(step.label)
        step.generation = old.generation if old else 0
        if step.spec is None:
            step.kind = "retire"
            if old is not None:
                fleet.stop(old.name, cause)
        elif old is None:
            step.kind = "add"
            step.new = registry.add(step.label, step.spec)
            step.generation = step.new.generation
            if step.start:
                fleet.start(step.new.name, cause)
            elif step.spec.config.lazy:
                fleet.rest(step.new.name, cause)
        elif not step.forced and old.desired_spec.process_key == step.spec.process_key:
            step.kind, step.start = "keep", False
            fleet.adopt_settings(old, step.spec)
        elif old.desired is not Desired.UP:  # the worker is down, or goes down because somebody ordered it
            step.kind, step.start = "add", False
            fleet.respec(old, step.spec)  # used when somebody starts it
        elif old.state in _UP and self._may_surge(old, step, rollout.how):
            step.kind = "beside"
            step.new = registry.add(step.label, step.spec, replaces=old)
            fleet.start(step.new.name, cause)
        else:
            step.kind = "exchange"
            fleet.respec(old, step.spec)
            fleet.restart(old.name, cause)

    def _may_surge(self, old: Replica, step: RolloutStep, how: How) -> bool:
        assert step.spec is not None
        return how is How.SURGE or (how is How.AUTO and self._fleet.starts.fits_surge(old, step.spec))

    def _is_over(self, step: RolloutStep, cause: str) -> bool:
        """Return whether the step is over."""
        match step.kind:
            case "retire":
                if step.old is not None and step.old.desired is not Desired.DOWN:  # another order came meanwhile
                    self._fleet.stop(step.old.name, cause)
                return self._is_gone(step.old)
            case "add" | "keep":
                worker = step.new or step.old
                assert worker is not None
                return not step.start or self._is_up(step, worker)
            case "exchange":
                assert step.old is not None
                return self._is_up(step, step.old)
        assert step.old is not None
        assert step.new is not None
        if step.failure is None and not step.handed_over:
            self._check_successor(step, step.old, step.new, cause)
        if step.failure is not None:
            return self._is_gone(step.new)
        return step.handed_over and self._is_gone(step.old)

    def _check_successor(self, step: RolloutStep, old: Replica, new: Replica, cause: str) -> None:
        if new.state is WorkerState.READY:
            step.handed_over = True
            self._registry.hand_over(old, new)
            self._fleet.stop(old.name, cause)
        elif new.state in (*AT_REST, WorkerState.BACKOFF):
            # The successor gets one try only, since the old worker is still there. An order to stop the model has
            # stopped both workers.
            why = new.last_exit.message if new.last_exit else "unknown"
            if new.desired is not Desired.UP:
                why = "it was stopped"
            step.failure = f"the new worker did not come up: {why}"
            if old.desired is Desired.UP:
                step.failure += "; the old one goes on"
            elif step.spec is not None:
                self._fleet.respec(old, step.spec)
            self._fleet.stop(new.name, "it did not come up", now=True)

    def _is_up(self, step: RolloutStep, worker: Replica) -> bool:
        if worker.state in AT_REST and (worker.state is WorkerState.FAILED or worker.desired is not Desired.UP):
            step.failure = worker.last_exit.message if worker.last_exit else "it was stopped"
            return True
        if worker.state is WorkerState.BACKOFF and worker.generation >= step.generation + TRIES:
            step.failure = f"{worker.last_exit.message if worker.last_exit else 'unknown'}; it is tried on"
            return True
        return worker.state is WorkerState.READY and worker.generation > step.generation

    def _is_gone(self, worker: Replica | None) -> bool:
        if worker is None:
            return True
        if worker.process is not None or worker.state not in AT_REST:
            return False
        self._registry.remove(worker)
        return True
