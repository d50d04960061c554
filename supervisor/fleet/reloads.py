"""Plan the steps of ``reload``, and of ``restart`` for several workers. ``rollout`` carries the steps out."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from protocol.errors import ErrorCode, WireError
from protocol.values import hints_of
from supervisor.config import Config, ModelSpec, load_config
from supervisor.config_gateway import GatewayConfig
from supervisor.config_schema import FIXED_CHANGED, FIXED_KEYS, FIXED_SECTIONS, SupervisorConfig
from supervisor.event_history import EventKind, noted
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.replica import Replica
from supervisor.fleet.rollout import Change, How, Plan, Rollouts, RolloutStep, changes
from supervisor.model_names import name_problems
from supervisor.requests.scheduler import Scheduler
from supervisor.timers import Timers
from supervisor.workers.worker_life import Desired
from supervisor.yaml_source import ConfigError

_OF_NO_SECTION: Final = ("default_model", "groups", "folders")


class Reloads:
    """The orders that concern several workers. Call ``advance_soon`` when a worker's state has changed.

    adopt  applies a new configuration to the parts that know no models; returns whether the gateway's part differs
    found  returns a configuration of models.yaml with the models of its folders
    """

    def __init__(
        self,
        fleet: Fleet,
        scheduler: Scheduler,
        timers: Timers,
        adopt: Callable[[Config], bool],
        found: Callable[[Config], Config],
        log: logging.Logger,
    ) -> None:
        self._fleet = fleet
        self._registry = fleet.registry
        self._scheduler = scheduler
        self._timers = timers
        self._adopt = adopt
        self._found = found
        self._log = log
        self._advancing = False
        self.rollouts = Rollouts(fleet, log)
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
        """Return what a reload would change now: the settings as ``Rollout`` has them, and the change of each model."""
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
        number = self.rollouts.order(cause, how, partial(self._plan, config, forced), settings)
        self.advance_soon()
        return number

    def restart_in_turns(self, replicas: Sequence[Replica], cause: str) -> int:
        """Order that several workers of a model are exchanged, one after the other. Return the order's number."""
        models, labels = {r.model for r in replicas}, [r.label for r in replicas]

        def plan() -> Plan:  # made later: an order before this one may change or remove these workers
            there = [replica for label in labels if (replica := self._registry.shown(label)) is not None]
            steps = [RolloutStep(r.model, r.label, r.desired_spec, forced=True) for r in there]
            return Plan(dict.fromkeys(models, Change.WORKERS), steps)

        number = self.rollouts.order(cause, How.RECREATE, plan)
        self.advance_soon()
        return number

    def advance_soon(self) -> None:
        """Let the rollouts go on in the next turn of the loop. In this turn a worker may be in a transition."""
        if self.rollouts.busy and not self._advancing:
            self._advancing = True
            self._timers.at(time.monotonic(), self._advance)

    def _advance(self) -> None:
        self._advancing = False
        self.rollouts.advance()

    def _plan(self, config: Config, forced: Sequence[str]) -> Plan:
        found = changes(self._specs(), config.models, forced)
        steps: list[RolloutStep] = []
        for model, change in found.items():
            steps += self._steps(model, change, config.models.get(model), forced=model in forced)
        return Plan(found, steps)

    def _specs(self) -> dict[str, list[ModelSpec]]:
        """Return the specification of each worker's next process, by model."""
        specs: dict[str, list[ModelSpec]] = {}
        for replica in self._registry.replicas.values():
            specs.setdefault(replica.model, []).append(replica.desired_spec)
        return specs

    def _steps(self, model: str, change: Change, spec: ModelSpec | None, *, forced: bool) -> list[RolloutStep]:
        workers = self._registry.of_model(model)
        there = [replica.label for replica in workers]
        if spec is None:
            return [RolloutStep(model, label, None) for label in there]
        if change is Change.ADDED:
            self._scheduler.add_model(model, spec.queue_limits)
            return [RolloutStep(model, label, spec, start=spec.autostart) for label in spec.workers]
        self._scheduler.set_limits(model, spec.queue_limits)
        if change is Change.WORKERS:
            missing = [label for label in spec.workers if label not in there]
            # If one worker "a" becomes several, it gets the label "a:1". Of several, one that is desired up stays.
            for replica in sorted(workers, key=lambda replica: replica.desired is not Desired.UP):
                if replica.label not in spec.workers and missing:
                    self._registry.relabel(replica, missing.pop(0))
            wanted = any(replica.desired is Desired.UP for replica in workers)
            stay = [RolloutStep(model, label, spec, start=wanted, forced=forced) for label in spec.workers]
            gone = [RolloutStep(model, replica.label, None) for replica in workers if replica.label not in spec.workers]
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
