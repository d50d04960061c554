"""The places of models in groups: who has one, and which models leave for another one. ``placement.groups`` decides."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from supervisor.event_history import EventKind, noted
from supervisor.fleet.replica import Replica
from supervisor.fleet.replica_registry import ReplicaRegistry
from supervisor.fleet.sleepers import Sleepers
from supervisor.placement.eviction import EvictionCandidate, NoRoom
from supervisor.placement.groups import (
    Groups,
    Holder,
    as_memory,
    choose_leavers,
    describe,
    missing_places,
    share_group,
    surplus,
)
from supervisor.workers.lifecycle import GOING_DOWN, WorkerState

if TYPE_CHECKING:
    from supervisor.fleet.admission import Admission

_LEAVING = (*GOING_DOWN, WorkerState.FALLING_ASLEEP)


class GroupPlaces:
    """The groups of models.yaml as it was read last. Runs on the supervisor's one thread.

    under_way  returns the starts and wakes that are under way
    """

    def __init__(
        self,
        registry: ReplicaRegistry,
        sleepers: Sleepers,
        under_way: Callable[[], Collection["Admission"]],
        log: logging.Logger,
    ) -> None:
        self._registry = registry
        self._sleepers = sleepers
        self._under_way = under_way
        self._log = log

    @property
    def _groups(self) -> Groups:
        return self._registry.config.groups

    def missing(self, model: str) -> dict[str, int]:
        """Return group → models that must leave before the model may be loaded or woken."""
        if not self._groups:
            return {}
        return missing_places(model, self._groups, {holder.model for holder in self._holders()})

    def share(self, one: str, other: str) -> bool:
        """Return whether two different models are in one group, so that one may have to wait for the other."""
        return one != other and share_group(one, other, self._groups)

    def make_room(self, replica: Replica, missing: Mapping[str, int]) -> tuple[str, ...] | NoRoom:
        """Put idle models of full groups to sleep, or unload them. Return the workers that leave, or why none does.

        replica  the worker that is to be started or woken
        missing  group → models that must leave
        """
        chosen = choose_leavers(missing, self._groups, self._holders())
        if isinstance(chosen, NoRoom):
            return chosen
        limits = describe(missing, self._groups)
        message = f"{replica.shown}: {limits}: {', '.join(chosen)} makes room"
        self._log.info("%s", message, extra=noted(EventKind.EVICTION, replica.log_name))
        return tuple(worker for m in chosen for worker in self._let_go(m, f"evicted for {replica.label} ({limits})"))

    def in_the_way(self, missing: Mapping[str, int]) -> tuple[dict[int, int], list[EvictionCandidate]]:
        """Return the places that are missing, and the models of the groups that may leave, see ``groups.as_memory``."""
        return as_memory(missing, self._groups, self._holders())

    def workers_of(self, models: Collection[str]) -> tuple[str, ...]:
        """Return the workers because of which these models have places."""
        return tuple(replica.name for replica in self._with_places() if replica.model in models)

    def refusal(self, missing: Mapping[str, int]) -> str:
        """Return why a model finds no place, with the models that are loaded, and what to do."""
        loaded = [holder.model for holder in self._holders()]
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
        for name in surplus(self._groups, self._holders()):
            chosen = choose_leavers({name: 1}, self._groups, self._holders())
            for model in () if isinstance(chosen, NoRoom) else chosen:
                self._let_go(model, f"evicted: {describe([name], self._groups)}")

    def _with_places(self) -> list[Replica]:
        """Return the workers whose models have places because of them."""
        starts = {start.replica.name: start.has_places for start in self._under_way()}
        return [
            replica
            for name, replica in self._registry.replicas.items()
            if starts.get(name, replica.process is not None and replica.state is not WorkerState.ASLEEP)
        ]

    def _holders(self) -> list[Holder]:
        workers: dict[str, list[Replica]] = {}
        for replica in self._with_places():
            workers.setdefault(replica.model, []).append(replica)
        now = time.monotonic()
        return [self._holder(model, replicas, now) for model, replicas in workers.items()]

    def _holder(self, model: str, workers: list[Replica], now: float) -> Holder:
        up = [replica for replica in workers if replica.state not in _LEAVING]
        return Holder(
            model,
            busy=not all(self._registry.may_leave(replica) for replica in up),
            may_leave=all(replica.may_be_evicted for replica in workers),
            leaving=not up,
            priority=workers[0].spec.config.priority,
            idle_s=now - max(replica.last_active for replica in workers),
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
