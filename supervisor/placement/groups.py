"""Groups of models, of which a limited number is loaded at once. Pure.

A model has a place in each of its groups from the moment when its start or its wake is admitted to them, until its last
process has ended or sleeps. A start takes the places in all of its groups at once, or none. It takes them before it
claims any memory. So a start that waits for a place holds nothing that another start waits for.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from supervisor.placement.eviction import EvictionCandidate, NoRoom, choose


class Group(Protocol):
    """The keys of a group in models.yaml. The names of the models, and how many of them may be loaded at once."""

    @property
    def models(self) -> Sequence[str]: ...
    @property
    def loaded(self) -> int: ...


Groups = Mapping[str, Group]
"""By name."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A model that has a place in each of its groups.

    may_leave  whether the model may be unloaded or put to sleep, because its next request brings it back
    leaving    whether its workers are on their way down, or to sleep, already
    idle_s     seconds since its last request
    stays_s, yields  as for ``EvictionCandidate``
    """

    model: str
    busy: bool = False
    may_leave: bool = True
    leaving: bool = False
    priority: int = 0
    idle_s: float = 0.0
    stays_s: float = 0.0
    yields: bool = False


def share_group(one: str, other: str, groups: Groups) -> bool:
    """Return whether two models are in one group."""
    return any(one in group.models and other in group.models for group in groups.values())


def missing_places(model: str, groups: Groups, holders: Collection[str]) -> dict[str, int]:
    """Return group → models that must leave before the model may be loaded. Empty if the model may be loaded now.

    holders  the models that have places. A model that has its places needs no others for a further worker
    """
    if model in holders:
        return {}
    counted = {
        name: sum(holder in group.models for holder in holders) + 1 - group.loaded
        for name, group in groups.items()
        if model in group.models
    }
    return {name: count for name, count in counted.items() if count > 0}


def choose_leavers(missing: Mapping[str, int], groups: Groups, holders: Iterable[Holder]) -> tuple[str, ...] | NoRoom:
    """Return the models that leave, so that the missing places become free, or why none leaves.

    Models of the lowest priority leave first, and among these the ones that have been idle longest. The time
    that a load takes does not count: whoever makes a group wants the model that was used last.
    """
    chosen = choose(*as_memory(missing, groups, holders))
    return chosen if isinstance(chosen, NoRoom) else tuple(eviction.worker for eviction in chosen)


def as_memory(
    missing: Mapping[str, int], groups: Groups, holders: Iterable[Holder]
) -> tuple[dict[int, int], list[EvictionCandidate]]:
    """Return what is missing, and the models that may leave, as ``eviction`` knows them. A model is a worker there, a
    group a GPU, and a place a byte."""
    number = {name: index for index, name in enumerate(missing)}
    candidates = [
        EvictionCandidate(
            holder.model,
            {index: 1 for name, index in number.items() if holder.model in groups[name].models},
            busy=holder.busy or holder.leaving,
            priority=holder.priority,
            idle_s=holder.idle_s,
            leaves=holder.leaving,
            stays_s=holder.stays_s,
            yields=holder.yields,
        )
        for holder in holders
        if holder.may_leave or holder.leaving
    ]
    return {number[name]: count for name, count in missing.items()}, candidates


def surplus(groups: Groups, holders: Sequence[Holder]) -> dict[str, int]:
    """Return group → models that are loaded beyond its limit, without those that leave. A reload can cause that."""
    counted = {
        name: sum(holder.model in group.models and not holder.leaving for holder in holders) - group.loaded
        for name, group in groups.items()
    }
    return {name: count for name, count in counted.items() if count > 0}


def describe(names: Iterable[str], groups: Groups) -> str:
    """Return the limits of groups for people: "group coders: 1 at once"."""
    return ", ".join(f"group {name}: {groups[name].loaded} at once" for name in names)
