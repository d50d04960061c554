"""Which idle workers make room for one that is to be loaded. Pure: what they hold and cost are arguments; bytes.

Only workers that may go are given (lazy, so that their next request brings them back; not pinned). Of those, busy ones
stay; of the sets of idle ones that make enough room, the cheapest goes: first by the highest priority among them, then
by the seconds that loading them again will take, then the one that was idle for longest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import combinations

EXACT_UP_TO = 12
"""Workers among which every set is tried; of more, they are taken one by one, the cheapest first."""


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """One worker.

    held      GPU → bytes that come back when it goes
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
    """Why nobody goes."""

    WAIT = "wait"
    """There would be room if busy workers were idle."""
    NEVER = "never"
    """Not even then."""


def choose(
    missing: Mapping[int, int], candidates: Sequence[EvictionCandidate], *, one_suffices: bool = False
) -> tuple[str, ...] | NoRoom:
    """The workers that go.

    missing       GPU → bytes that are to come back there
    one_suffices  on one of these GPUs, whichever (``gpu: auto``)
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
    # one taken early may not be needed any more, now that larger ones are among them
    for candidate in list(reversed(chosen)):
        rest = [other for other in chosen if other is not candidate]
        if _is_enough(wanted, rest):
            chosen = rest
    return tuple(chosen)


def _is_enough(wanted: Mapping[int, int], chosen: Sequence[EvictionCandidate]) -> bool:
    return all(sum(c.held.get(gpu, 0) for c in chosen) >= size for gpu, size in wanted.items())


def _cost(chosen: Sequence[EvictionCandidate]) -> tuple[int, float, float]:
    return max(c.priority for c in chosen), sum(c.load_s for c in chosen), -min(c.idle_s for c in chosen)
