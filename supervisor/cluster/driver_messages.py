"""What the supervisor and its helper process that talks to Ray tell each other.

A message is one record of a ``helper_link``, see ``protocol.records``.
"""

from dataclasses import dataclass, field
from typing import Any, Final, get_args

from protocol.records import Kinds


@dataclass(frozen=True)
class Node:
    """A machine of the cluster.

    node_id  Ray's id of the machine's membership; a machine that leaves and comes back has another one
    name     the name that it was started with, else its address
    address  its IP address
    gpus     GPUs that Ray may lease there
    free     of these, the GPUs that are not leased
    others   GPUs that other programs have leased
    own      whether it is the supervisor's machine
    labels   labels that it was started with
    devices  its GPUs as in ``agent_messages.Gpus``; None if they were not read, or a worker there tells them
    """

    node_id: str
    name: str
    address: str
    gpus: float
    free: float
    others: float
    own: bool
    labels: dict[str, str] = field(default_factory=dict)
    devices: list[Any] | None = None


@dataclass(frozen=True)
class StartAgent:
    """Start an agent on a machine, with a lease of ``gpus`` GPUs, and give it the order.

    engine  the worker's engine: a spare agent of it is used if there is one
    """

    number: int
    node_id: str
    gpus: int
    engine: str
    order: bytes


@dataclass(frozen=True)
class EndAgent:
    number: int


@dataclass(frozen=True)
class KeepSpares:
    """Keep spare agents, see ``ray_driver``.

    wanted    [``node`` of models.yaml, engine] of each model that may run on other machines; empty for no spares
    starting  whether a worker starts, loads or wakes, whose processor time a spare would take
    """

    wanted: list[list[str]]
    starting: bool


@dataclass(frozen=True)
class Nodes:
    """The machines of the cluster, whenever they have changed."""

    nodes: list[Node]


@dataclass(frozen=True)
class Looked:
    """Ray has answered, and the machines have not changed."""


@dataclass(frozen=True)
class AgentLeft:
    """An agent has ended, or was never started. ``why`` is one line for people, "" if it left by itself."""

    number: int
    why: str


@dataclass(frozen=True)
class Unusable:
    """The cluster cannot be used, and the helper leaves. ``why`` is one line for people."""

    why: str


ToDriver = StartAgent | EndAgent | KeepSpares
FromDriver = Nodes | Looked | AgentLeft | Unusable
TO_DRIVER: Final = Kinds[ToDriver]("the supervisor and Ray's driver", *get_args(ToDriver))
FROM_DRIVER: Final = Kinds[FromDriver]("Ray's driver and the supervisor", *get_args(FromDriver))
