"""Replace workers while requests go on: reload of models.yaml or of one model, and rolling restart.

One worker is replaced at a time. So a model with several replicas is never without one, and a GPU never holds more than
one worker too many. ``changes`` compares two configurations. ``Turnovers`` carries out the resulting steps one by one.
Each step has one of these kinds. Clients see the names on the left:

  beside    start a successor, warm it up and give it the name; then the old worker finishes its requests and ends
  exchange  the old worker finishes its requests and ends while others wait in the queue; then start the successor
  add       start a worker where there was none
  retire    let a worker finish its requests and end it
  keep      the worker already has the wanted configuration and stays
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Final, NamedTuple

from protocol.errors import ErrorCode, WireError
from protocol.values import hints_of
from supervisor.config.file import Config, ModelSpec, load_config
from supervisor.config.rules import NO_SLEEP, name_problems
from supervisor.config.server import FIXED_CHANGED, FIXED_KEYS, FIXED_SECTIONS, GatewayConfig, SupervisorConfig
from supervisor.config.yaml_source import ConfigError
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.replicas import Replica
from supervisor.logs.events import EventKind, noted
from supervisor.reactor import Timers
from supervisor.requests.scheduler import Scheduler
from supervisor.workers.life import AT_REST, ON_DEMAND, Desired, WorkerState

KEPT = 16
"""Turnovers whose outcome can still be asked for."""
MOST_NAMED = 8
"""Unchanged models that the log names. A folder may have hundreds of models."""
TRIES = 3
"""Processes of a worker that may die before the worker is ready, until the turnover counts the worker as failed. The
supervisor goes on restarting the worker. But the next turnover may bring a models.yaml that repairs the worker. That
turnover must not wait for a worker that crashes for ever."""
_UP = (WorkerState.READY, WorkerState.DRAINING)


class How(StrEnum):
    """How a turnover replaces workers. AUTO: BESIDE where the old and the new worker both fit, else EXCHANGE."""

    AUTO = "auto"
    BESIDE = "beside"
    EXCHANGE = "exchange"


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
class TurnoverStep:
    """One worker's part of a turnover.

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
    steps: Sequence[TurnoverStep]


@dataclass
class Turnover:
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
    steps: deque[TurnoverStep] | None = None
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


