"""Life on demand: models that a request starts, that leave when idle, and that make room for others."""

import logging
import time
from collections.abc import Mapping

from supervisor.fleet.fleet import Fleet
from supervisor.fleet.replica import Replica
from supervisor.model_logs import about
from supervisor.placement.eviction import EvictionCandidate, NoRoom, choose
from supervisor.placement.policy import gib
from supervisor.requests.scheduler import Scheduler
from supervisor.workers.lifecycle import GOING_DOWN, WorkerState


class OnDemandLoader:
    """Decides for all models when a worker sleeps; the fleet does it. Runs on the supervisor's one thread."""

    def __init__(self, fleet: Fleet, scheduler: Scheduler, log: logging.Logger) -> None:
        self._fleet = fleet
        self._scheduler = scheduler
        self._log = log

    def begin(self) -> None:
        """The supervisor is up: models start, or sleep until they are asked for."""
        for name, replica in self._fleet.replicas.items():
            if replica.spec.autostart:
                self._fleet.start(name, "autostart")
            elif replica.spec.config.lazy:
                self._fleet.rest(name, "lazy")

    def wake(self, model: str) -> None:
        """A request waits, and workers of its model sleep."""
        for replica in self._fleet.of_model(model):
            if replica.state is WorkerState.UNLOADED:
                self._fleet.start(replica.name, "a request")

    def unload_idle(self) -> None:
        """Send those to sleep whose ttl is over."""
        now = time.monotonic()
        for replica in list(self._fleet.replicas.values()):
            ttl = replica.spec.config.ttl
            if ttl is not None and self._is_idle(replica) and now - replica.last_active >= ttl:
                self._fleet.unload(replica.name, f"idle for {ttl:g} s")

    def make_room(self, worker: str, missing: Mapping[int, int], *, one_suffices: bool) -> tuple[str, ...] | NoRoom:
        """Send workers to sleep whose memory another needs. Returns their names, or why there are none.

        Those that load now, or leave anyway, count as busy: they are waited for.

        worker   the one that is to be loaded
        missing  GPU → bytes
        """
        coming = self._fleet.replicas[worker]
        now, reading = time.monotonic(), self._fleet.vram.reading() or []
        candidates = [
            EvictionCandidate(
                replica.name,
                self._fleet.admission.held(replica.name, reading),
                busy=not self._is_idle(replica),
                priority=replica.spec.config.priority,
                load_s=float(replica.info.get("load_seconds", 0)),
                idle_s=now - replica.last_active,
            )
            for replica in self._fleet.replicas.values()
            if replica.state in GOING_DOWN or (replica.model != coming.model and replica.may_be_evicted)
        ]
        chosen = choose(missing, candidates, one_suffices=one_suffices)
        if isinstance(chosen, NoRoom):
            return chosen
        short = ", ".join(f"{gib(size)} GiB on GPU {gpu}" for gpu, size in missing.items())
        message = f"{coming.shown}: needs {short}: unloading {', '.join(chosen)}"
        self._log.info("%s", message, extra=about(coming.log_name))
        for name in chosen:
            self._fleet.unload(name, f"evicted for {coming.label}")
        return chosen

    def _is_idle(self, replica: Replica) -> bool:
        running, _ = self._scheduler.work(replica.name)
        _, waiting = self._scheduler.counts(replica.model)
        return replica.state is WorkerState.READY and not running and not waiting
