"""The choice of idle workers to unload for a worker that is to be loaded. Pure. Sizes are in bytes.

The caller gives only workers that may be unloaded: lazy ones, which their next request loads again, and not pinned
ones. Busy workers stay. Of the sets of idle workers that make enough room, the cheapest is unloaded. Sets are compared
by the highest priority in the set, then by the seconds that loading the set again takes. Last, they are compared by the
idle time of the most recently used worker in the set: a longer time is cheaper.
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
    """

    worker: str
    held: Mapping[int, int] = field(hash=False)
    busy: bool = False
    priority: int = 0
    load_s: float = 0.0
    idle_s: float = 0.0


class NoRoom(Enum):
    """The reason why no worker is unloaded."""

    WAIT = "wait"
    """There would be room if busy workers were idle."""
    NEVER = "never"
    """There would not be enough room even if all workers were idle."""


def choose(
    missing: Mapping[int, int], candidates: Sequence[EvictionCandidate], *, one_suffices: bool = False
) -> tuple[str, ...] | NoRoom:
    """Return the workers to unload, or the reason why none is unloaded.

    missing       GPU → bytes that must become free there
    one_suffices  whether room on any one of these GPUs is enough (``gpu: auto``)
    """
    wants = [{gpu: size} for gpu, size in missing.items()] if one_suffices else [missing]
    idle = [candidate for candidate in candidates if not candidate.busy]
    found = [chosen for wanted in wants if (chosen := _cheapest(wanted, idle)) is not None]
    if found:
        return tuple(candidate.worker for candidate in min(found, key=_cost))
    if any(_is_enough(wanted, candidates) for wanted in wants):
        return NoRoom.WAIT
    return NoRoom.NEVER


def _cheapest(wanted: Mapping[int, int], idle: Sequence[EvictionCandidate]) -> tuple[EvictionCandidate, ...] | None:
    useful = [candidate for candidate in idle if any(candidate.held.get(gpu) for gpu in wanted)]
    if not _is_enough(wanted, useful):
        return None
    if len(useful) <= EXACT_UP_TO:
        sets = (chosen for n in range(1, len(useful) + 1) for chosen in combinations(useful, n))
        return min((chosen for chosen in sets if _is_enough(wanted, chosen)), key=_cost)
    chosen: list[EvictionCandidate] = []
    for candidate in sorted(useful, key=lambda c: _cost((c,))):
        chosen.append(candidate)
        if _is_enough(wanted, chosen):
            break
    # a worker taken early may not be needed any more after larger ones were added
    for candidate in list(reversed(chosen)):
        rest = [other for other in chosen if other is not candidate]
        if _is_enough(wanted, rest):
            chosen = rest
    return tuple(chosen)


def _is_enough(wanted: Mapping[int, int], chosen: Sequence[EvictionCandidate]) -> bool:
    return all(sum(c.held.get(gpu, 0) for c in chosen) >= size for gpu, size in wanted.items())


def _cost(chosen: Sequence[EvictionCandidate]) -> tuple[int, float, float]:
    return max(c.priority for c in chosen), sum(c.load_s for c in chosen), -min(c.idle_s for c in chosen)
