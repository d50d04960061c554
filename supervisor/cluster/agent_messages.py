"""What the supervisor and the agents of its workers tell each other: the order to an agent, and the messages between
the two. An agent is not trusted: every value of its messages is checked.

A message is one ZeroMQ frame, see ``protocol.records``.
"""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final, get_args

from protocol import __version__
from protocol.codec import pack_body, unpack_body
from protocol.process.worker_spec import EngineSpec, LinkKeys, WorkerSpec, pack_spec, unpack_spec
from protocol.records import Kinds
from protocol.values import ReadWith, Then, Within, read, reader
from supervisor.config.spelling import Limit
from supervisor.placement.gpus import MAX_GPUS
from supervisor.workers.launcher import Elsewhere

BEAT_S: Final = 0.25
"""Seconds between two beats of an agent."""
MAX_LOG: Final = 64 << 10
"""The most bytes of a worker's log in one message."""
REASONS: Final = ("config", "no room", "unreadable", "away", "spawn")
Size = Annotated[int, Within(0, (1 << 64) - 1)]
Index = Annotated[int, Within(0, MAX_GPUS - 1)]


def read_gpu(entry: Any) -> list[Any]:
    """Return an entry of ``Gpus.gpus``. Raises ValueError if it is none."""
    match entry:
        case [index, str(uuid), total, used, free] if uuid.isprintable():
            return [reader(Index)(index, False), uuid, *reader(list[Size])([total, used, free], False)]
    raise ValueError("must be [index, UUID, total, used and free bytes]")


def _held(entry: Any) -> list[Any]:
    match entry:
        case [index, size]:
            return [reader(Index)(index, False), reader(Size | None)(size, False)]
    raise ValueError("must be [index, bytes]")


def _parts(parts: dict[str, int]) -> dict[str, int]:
    if not all(map(str.isidentifier, parts)):
        raise ValueError("must have names of parts as keys")
    return parts


def _reason(reason: str) -> str:
    if reason not in REASONS:
        raise ValueError(f"must be one of {', '.join(REASONS)}")
    return reason


@dataclass(frozen=True)
class StoreAccess:
    """Where an agent copies the model's directories from, and to.

    endpoint   the model store's port
    server     its public key, as Z85 text
    directory  where copies are kept on the machine; "~" is the home of the agent's user
    size       the most bytes of all copies there
    """

    endpoint: str
    server: str
    directory: str
    size: int


@dataclass(frozen=True)
class Order:
    """What an agent is told when it is started, through its standard input. The line before it is CUDA_VISIBLE_DEVICES
    of its lease.

    spec       the specification of the worker. Its endpoint is also that of the agent, with the same keys. Its
               ``log_path``, ``supervisor_pid`` and ``link_lease_s`` are left to the agent
    elsewhere  what the worker wants of the machine
    agent_id   the agent's routing id
    lease_s    seconds without a sign of the supervisor after which the agent ends the worker
    build      the supervisor's version
    limits     GPU (UUID or its beginning) → the most that models.yaml allows all workers there
    store      the model store; None if the directories are on the machine
    passed     GPUs of the machine on which the worker has found no room. Other agents hold their leases
    """

    spec: WorkerSpec
    elsewhere: Elsewhere
    agent_id: bytes
    lease_s: float
    build: str
    limits: dict[str, Limit] = field(default_factory=dict)
    store: StoreAccess | None = None
    passed: tuple[int, ...] = ()

    def packed(self) -> bytes:
        """Return the order as bytes."""
        return pack_body({**asdict(self), "spec": pack_spec(self.spec)})

    @staticmethod
    def unpack(packed: bytes) -> "Order":
        """Return the order that ``packed`` has made.

        Of an order of another version only what a refusal needs is read: the specification may have other fields.
        """
        fields = unpack_body(packed)
        if fields["build"] != __version__:
            spec = unpack_body(fields["spec"])
            engine = EngineSpec(spec["engine"]["model"], "", "")
            keys = LinkKeys(**spec["keys"])
            known = WorkerSpec(engine, 0, "", spec["endpoint"], b"", "", 0, keys=keys)
            return Order(known, Elsewhere(""), fields["agent_id"], fields["lease_s"], fields["build"])
        return read(Order, {**fields, "spec": unpack_spec(fields["spec"])})