class Turnovers:
    """The queue of orders. They are carried out one by one. Call ``advance`` whenever a worker's state has changed."""

    def __init__(self, fleet: Fleet, log: logging.Logger) -> None:
        self._fleet = fleet
        self._registry = fleet.registry
        self._log = log
        self._queue: deque[Turnover] = deque()
        self._recent: deque[Turnover] = deque()
        self._step: TurnoverStep | None = None
        self._last = 0

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    def describe(self) -> list[dict[str, Any]]:
        """Return the last orders, the newest last."""
        return [turnover.describe() for turnover in self._recent]

    def order(self, cause: str, how: How, plan: Callable[[], Plan], settings: Sequence[str] = ()) -> int:
        """Queue an order: carry out ``plan`` when the earlier orders are done. Returns the order's number.

        settings  see ``Turnover``
        """
        self._last += 1
        turnover = Turnover(self._last, cause, how, plan, settings)
        self._queue.append(turnover)
        self._recent.append(turnover)
        while len(self._recent) > KEPT and not self._recent[0].running:
            self._recent.popleft()
        return turnover.number

    def abandon(self) -> None:
        """Mark every unfinished order as failed, because the supervisor is about to stop everything."""
        for turnover in self._queue:
            turnover.running = False
            for report in turnover.models.values():
                if report["state"] in ("waiting", "running"):
                    report.update(state="failed", message="the supervisor is shutting down")
        self._queue.clear()
        self._step = None

    def advance(self) -> None:
        """Carry out as many steps as is possible now."""
        while self._queue:
            turnover = self._queue[0]
            if turnover.steps is None:
                turnover.steps = self._planned(turnover)
            if self._step is None:
                if not turnover.steps:
                    self._queue.popleft()
                    turnover.running = False
                    continue
                self._step = turnover.steps.popleft()
                turnover.models[self._step.model]["state"] = "running"
                self._begin(self._step, turnover)
            if not self._is_over(self._step, turnover.cause):
                return
            step, self._step = self._step, None
            self._note(turnover, step)

    def _planned(self, turnover: Turnover) -> deque[TurnoverStep]:
        found, steps = turnover.plan()
        busy = {step.model for step in steps}
        for model, change in found.items():
            turnover.models[model] = {"change": str(change), "state": "waiting" if model in busy else "done"}
        same = [model for model, change in found.items() if change is Change.UNCHANGED]
        short = len(same) > MOST_NAMED
        parts = [f"{m} {c}" for m, c in found.items() if not (short and c is Change.UNCHANGED)]
        what = ", ".join([*parts, *([f"{len(same)} models unchanged"] if short else [])])
        self._log.info("%s: %s", turnover.cause, what, extra=noted(EventKind.RELOAD))
        return deque(steps)

    def _note(self, turnover: Turnover, step: TurnoverStep) -> None:
        report, others = turnover.models[step.model], turnover.steps or deque[TurnoverStep]()
        report["how"] = step.kind
        if step.failure is not None:
            report.update(state="failed", message=step.failure)
            extra = noted(EventKind.RELOAD, step.label)
            self._log.error("%s: %s: %s", turnover.cause, step.label, step.failure, extra=extra)
            turnover.steps = deque(other for other in others if other.model != step.model)
        elif not any(other.model == step.model for other in others):
            report["state"] = "done"

    def _begin(self, step: TurnoverStep, turnover: Turnover) -> None:
        fleet, registry, cause = self._fleet, self._registry, turnover.cause
        old = step.old = registry.shown(step.label)
        step.generation = old.generation if old else 0
        if step.spec is None:
            step.kind = "retire"
            if old is not None:
                fleet.stop(old, cause)
        elif old is None:
            step.kind = "add"
            step.new = registry.add(step.label, step.spec)
            step.generation = step.new.generation
            if step.start:
                fleet.start(step.new, cause)
            elif step.spec.config.lazy:
                fleet.rest(step.new, cause)
        elif not step.forced and old.desired_spec.process_key == step.spec.process_key:
            step.kind, step.start = "keep", False
            fleet.adopt_settings(old, step.spec)
        elif old.desired is not Desired.UP:  # the worker is down, or goes down because somebody ordered it
            step.kind, step.start = "add", False
            fleet.respec(old, step.spec)  # used when somebody starts it
        elif old.state in _UP and (
            turnover.how is How.BESIDE or (turnover.how is How.AUTO and fleet.starts.fits_beside(old, step.spec))
        ):
            step.kind = "beside"
            step.new = registry.add(step.label, step.spec, replaces=old)
            fleet.start(step.new, cause)
        else:
            step.kind = "exchange"
            fleet.respec(old, step.spec)
            fleet.restart(old, cause)

    def _is_over(self, step: TurnoverStep, cause: str) -> bool:
        """Return whether the step is over."""
        match step.kind:
            case "retire":
                if step.old is not None and step.old.desired is not Desired.DOWN:  # another order came meanwhile
                    self._fleet.stop(step.old, cause)
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

    def _check_successor(self, step: TurnoverStep, old: Replica, new: Replica, cause: str) -> None:
        if new.state is WorkerState.READY:
            step.handed_over = True
            self._registry.hand_over(old, new)
            self._fleet.stop(old, cause)
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
            self._fleet.stop(new, "it did not come up", now=True)

    def _is_up(self, step: TurnoverStep, worker: Replica) -> bool:
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


# Plan the steps of ``reload``, and of ``restart`` for several workers. The classes further below carry the steps out.


_OF_NO_SECTION: Final = ("default_model", "groups", "folders")


