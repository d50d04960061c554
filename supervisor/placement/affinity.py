"""Which CPUs a worker runs on: those next to its GPUs. Pure.

There is no memory policy: Linux gives a page from the node of the CPU that first touches it, which follows from this.
"""

from collections.abc import Collection, Sequence

from supervisor.placement.gpus import Gpu


def near_cpus(gpus: Sequence[Gpu], allowed: Collection[int]) -> tuple[int, ...]:
    """The CPUs to keep a worker of these GPUs to; empty for no need or no way to choose.

    allowed  those that the supervisor itself may use
    """
    if not gpus or not all(gpu.cpus for gpu in gpus):
        return ()
    near = frozenset[int]().union(*(gpu.cpus for gpu in gpus)) & frozenset(allowed)
    return tuple(sorted(near)) if near and near != frozenset(allowed) else ()


def ranges(numbers: Collection[int]) -> str:
    """``0-15,32-47``, as the kernel writes lists of CPUs."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
