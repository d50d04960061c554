"""The choice of idle workers that make room for a worker that is to be loaded or woken. Pure. Sizes are in bytes.

The caller gives only workers that may leave: lazy ones, which their next request brings back, and not pinned ones. Busy
workers stay until they are idle. ``who_yields`` chooses those that take no new requests, so that they become idle.

A worker that can sleep is put to sleep, as far as host memory has room. If that does not make enough room, workers are
unloaded instead, also those that sleep already, since each still holds a CUDA context.

Of the sets of idle workers that make enough room, the cheapest is taken. Sets are compared by the highest priority in
the set, then by the seconds until all of the set would be back. Last, they are compared by the idle time of the most
recently used worker in the set: a longer time is cheaper.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations
from math import inf
from typing import Any

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
    wants = [{gpu: size} for gpu, size in missing.items()] if one_suffices else [missing]
    idle = [candidate for candidate in candidates if not candidate.busy]
    for forms in ([c.asleep if c.host_bytes <= host_room else c.unloaded for c in idle], [c.unloaded for c in idle]):
        found = [
            chosen
            for wanted in wants
            if (chosen := _cheapest(wanted, forms, host_room, _cost, EXACT_UP_TO)) is not None
        ]
        if found:
            return tuple(Eviction(form.candidate.worker, form.sleeps) for form in min(found, key=_cost))
    if any(_is_enough(wanted, [c.unloaded for c in candidates]) for wanted in wants):
        return NoRoom.WAIT
    return NoRoom.NEVER


def who_yields(
    missing: Sizes, candidates: Sequence[EvictionCandidate], *, one_suffices: bool = False
) -> tuple[str, ...]:
    """Return the workers that are to take no new requests, so that there is room when they have finished those that
    they have. Return none if there would not be enough room, because other workers need not make room yet.

    Workers that yield already are taken first, so that one look at the same models chooses as the look before did.

    missing, one_suffices  as for ``choose``
    """
    wants = [{gpu: size} for gpu, size in missing.items()] if one_suffices else [missing]
    forms = [c.unloaded for c in candidates if not c.busy or c.leaves or c.stays_s <= 0]
    found = [
        chosen
        for wanted in wants
        if (chosen := _cheapest(wanted, forms, 0, _yield_cost, YIELDING_EXACT_UP_TO)) is not None
    ]
    candidates = [form.candidate for form in min(found, key=_yield_cost)] if found else []
    return tuple(c.worker for c in candidates if c.yields or (c.busy and not c.leaves))


def _cheapest(
    wanted: Sizes,
    forms: Sequence[_Form],
    host_room: int,
    cost: _Cost,
    exact_up_to: int,
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
