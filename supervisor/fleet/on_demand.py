"""Models on demand. A request starts them, and they are unloaded when idle, or by ``start`` to make room."""

import math
import time

from protocol.errors import ErrorCode, WireError
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.replica_registry import ReplicaRegistry
from supervisor.workers.lifecycle import WorkerState


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
        """Start the unloaded workers of a model, because a request waits for it."""
        for replica in self._registry.of_model(model):
            if replica.state is WorkerState.UNLOADED:
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
        """Unload the workers that have been idle for as long as their ttl, or as the last request has said."""
        now = time.monotonic()
        for replica in list(self._registry.replicas.values()):
            ttl = replica.ttl
            if ttl is not None and self._registry.is_idle(replica) and now - replica.last_active >= ttl:
                self._fleet.unload(replica.name, f"idle for {ttl:g} s")
