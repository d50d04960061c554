"""Choose idle workers on other machines that leave, so that a worker gets the GPUs that they have leased. Pure."""

from collections.abc import Callable, Iterable, Mapping

from supervisor.fleet.replica import Replica
from supervisor.placement.eviction import Eviction, EvictionCandidate, NoRoom, choose
from supervisor.workers.lifecycle import GOING_DOWN


def who_leaves(
    model: str,
    missing: Mapping[str, int],
    replicas: Iterable[Replica],
    is_idle: Callable[[Replica], bool],
    now: float,
) -> tuple[Eviction, ...] | NoRoom:
    """Return the workers whose leases make room on one of the machines, or the reason why none leaves.

    model     the model of the worker that needs room. Its own workers do not leave
    missing   machine → GPUs that have to become free there
    is_idle   whether a worker may leave now
    now       monotonic seconds
    """
    return choose(*as_memory(model, missing, replicas, is_idle, now), one_suffices=True)


def as_memory(
    model: str,
    missing: Mapping[str, int],
    replicas: Iterable[Replica],
    is_idle: Callable[[Replica], bool],
    now: float,
) -> tuple[dict[int, int], list[EvictionCandidate]]:
    """Return what is missing, and the workers that may leave, as ``eviction`` knows them. A machine is a GPU there, and
    a GPU a byte. The arguments are those of ``who_leaves``."""
    machines = {name: number for number, name in enumerate(missing)}
    candidates = [
        EvictionCandidate(
            replica.name,
            {machines[replica.process.node]: replica.spec.config.gpu_count},
            busy=not is_idle(replica),
            priority=replica.spec.config.priority,
            load_s=float(replica.info.get("load_seconds", 0)),
            idle_s=now - replica.last_active,
            leaves=replica.state in GOING_DOWN,
            stays_s=replica.stays_s(now),
            yields=bool(replica.yields_to),
        )
        for replica in replicas
        if replica.process is not None
        and replica.process.node in machines
        and (replica.state in GOING_DOWN or (replica.model != model and replica.may_be_evicted))
    ]
    return {machines[name]: gpus for name, gpus in missing.items()}, candidates
