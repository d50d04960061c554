"""Models on demand. A request starts or wakes them. They sleep or are unloaded when idle, or by ``admission`` to make
room for others."""

import math
import time

from protocol.errors import ErrorCode, WireError
from supervisor.config_rules import NO_SLEEP
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.replica import Replica
from supervisor.fleet.replica_registry import ReplicaRegistry
from supervisor.workers.launcher import local_pid
from supervisor.workers.lifecycle import AT_REST, ON_DEMAND, WorkerState


class OnDemandLoader:
    """The decisions when a request starts a worker, and when an idle worker is unloaded. The fleet carries them out.

    Every method runs on the supervisor's one thread.
    """

    def __init__(self, fleet: Fleet, registry: ReplicaRegistry) -> None:
        self._fleet = fleet
        self._registry = registry

    def begin(self) -> None:
        """Start the models that start with the supervisor. Let requests start those that are lazy."""
        for name, replica in self._registry.replicas.items():
            if replica.spec.autostart:
                self._fleet.start(name, "autostart")
            elif replica.spec.config.lazy:
                self._fleet.rest(name, "lazy")

    def wake(self, model: str) -> None:
        """Start the unloaded workers of a model, and wake those that sleep, because a request waits for it."""
        for replica in self._registry.of_model(model):
            if replica.state in ON_DEMAND:
                self._fleet.start(replica.name, "a request")

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
                self._fleet.unload(replica.name, f"idle for {ttl:g} s")
            elif not idle or not replica.can_sleep:
                continue
            elif replica.sleep_wanted is not None:
                self._fleet.sleepers.put_to_sleep(replica.name, replica.sleep_wanted)
            elif after is not None and idle_s >= after:
                self._fleet.sleepers.put_to_sleep(replica.name, f"idle for {after:g} s")

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
        elif replica.process is not None and local_pid(replica.process) is None:
            why = f"{NO_SLEEP}: `modelctl unload {replica.model}` frees it, and ttl does"
        elif replica.state is not WorkerState.READY:
            message = f"model {name!r} is {replica.state}: only a model that is ready can be put to sleep"
            raise WireError(ErrorCode.MODEL_NOT_RUNNING, message)
        elif not replica.can_sleep:
            why = replica.info.get("no_sleep") or "its engine does not offer it"
        if why is not None:
            raise WireError(ErrorCode.UNSUPPORTED, f"model {name!r} cannot sleep: {why}")
        if self._registry.is_idle(replica):
            self._fleet.sleepers.put_to_sleep(replica.name, cause)
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
            self._fleet.start(replica.name, cause)
