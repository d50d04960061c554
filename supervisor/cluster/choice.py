"""Choose the machine for a worker from those of the cluster. Pure."""

from collections.abc import Collection, Mapping, Sequence

from supervisor.cluster.agent_messages import Refused
from supervisor.cluster.driver_messages import Node
from supervisor.workers.machines import NoMachineError, is_name, labels_of


def choose(
    nodes: Sequence[Node],
    free: Mapping[str, float],
    wanted: str,
    gpus: int,
    beside: Mapping[str, int] | None = None,
    held: Mapping[str, int] | None = None,
    without: Collection[str] = (),
) -> Node:
    """Return the machine for a worker. Raises NoMachineError.

    Of several machines the one with the fewest workers of the same model is taken, then the one with the fewest of all.

    free     machine → GPUs that can be leased
    wanted   ``node`` of models.yaml
    gpus     GPUs that the worker needs
    beside   machine → other workers of the same model
    held     machine → workers of all models
    without  machines that are not taken
    """
    there = [node for node in _meant(nodes, wanted) if node.name not in without]
    what = _words(wanted)
    if not there:
        raise NoMachineError(f"the Ray cluster has no more {what}" if without else f"the Ray cluster has no {what}")
    roomy = [node for node in there if free[node.name] >= gpus]
    if not roomy:
        large = {node.name: gpus - int(free[node.name]) for node in there if node.gpus >= gpus}
        names = ", ".join(f"{node.name} {free[node.name]:g} of {node.gpus:g}" for node in there)
        if is_name(wanted):
            raise NoMachineError(
                f"{wanted} has {free[wanted]:g} of {there[0].gpus:g} GPUs free, and {gpus} are needed", large
            )
        raise NoMachineError(f"no {what} of the Ray cluster has {gpus} GPUs free: {names}", large)
    beside, held = beside or {}, held or {}
    return min(roomy, key=lambda node: (beside.get(node.name, 0), held.get(node.name, 0), node.name))


def is_meant(node: Node, wanted: str) -> bool:
    """Return whether ``wanted`` (``node`` of models.yaml) can be this machine."""
    if is_name(wanted):
        return node.name == wanted
    return not node.own and labels_of(wanted).items() <= node.labels.items()


def is_worth_another_lease(passed: Collection[int], refused: Refused) -> bool:
    """Return whether a worker that its machine has refused is tried on other GPUs of that machine.

    There is an end: each try must have brought a GPU that the worker was not refused on before.

    passed  the GPUs of the machine that the worker was refused on before
    """
    return refused.elsewhere and not set(refused.gpus) <= set(passed)


def _meant(nodes: Sequence[Node], wanted: str) -> list[Node]:
    found = [node for node in nodes if is_meant(node, wanted)]
    if is_name(wanted):
        if not found:
            names = ", ".join(sorted(node.name for node in nodes))
            raise NoMachineError(f"the Ray cluster has no machine {wanted}: it has {names}")
        if len(found) > 1:
            raise NoMachineError(
                f"the Ray cluster has {len(found)} machines called {wanted}: start each with a --node-name of its own"
            )
    return found


def _words(wanted: str) -> str:
    return f"other machine with the labels {wanted}" if labels_of(wanted) else "other machine"
