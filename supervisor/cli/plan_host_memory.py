"""The host memory that the models of a plan take while they sleep. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from supervisor.spelling import size

if TYPE_CHECKING:
    from supervisor.placement.fit import PlacementCandidate


@dataclass(frozen=True)
class HostMemoryPlan:
    """The host memory of the workers that may sleep.

    workers  worker -> bytes of its copy; None if that is not known
    bound    the most bytes that all of them may take; None if that is not known
    source   where the bound comes from, for people
    """

    workers: dict[str, int | None]
    bound: int | None
    source: str

    @property
    def total(self) -> int:
        """The bytes of all copies whose size is known."""
        return sum(copy or 0 for copy in self.workers.values())

    def lines(self) -> list[str]:
        """Return what people need to know; no line if no worker may sleep."""
        if not self.workers:
            return []
        parts = [f"{name} {'not known' if copy is None else size(copy)}" for name, copy in self.workers.items()]
        allowed = self.source if self.bound is None else f"of {size(self.bound)} allowed ({self.source})"
        found = [f"host memory of models that sleep: {', '.join(parts)}; {size(self.total)} in all, {allowed}"]
        if self.bound is not None:
            found += [
                f"{name}: is unloaded instead of put to sleep, because it takes more host memory than is allowed"
                for name, copy in self.workers.items()
                if (copy or 0) > self.bound
            ]
            if self.total > self.bound:
                found.append("not all of them can sleep at once: those that have slept longest are unloaded")
        return found

    def as_data(self) -> dict[str, Any]:
        """Return the plan for programs."""
        fits = None if self.bound is None or None in self.workers.values() else self.total <= self.bound
        return {"limit_bytes": self.bound, "bytes": self.total, "fits": fits, "workers": self.workers}


def plan_host_memory(
    candidates: "Sequence[PlacementCandidate]", configured: int | None, free: int | None
) -> HostMemoryPlan:
    """Return the plan of the host memory.

    configured  ``supervisor.host_memory``; None if models.yaml does not have it
    free        the free host memory of the box; None if that is not known
    """
    from supervisor.placement.host_memory import SHARE

    workers = {
        candidate.worker: candidate.estimated.sleep_bytes
        for candidate in candidates
        if candidate.spec.may_sleep and not candidate.estimated.faults and candidate.estimated.sleep_bytes != 0
    }
    if configured is not None:
        return HostMemoryPlan(workers, configured, "supervisor.host_memory")
    if free is None:
        return HostMemoryPlan(workers, None, "and half of the free host memory of that box is allowed")
    return HostMemoryPlan(workers, int(free * SHARE), "half of what is free now; supervisor.host_memory sets it")
