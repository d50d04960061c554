"""The choice of a worker's CPUs: those next to its GPUs. Pure.

No memory policy is needed: Linux takes each page from the NUMA node of the CPU that first touches the page.
"""

from collections.abc import Collection, Sequence

from supervisor.placement.gpus import Gpu


def near_cpus(gpus: Sequence[Gpu], allowed: Collection[int]) -> tuple[int, ...]:
    """Return the CPUs that a worker with these GPUs should run on. Empty if there is no need or no way to choose.

    allowed  the CPUs that the supervisor itself may use
    """
    if not gpus or not all(gpu.cpus for gpu in gpus):
        return ()
    near = frozenset[int]().union(*(gpu.cpus for gpu in gpus)) & frozenset(allowed)
    return tuple(sorted(near)) if near and near != frozenset(allowed) else ()


def numa_nodes(gpus: Sequence[Gpu], cpus: Collection[int]) -> frozenset[int]:
    """Return the NUMA nodes next to the GPUs of a worker that is kept to these CPUs. Empty for one that is not kept."""
    return frozenset[int]().union(*(gpu.numa_nodes for gpu in gpus)) if cpus else frozenset()


def ranges(numbers: Collection[int]) -> str:
    """Return the numbers in the kernel's form for lists of CPUs, for example ``0-15,32-47``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
