"""The words of ``node`` in models.yaml, by which a model says on which machines its workers run. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

AUTO: Final = "auto"
"""Any machine: the supervisor's own while it has room, then any other."""
OTHERS: Final = "others"
"""Any machine but the supervisor's own."""


def parse_node(value: object) -> str:
    """Return the text of ``node``. Raises ValueError."""
    if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable() or value != value.strip():
        raise ValueError("must be auto, others, the name of a machine, or labels such as zone=a,disk=fast")
    if "=" in value:
        pairs = [part.partition("=") for part in value.split(",")]
        if any(not name or not wanted or "=" in wanted or " " in name + wanted for name, _, wanted in pairs):
            raise ValueError("must be labels as in zone=a,disk=fast, each with a name and a value, without blanks")
    return value


def labels_of(node: str) -> dict[str, str]:
    """Return the labels that a machine must have; empty if ``node`` is no list of labels."""
    if "=" not in node:
        return {}
    return {name: wanted for name, _, wanted in (part.partition("=") for part in node.split(","))}


def is_name(node: str) -> bool:
    """Return whether ``node`` is the name of one machine."""
    return node not in (AUTO, OTHERS) and "=" not in node


@dataclass(frozen=True)
class Elsewhere:
    """What a worker wants of other machines than the supervisor's own. The launcher reads it, and nothing else does.

    node  the machines that will do, as models.yaml names them
    gpus  the number of their GPUs that the worker needs, which the cluster chooses; 0 for a worker on the CPU
    vram  the bytes that the worker takes, if models.yaml says so: one size, or one for each GPU; else None
    """

    node: str
    gpus: int = 0
    vram: tuple[int, ...] | None = None


class NoMachineError(Exception):
    """No other machine can take a worker now. The message is one line for people.

    missing  machine → GPUs that would have to become free there; empty if that would not help, or if GPUs become free
             anyway
    """

    def __init__(self, why: str, missing: Mapping[str, int] | None = None) -> None:
        super().__init__(why)
        self.missing = missing or {}
