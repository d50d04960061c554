"""Put workers to sleep in host memory, and take note when they sleep and when they are awake again."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from supervisor.fleet.replicas import Replica, ReplicaRegistry
from supervisor.logs.events import EventKind, noted
from supervisor.placement import vram as host_memory
from supervisor.placement.eviction import (
    EvictionCandidate,
    Groups,
    NoRoom,
    choose_leavers,
    describe,
    missing_places,
    places_of,
    share_group,
    surplus,
)
from supervisor.placement.policy import gib
from supervisor.placement.vram import HostCopy, Vram
from supervisor.workers.life import GOING_DOWN, Event, Transition, WorkerState

ASSUMED_RATE = 10e9
"""Bytes per second at which a model is assumed to wake, until this machine has been measured."""


@dataclass(eq=False, repr=False)
class Sleepers:
    """The workers that sleep or may sleep. Runs on the supervisor's one thread.

    unload     ends an idle worker's process: (worker, cause)
    carry_out  does what follows from a transition in a worker's life
    """

    _unload: Callable[[Replica, str], None]
    _carry_out: Callable[[Replica, Transition], None]
    _registry: ReplicaRegistry
    _vram: Vram
    _log: logging.Logger

    def __post_init__(self) -> None:
        self._default_bound = int(host_memory.free_bytes() * host_memory.SHARE)
        self._rate = ASSUMED_RATE

    @property
    def bound(self) -> int:
        """The most bytes of host memory for models that sleep."""
        configured = self._registry.config.supervisor.host_memory
        return self._default_bound if configured is None else configured

    @property
    def room(self) -> int:
        """The bytes of host memory for workers that fall asleep now."""
        return host_memory.room(self._copies(), self.bound)

    def _copies(self, *, without: str = "") -> list[HostCopy]:
        return [
            HostCopy(
                replica.name,
                replica.sleep_bytes if replica.state is WorkerState.FALLING_ASLEEP else replica.host_bytes,
                replica.life.since if replica.state is WorkerState.ASLEEP else None,
            )
            for replica in self._registry.replicas.values()
            if replica.process is not None and replica.name != without
        ]

    def seconds(self, replica: Replica) -> float:
        """Return the seconds that waking a worker takes, as far as this machine has been measured."""
        return replica.wake_s if replica.wake_s is not None else replica.sleep_bytes / self._rate

    # --- going to sleep -----------------------------------------------------------------------------------------

    def takes_ahead(self, replica: Replica, size: int) -> bool:
        """Return whether a worker that starts may take host memory for its first sleep before it is told to sleep.

        It may if nothing has to leave for it. The memory counts as taken from now on.
        """
        if not size or host_memory.to_unload(size, self._copies(without=replica.name), self.bound) != ():
            return False
        replica.host_bytes = size
        return True

    def loaded(self, replica: Replica) -> None:
        """Correct what a worker takes ahead: it has said how much host memory it needs to sleep."""
        replica.host_bytes = replica.sleep_bytes if replica.host_bytes else 0

    def put_to_sleep(self, replica: Replica, cause: str) -> None:
        """Order a worker to sleep that is ready, idle and able to sleep. It is unloaded if host memory has no room."""
        replica.stay_s = replica.sleep_wanted = None
        leave = host_memory.to_unload(replica.sleep_bytes, self._copies(without=replica.name), self.bound)
        if leave is None:
            size, bound = gib(replica.sleep_bytes), gib(self.bound)
            why = f"it would take {size} GiB of host memory to sleep, and models may take {bound} (host_memory)"
            self._say(replica, f"is unloaded: {why}")
            self._unload(replica, f"{cause}; {why}")
            return
        for other in leave:
            self._unload(self._registry.replicas[other], f"made room in host memory for {replica.label}")
        self._carry_out(replica, replica.life.sleep(time.monotonic(), cause))

    def evict(self, worker: str, cause: str, *, sleeps: bool) -> None:
        """Put an idle worker to sleep, or unload it, because another one needs its memory or its place."""
        (self.put_to_sleep if sleeps else self._unload)(self._registry.replicas[worker], cause)

    def slept(self, replica: Replica, facts: dict[str, Any]) -> None:
        """Take note that a worker sleeps, or end it because it cannot sleep."""
        life, now = replica.life, time.monotonic()
        if refused := facts["refused"]:
            self._say(replica, f"cannot sleep, and is unloaded: {refused}")
            life.unload_cause = f"{life.unload_cause}; it cannot sleep: {refused}" if life.unload_cause else refused
            self._carry_out(replica, life.apply(Event.CANNOT_SLEEP, now, refused))
            return
        replica.host_bytes = facts["host_bytes"]
        if replica.process is not None:
            self._vram.reading()  # `describe` shows the last reading
            held = self._vram.describe(replica.name, replica.process.pid)["vram_by_gpu"] or {}
            replica.memory.fell_asleep(held)
        cause = f"{gib(facts['host_bytes'])} GiB of host memory, in {facts['seconds']:.2f} s"
        self._carry_out(replica, life.apply(Event.SLEPT, now, cause))
        if (woken := life.settle(now)) is not None:
            self._carry_out(replica, woken)
        elif replica.state is WorkerState.ASLEEP and replica.desired_spec is not replica.spec:
            self._unload(replica, "its configuration has changed")

    # --- waking -------------------------------------------------------------------------------------------------

    def woke(self, replica: Replica, facts: dict[str, Any]) -> None:
        """Take note that a worker is awake."""
        replica.wake_s, replica.host_bytes = facts["seconds"], facts["host_bytes"]
        replica.woken += 1
        if replica.wake_s > 0 and replica.sleep_bytes:
            self._rate = replica.sleep_bytes / replica.wake_s
        replica.memory.woke()
        cause = f"awake in {facts['seconds']:.2f} s"
        self._carry_out(replica, replica.life.apply(Event.WOKE, time.monotonic(), cause))

    def not_woken(self, replica: Replica, why: str) -> None:
        """Let a worker sleep on that finds no room. The requests that wait for it end with the reason."""
        self._log.warning(
            "%s: stays asleep: %s", replica.shown, why, extra=noted(EventKind.REFUSAL, replica.log_name)
        )  # fmt: skip
        self._carry_out(replica, replica.life.no_room(time.monotonic(), f"no room to wake: {why}"))

    def _say(self, replica: Replica, text: str) -> None:
        self._log.warning("%s: %s", replica.shown, text, extra=noted(EventKind.EVICTION, replica.log_name))


# The places of models in groups: who has one, and which models leave for another one. ``placement.eviction`` decides.


_LEAVING = (*GOING_DOWN, WorkerState.FALLING_ASLEEP)


@dataclass(eq=False, repr=False)
class GroupPlaces:
    """The groups of models.yaml as it was read last. Runs on the supervisor's one thread.

    under_way  returns worker → whether it has its places, for each start and wake that is under way
    """

    _registry: ReplicaRegistry
    _sleepers: Sleepers
    _under_way: Callable[[], Mapping[str, bool]]
    _log: logging.Logger

    @property
    def _groups(self) -> Groups:
        return self._registry.config.groups

    def missing(self, model: str) -> dict[str, int]:
        """Return group → models that must leave before the model may be loaded or woken."""
        if not self._groups:
            return {}
        return missing_places(model, self._groups, {holder.worker for holder in self.holders()})

    def share(self, one: str, other: str) -> bool:
        """Return whether two different models are in one group, so that one may have to wait for the other."""
        return one != other and share_group(one, other, self._groups)

    def make_room(self, replica: Replica, missing: Mapping[str, int]) -> tuple[str, ...] | NoRoom:
        """Put idle models of full groups to sleep, or unload them. Return the workers that leave, or why none does.

        replica  the worker that is to be started or woken
        missing  group → models that must leave
        """
        chosen = choose_leavers(missing, self.holders())
        if isinstance(chosen, NoRoom):
            return chosen
        limits = describe(missing, self._groups)
        message = f"{replica.shown}: {limits}: {', '.join(chosen)} makes room"
        self._log.info("%s", message, extra=noted(EventKind.EVICTION, replica.log_name))
        return tuple(worker for m in chosen for worker in self._let_go(m, f"evicted for {replica.label} ({limits})"))

    def workers_of(self, models: Collection[str]) -> tuple[str, ...]:
        """Return the workers because of which these models have places."""
        return tuple(replica.name for replica in self._with_places() if replica.model in models)

    def refusal(self, missing: Mapping[str, int]) -> str:
        """Return why a model finds no place, with the models that are loaded, and what to do."""
        loaded = [holder.worker for holder in self.holders()]
        parts = [
            f"group {name} has {', '.join(model for model in loaded if model in self._groups[name].models)} loaded, "
            f"and {self._groups[name].loaded} may be at once"
            for name in missing
        ]
        first = next(model for model in loaded if any(model in self._groups[name].models for name in missing))
        return f"{'; '.join(parts)}: `modelctl stop {first}` makes room, or raise groups.{next(iter(missing))}.loaded"

    def is_loading(self, missing: Mapping[str, int]) -> bool:
        """Return whether a model of these groups is being loaded or woken, so that it cannot be idle yet."""
        members = {model for name in missing for model in self._groups[name].models}
        return any(
            replica.model in members
            and replica.state in (WorkerState.STARTING, WorkerState.LOADING, WorkerState.WAKING)
            for replica in self._with_places()
        )

    def trim(self) -> None:
        """Let idle models go from groups with more models than allowed, since a reload has changed the groups."""
        if not self._groups:
            return
        for name in surplus(self._groups, self.holders()):
            chosen = choose_leavers({name: 1}, self.holders())
            for model in () if isinstance(chosen, NoRoom) else chosen:
                self._let_go(model, f"evicted: {describe([name], self._groups)}")

    def _with_places(self) -> list[Replica]:
        """Return the workers whose models have places because of them."""
        starts = self._under_way()
        return [
            replica
            for name, replica in self._registry.replicas.items()
            if starts.get(name, replica.process is not None and replica.state is not WorkerState.ASLEEP)
        ]

    def holders(self) -> list[EvictionCandidate]:
        """Return the models that have places, see ``places_of``."""
        workers: dict[str, list[Replica]] = {}
        for replica in self._with_places():
            workers.setdefault(replica.model, []).append(replica)
        now = time.monotonic()
        return [self._holder(model, replicas, now) for model, replicas in workers.items()]

    def _holder(self, model: str, workers: list[Replica], now: float) -> EvictionCandidate:
        up = [replica for replica in workers if replica.state not in _LEAVING]
        leaves = not up or all(replica.may_be_evicted for replica in workers)
        return EvictionCandidate(
            model,
            places_of(model, self._groups) if leaves else {},
            busy=not up or not all(self._registry.may_leave(replica) for replica in up),
            priority=workers[0].spec.config.priority,
            idle_s=now - max(replica.last_active for replica in workers),
            leaves=not up,
            stays_s=max((replica.stays_s(now) for replica in up), default=0.0),
            yields=any(replica.yields_to for replica in up),
        )

    def _let_go(self, model: str, cause: str) -> list[str]:
        """Put the workers of an idle model to sleep, or unload them. Return all of its workers that hold its places."""
        workers = [replica for replica in self._with_places() if replica.model == model]
        for replica in workers:
            if replica.state in _LEAVING:
                continue
            self._sleepers.evict(replica.name, cause, sleeps=replica.can_sleep)
        return [replica.name for replica in workers]