@dataclass(frozen=True)
class Admitted:
    """The worker fits on the GPUs that were leased for it, and is about to be started.

    gpus     their indices; empty without a look at the GPUs, and on the CPU
    parts    the memory that the worker needs in bytes, by name; empty if that is not known
    unknown  why it is not known, for people; None if it is, and on the CPU
    cpus     the CPUs next to these GPUs, to which the worker is kept; None for all
    nodes    the NUMA nodes next to these GPUs, if the worker is kept to CPUs; else None
    """

    gpus: list[Index]
    parts: Annotated[dict[str, Size], Then(_parts)]
    unknown: str | None
    cpus: str | None
    nodes: str | None


@dataclass(frozen=True)
class Gpus:
    """All GPUs of the machine, whenever they have changed.

    gpus    [index, UUID, total, used and free bytes] of each
    held    [index, bytes that the worker holds there] of each GPU that lists the worker; None for bytes not known
    loaded  bytes that the worker held on all GPUs together right after its load; None before, and if that is not known
    """

    gpus: list[Annotated[Any, ReadWith(read_gpu)]]
    held: list[Annotated[Any, ReadWith(_held)]]
    loaded: Size | None


@dataclass(frozen=True)
class Up:
    """The agent has started the worker.

    pid    the worker's process
    build  the version of modelctl on the machine
    """

    pid: int
    build: str


@dataclass(frozen=True)
class Copying:
    """The agent copies the model's directories, and will start the worker then. Sent every BEAT_S.

    phase        what it does, for people
    done, total  bytes
    rate         bytes in a second, lately
    """

    phase: str
    done: int
    total: int
    rate: int


@dataclass(frozen=True)
class Beat:
    """A sign of life, every BEAT_S.

    word       the word of the worker's lease, see ``protocol.process.worker_spec``
    memory     bytes of RAM that the worker holds; None if not known
    condition  the state of the worker's process, for people
    """

    word: Size
    memory: int | None
    condition: str


@dataclass(frozen=True)
class Log:
    """The next bytes of the worker's log, at most MAX_LOG."""

    text: bytes


@dataclass(frozen=True)
class Ended:
    """The worker has ended, and nothing of it is left.

    code  the exit code, or minus the number of the signal
    """

    code: int


@dataclass(frozen=True)
class Refused:
    """The agent cannot start the worker.

    reason     one of REASONS, see ``exits.ExitReport``
    why        one line for people
    retry      whether another try may help
    gpus       without room: the indices of the GPUs that were leased
    elsewhere  whether there is room on GPUs of the machine that are neither these nor ``Order.passed``. Then the agent
               holds its lease until it is ended, for ``agent.HOLD_S`` at most
    build      the version of modelctl on the machine
    """

    reason: Annotated[str, Then(_reason)]
    why: str
    retry: bool
    gpus: list[Index] = field(default_factory=list)
    elsewhere: bool = False
    build: str = __version__


@dataclass(frozen=True)
class Heard:
    """The supervisor's answer to Beat."""


@dataclass(frozen=True)
class Signal:
    """Send this signal to the worker and its process group."""

    number: int


@dataclass(frozen=True)
class Stacks:
    """Have the worker write the stacks of its threads."""


@dataclass(frozen=True)
class Leave:
    """The end is known: the agent may leave."""


FromAgent = Copying | Admitted | Gpus | Up | Beat | Log | Ended | Refused
ToAgent = Heard | Signal | Stacks | Leave
FROM_AGENT: Final = Kinds[FromAgent]("an agent and the supervisor", *get_args(FromAgent))
TO_AGENT: Final = Kinds[ToAgent]("the supervisor and an agent", *get_args(ToAgent))
