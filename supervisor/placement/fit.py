"""Place the models of a models.yaml on trial, to find those that fit on the GPUs together. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from supervisor.config import ModelSpec
from supervisor.placement.estimates import Estimated
from supervisor.placement.eviction import NoRoom
from supervisor.placement.gpu_shares import Needs, parts_on
from supervisor.placement.gpus import Gpu
from supervisor.placement.groups import Groups, Holder, choose_leavers, describe, missing_places
from supervisor.placement.policy import GpuRequest, Holding, Placed, PlacementRefused, place, rooms
from supervisor.spelling import Limit


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """A worker to be placed. ``gpu_request`` is None for a worker on the CPU."""

    worker: str
    spec: ModelSpec
    gpu_request: GpuRequest | None
    estimated: Estimated

    @property
    def autostart(self) -> bool:
        return self.spec.autostart


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the trial for one worker.

    placed    its GPUs; None for a worker on the CPU and for one that is not placed
    why_not   one line with the reason if the worker is not placed
    no_room   whether GPU memory is missing, or a place in a group
    leaving   models of a full group that start with the supervisor, and would be unloaded for this worker
    """

    candidate: PlacementCandidate
    placed: Placed | None = None
    why_not: str | None = None
    no_room: bool = False
    leaving: tuple[str, ...] = ()

    @property
    def needs(self) -> Needs | None:
        gpu_request, needs = self.candidate.gpu_request, self.candidate.estimated.needs
        return needs[gpu_request.counts[0]] if gpu_request and needs else None

    def on(self, gpu: Gpu) -> dict[str, int]:
        """Return the bytes that the worker needs on one GPU, by part. Empty if none or unknown."""
        if self.placed is None or self.needs is None or gpu.index not in self.placed.bytes:
            return {}
        number = list(self.placed.bytes).index(gpu.index)
        return parts_on(self.needs, self.placed.bytes[gpu.index], number, len(self.placed.bytes))


def fit(
    candidates: Sequence[PlacementCandidate],
    gpus: Sequence[Gpu],
    limits: Mapping[str, Limit] | Limit | None,
    outer: str | None,
    groups: Groups | None = None,
) -> list[Outcome]:
    """Place the workers. Return the outcomes in the order of placement.

    Workers that start with the supervisor come first and are placed together. Each of the others is then tried alone
    beside them, without those that would be unloaded to keep to the limits of the groups. In both kinds of workers,
    those with pinned GPUs come before those with ``auto``.
    """
    order = sorted(
        candidates, key=lambda c: (not c.autostart, c.gpu_request is not None and c.gpu_request.pins is None)
    )
    started: list[Outcome] = []
    outcomes = []
    for candidate in order:
        outcome = _try_in_groups(candidate, gpus, started, limits, outer, groups or {})
        if candidate.autostart and outcome.why_not is None:
            started.append(outcome)
        outcomes.append(outcome)
    return outcomes


def _try_in_groups(
    candidate: PlacementCandidate,
    gpus: Sequence[Gpu],
    started: Sequence[Outcome],
    limits: Mapping[str, Limit] | Limit | None,
    outer: str | None,
    groups: Groups,
) -> Outcome:
    """Place one worker beside those that are started, without the models that leave full groups for it."""
    holders = {o.candidate.spec.name: o.candidate.spec.config for o in started}
    missing = missing_places(candidate.spec.name, groups, holders)
    leaving = (
        choose_leavers(
            missing,
            groups,
            [Holder(name, may_leave=c.lazy and not c.pinned, priority=c.priority) for name, c in holders.items()],
        )
        if missing
        else ()
    )
    if isinstance(leaving, NoRoom):
        return Outcome(
            candidate, why_not=f"no place beside {', '.join(holders)}: {describe(missing, groups)}", no_room=True
        )
    holdings: list[Holding] = []
    for other in started:
        if other.placed is not None and other.candidate.spec.name not in leaving:
            number = -1 - len(holdings)  # a simulated process: no real process has a negative number
            gpus = [_with(gpu, number, other.placed.bytes.get(gpu.index, 0)) for gpu in gpus]
            holdings.append(Holding(other.candidate.worker, number, other.placed.bytes, loading=False))
    return replace(_try(candidate, gpus, holdings, limits, outer), leaving=leaving)


def _with(gpu: Gpu, pid: int, size: int) -> Gpu:
    held = {**gpu.processes, pid: size} if size else gpu.processes
    return replace(gpu, used=gpu.used + size, free=gpu.free - size, processes=held)


def _try(
    candidate: PlacementCandidate,
    gpus: Sequence[Gpu],
    holdings: Sequence[Holding],
    limits: Mapping[str, Limit] | Limit | None,
    outer: str | None,
) -> Outcome:
    if candidate.estimated.faults:
        return Outcome(candidate, why_not="; ".join(fault.message for fault in candidate.estimated.faults))
    if candidate.gpu_request is None:
        return Outcome(candidate)
    verdict = place(candidate.gpu_request, candidate.estimated.needs, rooms(gpus, holdings, limits), outer)
    if isinstance(verdict, PlacementRefused):
        return Outcome(candidate, why_not=verdict.message, no_room=bool(verdict.missing))
    return Outcome(candidate, verdict)