@dataclass(eq=False, repr=False)
class Reloads:
    """The orders that concern several workers. Call ``advance_soon`` when a worker's state has changed.

    adopt  applies a new configuration to the parts that know no models; returns whether the gateway's part differs
    found  returns a configuration of models.yaml with the models of its folders
    """

    _fleet: Fleet
    _scheduler: Scheduler
    _timers: Timers
    _adopt: Callable[[Config], bool]
    _found: Callable[[Config], Config]
    _log: logging.Logger

    def __post_init__(self) -> None:
        self._registry = self._fleet.registry
        self._advancing = False
        self.turnovers = Turnovers(self._fleet, self._log)
        self.refused: str | None = None
        """Why the last order to read models.yaml has changed nothing, for people. None if it was carried out."""

    def read_again(self, cause: str, how: How, only: str | None = None) -> int:
        """Reload models.yaml as it is now. Return the order's number.

        Raises WireError, and changes nothing, if the file cannot be used.
        """
        before = self._registry.config
        try:
            config = self._found(load_config(before.file))
        except ConfigError as e:
            raise self._refusal(cause, "; ".join(map(str, e.problems))) from None
        for note in config.notes:
            if note not in before.notes:
                self._log.info("%s", note)
        if self.fixed_of(config):
            raise self._refusal(cause, FIXED_CHANGED)
        self.refused = None
        if only is not None and only not in config.models and not self._registry.of_model(only):
            raise config.names.unknown(only, lambda _: True)
        return self.reload(config, cause, how, only)

    def fixed_of(self, config: Config) -> list[tuple[str, ...]]:
        """Return the keys and sections that differ in a file, and that a reload cannot apply."""
        before = self._registry.config
        keys = [("supervisor", key) for key in differing(before.supervisor, config.supervisor, FIXED_KEYS)]
        return [*keys, *((name,) for name in differing(before, config, FIXED_SECTIONS))]

    def preview(self, config: Config) -> tuple[list[str], dict[str, Change]]:
        """Return what a reload would change now: the settings as in ``Turnover``, and the change of each model."""
        return settings_changed(self._registry.config, config), changes(self._specs(), self._found(config).models)

    def _refusal(self, cause: str, message: str) -> WireError:
        """Note that models.yaml cannot be used: for ``ps``, for the events, and as the error that is returned."""
        self.refused = f"{self._registry.config.file} was changed and is not used: {message}"
        self._log.error("%s: nothing is changed: %s", cause, message, extra=noted(EventKind.RELOAD))
        return WireError(ErrorCode.INVALID_REQUEST, f"nothing is changed: {message}")

    def reload(self, config: Config, cause: str, how: How, only: str | None = None) -> int:
        """Order the change to a new configuration, for all models or for one. Return the order's number.

        The steps for each worker are decided when the earlier orders are done.

        only  the one model; its workers are exchanged even if nothing has changed. None for all models

        Raises WireError, and changes nothing, if the one model has a name that another model still has.
        """
        before = self._registry.config
        if only is not None:
            models = before.models | {name: spec for name, spec in config.models.items() if name == only}
            if only not in config.models:
                models.pop(only, None)  # an earlier order may be removing it already
            config = before.with_models(models)
            _check_names(config)
        settings = settings_changed(before, config)
        if self._adopt(config) and not any(key.startswith("gateway.") for key in settings):
            settings.append("gateway.certificate")  # the files were renewed under their former names
        if settings:
            applied = ", ".join(key if "." in key or key in _OF_NO_SECTION else f"supervisor.{key}" for key in settings)
            self._log.info("%s: applied %s", cause, applied, extra=noted(EventKind.RELOAD))
        self._registry.adopt(config)
        self._scheduler.set_policies(config.supervisor.hold_limits, config.supervisor.poison_policy)
        forced = () if only is None else (only,)
        number = self.turnovers.order(cause, how, partial(self._plan, config, forced), settings)
        self.advance_soon()
        return number

    def restart_in_turns(self, replicas: Sequence[Replica], cause: str) -> int:
        """Order that several workers of a model are exchanged, one after the other. Return the order's number."""
        models, labels = {r.model for r in replicas}, [r.label for r in replicas]

        def plan() -> Plan:  # made later: an order before this one may change or remove these workers
            there = [replica for label in labels if (replica := self._registry.shown(label)) is not None]
            steps = [TurnoverStep(r.model, r.label, r.desired_spec, forced=True) for r in there]
            return Plan(dict.fromkeys(models, Change.WORKERS), steps)

        number = self.turnovers.order(cause, How.EXCHANGE, plan)
        self.advance_soon()
        return number

    def advance_soon(self) -> None:
        """Let the turnovers go on in the next turn of the loop. In this turn a worker may be in a transition."""
        if self.turnovers.busy and not self._advancing:
            self._advancing = True
            self._timers.at(time.monotonic(), self._advance)

    def _advance(self) -> None:
        self._advancing = False
        self.turnovers.advance()

    def _plan(self, config: Config, forced: Sequence[str]) -> Plan:
        found = changes(self._specs(), config.models, forced)
        steps: list[TurnoverStep] = []
        for model, change in found.items():
            steps += self._steps(model, change, config.models.get(model), forced=model in forced)
        return Plan(found, steps)

    def _specs(self) -> dict[str, list[ModelSpec]]:
        """Return the specification of each worker's next process, by model."""
        specs: dict[str, list[ModelSpec]] = {}
        for replica in self._registry.replicas.values():
            specs.setdefault(replica.model, []).append(replica.desired_spec)
        return specs

    def _steps(self, model: str, change: Change, spec: ModelSpec | None, *, forced: bool) -> list[TurnoverStep]:
        workers = self._registry.of_model(model)
        there = [replica.label for replica in workers]
        if spec is None:
            return [TurnoverStep(model, label, None) for label in there]
        if change is Change.ADDED:
            self._scheduler.add_model(model, spec.queue_limits)
            return [TurnoverStep(model, label, spec, start=spec.autostart) for label in spec.workers]
        self._scheduler.set_limits(model, spec.queue_limits)
        if change is Change.WORKERS:
            missing = [label for label in spec.workers if label not in there]
            # If one worker "a" becomes several, it gets the label "a:1". Of several, one that is desired up stays.
            for replica in sorted(workers, key=lambda replica: replica.desired is not Desired.UP):
                if replica.label not in spec.workers and missing:
                    self._registry.relabel(replica, missing.pop(0))
            wanted = any(replica.desired is Desired.UP for replica in workers)
            stay = [TurnoverStep(model, label, spec, start=wanted, forced=forced) for label in spec.workers]
            gone = [TurnoverStep(model, each.label, None) for each in workers if each.label not in spec.workers]
            return stay + gone
        for replica in workers:
            self._fleet.adopt_settings(replica, spec)
        return []


