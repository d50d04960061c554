"""The starts and wakes that are under way, their order, and the parts that all of them use. ``start`` has one start,
``wake`` one wake."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from supervisor.config import ModelSpec
from supervisor.event_history import EventKind, noted
from supervisor.fleet.admission import Admission, Stage
from supervisor.fleet.group_places import GroupPlaces
from supervisor.fleet.replica import Replica
from supervisor.fleet.replica_registry import ReplicaRegistry
from supervisor.fleet.sleepers import Sleepers
from supervisor.fleet.start import Start
from supervisor.fleet.wake import Wake
from supervisor.placement.estimates import Estimator
from supervisor.placement.gpu_requests import declared, gpu_request_of
from supervisor.placement.gpu_shares import Needs
from supervisor.placement.policy import Holding, Placed, place, rooms
from supervisor.placement.vram import Vram
from supervisor.requests.effect_queue import EffectQueue
from supervisor.timers import Timers
from supervisor.workers.launcher import Launcher

if TYPE_CHECKING:
    from supervisor.fleet.fleet import Fleet


class Starts:
    """The starts that are under way. Runs on the supervisor's one thread. The loop calls ``answered`` when
    ``descriptor`` is readable.

    outer     the supervisor's own CUDA_VISIBLE_DEVICES; None if it has none
    cpus      CPUs that the supervisor itself may use
    """

    def __init__(
        self,
        fleet: "Fleet",
        registry: ReplicaRegistry,
        vram: Vram,
        launcher: Launcher,
        sleepers: Sleepers,
        effects: EffectQueue,
        timers: Timers,
        back_endpoint: str,
        outer: str | None,
        cpus: Collection[int],
        log: logging.Logger,
    ) -> None:
        self.fleet = fleet
        self.registry = registry
        self.vram = vram
        self.launcher = launcher
        self.sleepers = sleepers
        self.effects = effects
        self.timers = timers
        self.back_endpoint = back_endpoint
        self.outer = outer
        self.cpus = cpus
        self.log = log
        self.estimator = Estimator(timers)
        self._under_way: dict[str, Admission] = {}
        self._number = 0
        self._said_unseen = False
        self.places = GroupPlaces(registry, sleepers, self._under_way.values, log)

    @property
    def descriptor(self) -> int:
        return self.estimator.descriptor

    def answered(self) -> None:
        """Take in the estimates that have come."""
        self.estimator.ended()

    def begin(self, replica: Replica) -> None:
        """Begin the start of a worker's next process. If the start ends without a process, ``Fleet.not_started``
        is called, but never from within this call."""
        self._number += 1
        start = self._under_way[replica.name] = Start(self, replica, self._number)
        start.begin()

    def begin_wake(self, replica: Replica) -> None:
        """Begin to wake a worker that sleeps. If it stays asleep, ``Sleepers.not_woken`` is called, but never from
        within this call."""
        self._number += 1
        self._under_way[replica.name] = Wake(self, replica, self._number)
        self.at_next_turn(self.advance)  # the worker is in the middle of its transition to WAKING

    def cancel(self, replica: Replica) -> bool:
        """End a worker's start or wake. Return whether that is reported as the end of a process."""
        under_way = self._under_way.get(replica.name)
        return under_way is not None and under_way.cancel()

    def advance(self) -> None:
        """Let each start go on, unless it must wait for another start."""
        for start in sorted(self._under_way.values(), key=lambda start: start.order):
            if start.stage is Stage.TURN and not any(o.goes_before(start) for o in self._under_way.values()):
                start.take_turn()

    def memory_came_back(self, worker: str) -> None:
        """Note that a worker's process has ended, or that it sleeps. A start or a wake may have waited for that."""
        for start in self._under_way.values():
            if worker in start.leaving:
                start.leaving.discard(worker)
                if not start.leaving:
                    self.at_next_turn(start.decide_again)

    def awaited_before(self, number: int) -> set[Any]:
        """Return the GPUs on which starts wait for busy models that began before the one with this number."""
        earlier = (start for start in self._under_way.values() if start.number < number)
        return {gpu for start in earlier for gpu in start.awaited}

    def let_yield(self, start: Admission, workers: tuple[str, ...]) -> None:
        """Have these workers take no new requests, because a start waits for their places or their memory. Let those
        go on to which no start says so any more."""
        if not (workers or start.yielding):
            return
        start.yielding = workers
        to = {worker: each.replica.label for each in self._under_way.values() for worker in each.yielding}
        for replica in self.registry.replicas.values():
            self.fleet.let_yield(replica, to.get(replica.name, ""))

    def fits_surge(self, old: Replica, after: ModelSpec) -> bool:
        """Return whether a successor would find room beside the old worker, as far as that is known without reading the
        model's directory. Its needs are declared, or they are those of the old worker if nothing of them has changed.
        """
        gpu_request, elsewhere = gpu_request_of(after), after.elsewhere
        if elsewhere is not None and elsewhere.gpus and self.launcher.no_room(elsewhere) is None:
            return True
        if gpu_request is None:
            return not after.config.gpu_count
        needs: Mapping[int, Needs] | None = declared(after, gpu_request)
        if needs is None and old.memory.engine == after.engine_spec and gpu_request_of(old.spec) == gpu_request:
            needs = old.memory.needs
        reading = self.vram.reading()
        if needs is None or reading is None:
            return False
        there = rooms(reading, self.holdings(), self.registry.config.supervisor.vram_limit)
        return isinstance(place(gpu_request, needs, there, self.outer), Placed)

    def holdings(self) -> list[Holding]:
        """Return what each process was admitted with."""
        memories = (replica.memory for replica in self.registry.replicas.values())
        return [memory.holding for memory in memories if memory.holding is not None]

    def at_next_turn(self, call: Callable[[], None]) -> None:
        self.timers.at(time.monotonic(), call)

    def remove(self, start: Admission) -> None:
        """Forget a start that is over."""
        if self._under_way.get(start.replica.name) is start:
            del self._under_way[start.replica.name]

    def say_unseen(self) -> None:
        """Say in the log, once, that models are placed without a reading."""
        if not self._said_unseen:
            self._said_unseen = True
            self.log.warning(
                "models go where they are pinned, without a look at the GPUs: NVML tells nothing",
                extra=noted(EventKind.PLACEMENT),
            )
