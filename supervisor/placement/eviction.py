"""The choice of idle workers that make room for a worker that is to be loaded or woken. Pure. Sizes are in bytes.

The caller gives only workers that may leave: lazy ones, which their next request brings back, and not pinned ones. Busy
workers stay until they are idle. ``who_yields`` chooses those that take no new requests, so that they become idle.

A worker that can sleep is put to sleep, as far as host memory has room. If that does not make enough room, workers are
unloaded instead, also those that sleep already, since each still holds a CUDA context.

Of the sets of idle workers that make enough room, the cheapest is taken. Sets are compared by the highest priority in
the set, then by the seconds until all of the set would be back. Last, they are compared by the idle time of the most
recently used worker in the set: a longer time is cheaper.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import combinations
from math import inf
from typing import Any, Protocol

Sizes = Mapping[Any, int]
"""GPU → bytes. A GPU of this machine is its index. GPUs that the launcher leases elsewhere have a key that the launcher
knows, and each of them counts as one byte (``Launched.leases``)."""
EXACT_UP_TO = 12
"""Number of workers up to which every set is tried. Of more workers, the cheapest are taken one by one."""
YIELDING_EXACT_UP_TO = 8
"""As ``EXACT_UP_TO``, for ``who_yields``, which is asked four times a second: 12 workers would take 22 ms each time,
and 8 take 2 ms."""


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """One worker that may be unloaded.

    held      GPU → bytes that become free when the worker is unloaded
    load_s    seconds that loading it took
    idle_s    seconds since its last request
    slept       GPU → bytes that become free when the worker goes to sleep; None if it cannot, or already does
    wake_s      seconds that waking it takes
    host_bytes  host memory that it takes while it sleeps
    leaves      whether a busy worker is on its way down, or to sleep, already
    stays_s     seconds for which a busy worker need not make room yet; infinity while it is being loaded
    yields      whether it takes no new requests already, so that it can make room
    """

    worker: str
    held: Sizes = field(hash=False)
    busy: bool = False
    priority: int = 0
    load_s: float = 0.0
    idle_s: float = 0.0
    slept: Sizes | None = field(default=None, hash=False)
    wake_s: float = 0.0
    host_bytes: int = 0
    leaves: bool = False
    stays_s: float = 0.0
    yields: bool = False

    @property
    def asleep(self) -> "_Form":
        """What putting the worker to sleep brings and costs; what unloading it does, if it cannot sleep."""
        return self.unloaded if self.slept is None else _Form(self, self.slept, self.wake_s, self.host_bytes, True)

    @property
    def unloaded(self) -> "_Form":
        return _Form(self, self.held, self.load_s, 0, False)


@dataclass(frozen=True, slots=True)
class _Form:
    """One way to make room with a worker."""

    candidate: EvictionCandidate
    freed: Sizes = field(hash=False)
    back_s: float
    host_bytes: int
    sleeps: bool


@dataclass(frozen=True, slots=True)
class Eviction:
    """A worker that makes room. ``sleeps``: it goes to sleep. Else it is unloaded."""

    worker: str
    sleeps: bool = False


_Cost = Callable[[Sequence[_Form]], tuple[float, ...]]


class NoRoom(Enum):
    """The reason why no worker is unloaded."""

    WAIT = "wait"
    """There would be room if busy workers were idle."""
    NEVER = "never"
    """There would not be enough room even if all workers were idle."""


def choose(
    missing: Sizes,
    candidates: Sequence[EvictionCandidate],
    *,
    one_suffices: bool = False,
    host_room: int = 0,
) -> tuple[Eviction, ...] | NoRoom:
    """Return the workers that make room, or the reason why none does.

    missing       GPU → bytes that must become free there
    one_suffices  whether room on any one of these GPUs is enough (``gpu: auto``)
    host_room     bytes of host memory for workers that go to sleep
    """
    wants = _wants(missing, one_suffices)
    idle = [candidate for candidate in candidates if not candidate.busy]
    for forms in ([c.asleep if c.host_bytes <= host_room else c.unloaded for c in idle], [c.unloaded for c in idle]):
        if (chosen := _cheapest(wants, forms, host_room, _cost, EXACT_UP_TO)) is not None:
            return tuple(Eviction(form.candidate.worker, form.sleeps) for form in chosen)
    if any(_is_enough(wanted, [c.unloaded for c in candidates]) for wanted in wants):
        return NoRoom.WAIT
    return NoRoom.NEVER


def _wants(missing: Sizes, one_suffices: bool) -> list[Sizes]:
    return [{gpu: size} for gpu, size in missing.items()] if one_suffices else [missing]


def who_yields(
    missing: Sizes, candidates: Sequence[EvictionCandidate], *, one_suffices: bool = False
) -> tuple[str, ...]:
    """Return the workers that are to take no new requests, so that there is room when they have finished those that
    they have. Return none if there would not be enough room, because other workers need not make room yet.

    Workers that yield already are taken first, so that one look at the same models chooses as the look before did.

    missing, one_suffices  as for ``choose``
    """
    forms = [c.unloaded for c in candidates if not c.busy or c.leaves or c.stays_s <= 0]
    chosen = _cheapest(_wants(missing, one_suffices), forms, 0, _yield_cost, YIELDING_EXACT_UP_TO) or ()
    yielding = [form.candidate for form in chosen]
    return tuple(c.worker for c in yielding if c.yields or (c.busy and not c.leaves))


def _cheapest(
    wants: Sequence[Sizes], forms: Sequence[_Form], host_room: int, cost: _Cost, exact_up_to: int
) -> tuple[_Form, ...] | None:
    """Return the cheapest set that makes room for one of the wants; None if no set does."""
    found = [chosen for wanted in wants if (chosen := _enough(wanted, forms, host_room, cost, exact_up_to)) is not None]
    return min(found, key=cost, default=None)


def _enough(
    wanted: Sizes, forms: Sequence[_Form], host_room: int, cost: _Cost, exact_up_to: int
) -> tuple[_Form, ...] | None:
    useful = [form for form in forms if any(form.freed.get(gpu) for gpu in wanted)]
    if not _is_enough(wanted, useful):
        return None
    if len(useful) <= exact_up_to:
        sets = (chosen for n in range(1, len(useful) + 1) for chosen in combinations(useful, n))
        enough = (chosen for chosen in sets if _is_enough(wanted, chosen) and _host_bytes(chosen) <= host_room)
        return min(enough, key=cost, default=None)
    chosen: list[_Form] = []
    for form in sorted(useful, key=lambda form: cost((form,))):
        if _host_bytes([*chosen, form]) <= host_room:
            chosen.append(form)
        if _is_enough(wanted, chosen):
            break
    else:
        return None
    # a worker taken early may not be needed any more after larger ones were added
    for form in list(reversed(chosen)):
        rest = [other for other in chosen if other is not form]
        if _is_enough(wanted, rest):
            chosen = rest
    return tuple(chosen)


def _is_enough(wanted: Sizes, chosen: Sequence[_Form]) -> bool:
    return all(sum(form.freed.get(gpu, 0) for form in chosen) >= size for gpu, size in wanted.items())


def _host_bytes(chosen: Sequence[_Form]) -> int:
    return sum(form.host_bytes for form in chosen)


def _yield_cost(chosen: Sequence[_Form]) -> tuple[float, ...]:
    """Return the cost of making workers yield: the highest priority and the number of those that do not do so yet."""
    asked = [c for c in (form.candidate for form in chosen) if c.busy and not c.leaves and not c.yields]
    return max((c.priority for c in asked), default=-inf), len(asked), *_cost(chosen)


def _cost(chosen: Sequence[_Form]) -> tuple[float, ...]:
    return (
        max(form.candidate.priority for form in chosen),
        sum(form.back_s for form in chosen),
        -min(form.candidate.idle_s for form in chosen),
    )


# Groups of models, of which a limited number is loaded at once. Pure.
#
# A model has a place in each of its groups from the moment when its start or its wake is admitted to them, until its
# last process has ended or sleeps. A start takes the places in all of its groups at once, or none. It takes them
# before it claims any memory. So a start that waits for a place holds nothing that another start waits for.


class Group(Protocol):
    """The keys of a group in models.yaml. The names of the models, and how many of them may be loaded at once."""

    @property
    def models(self) -> Sequence[str]: ...
    @property
    def loaded(self) -> int: ...


Groups = Mapping[str, Group]
"""By name."""


def places_of(model: str, groups: Groups) -> dict[str, int]:
    """Return the places of a model: one in each of its groups.

    For ``choose`` a model that has places is an ``EvictionCandidate``, a group a GPU, and a place a byte. If the model
    may not leave, nothing becomes free with it.
    """
    return {name: 1 for name, group in groups.items() if model in group.models}


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


def choose_leavers(missing: Mapping[str, int], holders: Sequence[EvictionCandidate]) -> tuple[str, ...] | NoRoom:
    """Return the models that leave, so that the missing places become free, or why none leaves.

    Models of the lowest priority leave first, and among these the ones that have been idle longest. The time
    that a load takes does not count: whoever makes a group wants the model that was used last.

    holders  the models that have places, see ``places_of``
    """
    chosen = choose(missing, holders)
    return chosen if isinstance(chosen, NoRoom) else tuple(eviction.worker for eviction in chosen)


def surplus(groups: Groups, holders: Sequence[EvictionCandidate]) -> dict[str, int]:
    """Return group → models that are loaded beyond its limit, without those that leave. A reload can cause that."""
    counted = {
        name: sum(holder.worker in group.models and not holder.leaves for holder in holders) - group.loaded
        for name, group in groups.items()
    }
    return {name: count for name, count in counted.items() if count > 0}


def describe(names: Iterable[str], groups: Groups) -> str:
    """Return the limits of groups for people: "group coders: 1 at once"."""
    return ", ".join(f"group {name}: {groups[name].loaded} at once" for name in names)


# How models that cannot be loaded together take turns. Pure: times are arguments, in monotonic seconds.
#
# A start that finds no room waits for busy models. Without a rule it would wait for ever while requests for those
# models keep coming, since each of them would be busy at every look. The rule has three parts:
#
# * Once a start has waited for ``YIELD_AFTER_S``, enough busy models yield: they take no new requests, finish those
#   that they have, and make room. Requests that come for them meanwhile wait, and start them again afterwards.
# * A model that has just come up does not yield before it has been up for ``STAY_S``, and for ``STAY_LOADS`` times as
#   long as it took to come up. So at most a third of the time goes into loads, and few models are exchanged.
# * Starts come first that began first. A later start makes no model leave where an earlier one waits for room.


YIELD_AFTER_S = 3.0
"""Seconds that a start waits for busy models to be idle by themselves, before they take no new requests."""
STAY_S = 5.0
"""Seconds for which a model that has come up takes new requests, whoever waits for its place."""
STAY_LOADS = 2.0
"""For how many times the seconds that it took to come up, it takes new requests."""
IDLE_WAIT_S = 60.0
"""Seconds that a start waits for busy models which do not yield to it, because no request waits for its model any more.
The time in which one of them is loading does not count."""
DRAIN_WAIT_S = 600.0
"""Seconds that a start waits for models that yield to it to finish their requests. Then its own requests end with an
error that says when to try again, and those models go on."""


def stays_s(up_s: float, came_up_s: float) -> float:
    """Return for how many seconds a model still takes new requests although another model wants its place.

    up_s       seconds for which it has been up
    came_up_s  seconds that its load, or its wake, took
    """
    return max(0.0, STAY_S - up_s, STAY_LOADS * came_up_s - up_s)


def behind(candidates: Sequence[EvictionCandidate], awaited: Collection[Any]) -> list[EvictionCandidate]:
    """Return the candidates as a later start has to see them: those on GPUs for which earlier starts wait are not idle,
    and do not yield to it.

    awaited  the GPUs for which earlier starts wait
    """
    if not awaited:
        return list(candidates)
    return [replace(c, busy=True, stays_s=inf) if c.held.keys() & {*awaited} else c for c in candidates]


class BusyWait:
    """The wait of one start for busy models. A start that waits for memory after a place in a group has another one.

    began  when the start began
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._since: float | None = None

    def look(
        self,
        now: float,
        missing: Sizes,
        candidates: Sequence[EvictionCandidate],
        *,
        one_suffices: bool = False,
        wanted: bool = True,
        one_loads: bool = False,
    ) -> tuple[str, ...] | None:
        """Return the workers that take no new requests until the next look. Return None if the wait is over.

        missing, candidates, one_suffices  as for ``eviction.choose``, which has found that busy workers are in the way
        wanted     whether a request waits for the model, or somebody has ordered it up
        one_loads  whether one of the models in the way is being loaded
        """
        if self._since is None:
            self._since = now
        yielding: tuple[str, ...] = ()
        if wanted and now - self._began >= YIELD_AFTER_S:
            yielding = who_yields(missing, candidates, one_suffices=one_suffices)
        # A worker that loads cannot be idle yet, and a large model may load for longer. One that need not yield yet
        # will have to.
        if one_loads or (wanted and not yielding):
            self._since = now
        return None if now - self._since >= (DRAIN_WAIT_S if yielding else IDLE_WAIT_S) else yielding