def _check_names(config: Config) -> None:
    """Raise WireError if two models of a configuration have one name. The parts of it come from two files."""
    models = {name: spec.config for name, spec in config.models.items()}
    for path, problem in name_problems(models, None):
        key = ".".join(map(str, path))
        message = f"nothing is changed: {key} {problem}; reload all models, or remove the name"
        raise WireError(ErrorCode.INVALID_REQUEST, message)


def settings_changed(before: Config, after: Config) -> list[str]:
    """Return the keys that differ, apart from those of models: of the section ``supervisor`` without its name, then
    ``gateway.KEY``, ``default_model``, ``groups`` and ``folders``."""
    found = differing(before.supervisor, after.supervisor, hints_of(SupervisorConfig))
    found += [f"gateway.{key}" for key in differing(before.gateway, after.gateway, hints_of(GatewayConfig))]
    found += ["default_model"] if before.names.default != after.names.default else []
    found += ["groups"] if before.groups != after.groups else []
    return found + (["folders"] if before.folders != after.folders else [])


def differing(before: object, after: object, keys: Iterable[str]) -> list[str]:
    """Return the keys of a section that have other values now. A missing section (None) differs in every key."""
    return [key for key in keys if getattr(before, key, None) != getattr(after, key, None)]


# Models on demand. A request starts or wakes them. They sleep or are unloaded when idle, or by ``admission`` to make
# room for others.


