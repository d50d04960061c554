"""The choice of idle workers that make room for a worker that is to be loaded or woken. Pure. Sizes are in bytes.

The caller gives only workers that may leave: lazy ones, which their next request brings back, and not pinned ones. Busy
workers stay. A worker that can sleep is put to sleep, as far as host memory has room. If that does not make enough
room, workers are unloaded instead, also those that sleep already, since each still holds a CUDA context.

Of the sets of idle workers that make enough room, the cheapest is taken. Sets are compared by the highest priority in
the set, then by the seconds until all of the set would be back. Last, they are compared by the idle time of the most
recently used worker in the set: a longer time is cheaper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations

EXACT_UP_TO = 12
"""Number of workers up to which every set is tried. Of more workers, the cheapest are taken one by one."""


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """One worker that may be unloaded.

    held      GPU → bytes that become free when the worker is unloaded
    load_s    seconds that loading it took
    idle_s    seconds since its last request
    slept       GPU → bytes that become free when the worker goes to sleep; None if it cannot, or already does
    wake_s      seconds that waking it takes
    host_bytes  host memory that it takes while it sleeps
    """

    worker: str
    held: Mapping[int, int] = field(hash=False)
    busy: bool = False
    priority: int = 0
    load_s: float = 0.0
    idle_s: float = 0.0
    slept: Mapping[int, int] | None = field(default=None, hash=False)
    wake_s: float = 0.0
    host_bytes: int = 0

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
    freed: Mapping[int, int] = field(hash=False)
    back_s: float
    host_bytes: int
    sleeps: bool


@dataclass(frozen=True, slots=True)
class Eviction:
    """A worker that makes room. ``sleeps``: it goes to sleep. Else it is unloaded."""

    worker: str
    sleeps: bool = False


class NoRoom(Enum):
    """The reason why no worker is unloaded."""

    WAIT = "wait"
    """There would be room if busy workers were idle."""
    NEVER = "never"
    """There would not be enough room even if all workers were idle."""


def choose(
    missing: Mapping[int, int],
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
        found = [chosen for wanted in wants if (chosen := _cheapest(wanted, forms, host_room)) is not None]
        if found:
            return tuple(Eviction(form.candidate.worker, form.sleeps) for form in min(found, key=_cost))
    if any(_is_enough(wanted, [c.unloaded for c in candidates]) for wanted in wants):
        return NoRoom.WAIT
    return NoRoom.NEVER


def _cheapest(wanted: Mapping[int, int], forms: Sequence[_Form], host_room: int) -> tuple[_Form, ...] | None:
    useful = [form for form in forms if any(form.freed.get(gpu) for gpu in wanted)]
    if not _is_enough(wanted, useful):
        return None
    if len(useful) <= EXACT_UP_TO:
        sets = (chosen for n in range(1, len(useful) + 1) for chosen in combinations(useful, n))
        enough = (chosen for chosen in sets if _is_enough(wanted, chosen) and _host_bytes(chosen) <= host_room)
        return min(enough, key=_cost, default=None)
    chosen: list[_Form] = []
    for form in sorted(useful, key=lambda form: _cost((form,))):
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


def _is_enough(wanted: Mapping[int, int], chosen: Sequence[_Form]) -> bool:
    return all(sum(form.freed.get(gpu, 0) for form in chosen) >= size for gpu, size in wanted.items())


def _host_bytes(chosen: Sequence[_Form]) -> int:
    return sum(form.host_bytes for form in chosen)


def _cost(chosen: Sequence[_Form]) -> tuple[int, float, float]:
    return (
        max(form.candidate.priority for form in chosen),
        sum(form.back_s for form in chosen),
        -min(form.candidate.idle_s for form in chosen),
    )
