"""Spare workers: processes ahead of their time, which have imported what an engine needs and wait for a model.

Most seconds of a start go into imports, so a start that finds a spare is quicker. A spare has no model, and has not
used the GPU's driver. It is guarded, recorded and reaped as a worker is. ``SparePlan`` decides when one is made (pure).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

ENGINES = frozenset({"transformers", "exllamav2"})
"""The engines that get spares. An engine of one's own may read its settings when it is imported."""
QUIET_S = 2.0
"""Seconds without a start after which a spare is made. A spare's imports take a second or more of a core."""
TRIES = 3
"""Spares in a row that may end by themselves, until no more are made for the engine."""
PAUSE_S = 10.0
"""Seconds until the next spare is made after one that has ended by itself."""
LEAST_FREE = 2 << 30
"""Bytes of host memory that must be free before a spare is made."""
LARGEST_SPEC = 32 << 10
"""Bytes of a packed specification that a spare takes. They fit into a pipe's buffer, so that sending never waits."""


@dataclass
class _Engine:
    ended: int = 0
    not_before: float = 0.0


class SparePlan:
    """Decides for which engines a spare is made. Times are monotonic seconds, and the caller passes them."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._busy_at = float("-inf")

    def missing(self, wanted: Collection[str], there: Collection[str], now: float, *, starting: bool) -> list[str]:
        """Return the engines for which a spare is to be made now.

        wanted    the engines of the configured models
        there     the engines that have a spare
        starting  whether a worker starts, loads or wakes, whose processor time a spare would take
        """
        if starting:
            self._busy_at = now
        if now - self._busy_at < QUIET_S:
            return []
        found = []
        for name in sorted(ENGINES.intersection(wanted).difference(there)):
            engine = self._engines.setdefault(name, _Engine())
            if engine.ended < TRIES and now >= engine.not_before:
                found.append(name)
        return found

    def ended(self, engine: str, now: float) -> bool:
        """Take note that a spare has ended by itself. Return whether another one will be made."""
        found = self._engines.setdefault(engine, _Engine())
        found.ended, found.not_before = found.ended + 1, now + PAUSE_S
        return found.ended < TRIES

    def used(self, engine: str) -> None:
        """Take note that a spare has become a worker, so spares of this engine work."""
        self._engines.pop(engine, None)


def shown(spares: Mapping[str, "tuple[int, bool, int | None]"]) -> list[dict[str, object]]:
    """Return spares as ``status`` shows them.

    spares  engine → (pid, whether its imports are done, bytes of RAM)
    """
    return [
        {"engine": engine, "pid": pid, "ready": ready, "ram_bytes": ram} for engine, (pid, ready, ram) in spares.items()
    ]