class OnDemandLoader:
    """The decisions when a request starts a worker, and when an idle worker is unloaded. The fleet carries them out.

    Every method runs on the supervisor's one thread.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._registry = fleet.registry

    def begin(self) -> None:
        """Start the models that start with the supervisor. Let requests start those that are lazy."""
        for replica in self._registry.replicas.values():
            if replica.spec.autostart:
                self._fleet.start(replica, "autostart")
            elif replica.spec.config.lazy:
                self._fleet.rest(replica, "lazy")

    def wake(self, model: str) -> None:
        """Start the unloaded workers of a model, and wake those that sleep, because a request waits for it."""
        for replica in self._registry.of_model(model):
            if replica.state in ON_DEMAND:
                self._fleet.start(replica, "a request")

    def check_stay(self, model: str, seconds: float, field: str) -> None:
        """Raise WireError (UNSUPPORTED) if a request cannot say how long this model stays loaded.

        seconds  the time without a request; infinity for ever, which every model that is never unloaded does anyway
        field    the key of the route that says so
        """
        spec = self._registry.config.models.get(model)
        if spec is None or seconds == math.inf or (spec.config.lazy and not spec.config.pinned):
            return
        message = (
            f"model {model!r} is never unloaded for want of requests, because models.yaml does not make it lazy, or "
            f"pins it: leave {field} out"
        )
        raise WireError(ErrorCode.UNSUPPORTED, message, field=f"route.{field}")

    def stay(self, model: str, seconds: float) -> None:
        """Unload the workers of a model after this time without a request, in place of its ttl."""
        for replica in self._registry.of_model(model):
            replica.stay_s = seconds

    def unload_idle(self) -> None:
        """Unload the workers that have been idle for as long as their ttl, or as the last request has said. Unload
        models of groups that a reload has made too full."""
        self._fleet.starts.places.trim()
        now = time.monotonic()
        for replica in list(self._registry.replicas.values()):
            idle = self._registry.is_idle(replica)
            ttl, after, idle_s = replica.ttl, replica.spec.config.sleep_after, now - replica.last_active
            if ttl is not None and (idle or replica.state is WorkerState.ASLEEP) and idle_s >= ttl:
                self._fleet.unload(replica, f"idle for {ttl:g} s")
            elif not idle or not replica.can_sleep:
                continue
            elif replica.sleep_wanted is not None:
                self._fleet.sleepers.put_to_sleep(replica, replica.sleep_wanted)
            elif after is not None and idle_s >= after:
                self._fleet.sleepers.put_to_sleep(replica, f"idle for {after:g} s")

    def sleep(self, replica: Replica, cause: str) -> None:
        """Put a worker to sleep as soon as it has no request. Raises WireError if it cannot sleep."""
        name, config = replica.shown, replica.spec.config
        if replica.state in (WorkerState.ASLEEP, WorkerState.FALLING_ASLEEP):
            return
        why = None
        if not config.lazy:
            why = "models.yaml does not make it lazy, so that no request would wake it: add lazy: true"
        elif config.pinned:
            why = "models.yaml pins it: remove pinned"
        elif config.sleep != "ram":
            why = "models.yaml says sleep: off"
        elif replica.process is not None and replica.process.local_pid is None:
            why = f"{NO_SLEEP}: `modelctl unload {replica.model}` frees it, and ttl does"
        elif replica.state is not WorkerState.READY:
            message = f"model {name!r} is {replica.state}: only a model that is ready can be put to sleep"
            raise WireError(ErrorCode.MODEL_NOT_RUNNING, message)
        elif not replica.can_sleep:
            why = replica.info.get("no_sleep") or "its engine does not offer it"
        if why is not None:
            raise WireError(ErrorCode.UNSUPPORTED, f"model {name!r} cannot sleep: {why}")
        if self._registry.is_idle(replica):
            self._fleet.sleepers.put_to_sleep(replica, cause)
        else:
            replica.sleep_wanted = cause

    def wake_up(self, replica: Replica, cause: str) -> None:
        """Wake a worker. Raises WireError if it has no process."""
        if replica.state in AT_REST:
            name = replica.shown
            message = f"model {name!r} is {replica.state}, not asleep: start it with `modelctl start {name}`"
            raise WireError(ErrorCode.MODEL_NOT_RUNNING, message)
        replica.sleep_wanted = None
        if replica.state in (WorkerState.ASLEEP, WorkerState.FALLING_ASLEEP):
            self._fleet.start(replica, cause)
