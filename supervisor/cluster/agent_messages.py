"""What the supervisor and the agents of its workers tell each other: the order to an agent, and the messages between
the two. An agent is not trusted: every value of its messages is checked.

A message is one ZeroMQ frame with one msgpack map. Its key ``kind`` says which message it is. The other keys are the
fields of the class.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, get_args

from protocol import __version__
from protocol.codec import pack_body, unpack_body
from protocol.errors import ErrorCode, FrameError
from protocol.process.worker_spec import EngineSpec, LinkKeys, WorkerSpec, pack_spec, unpack_spec
from supervisor.config.spelling import Limit
from supervisor.placement.gpus import MAX_GPUS
from supervisor.workers.launcher import Elsewhere

BEAT_S: Final = 0.25
"""Seconds between two beats of an agent."""
MAX_LOG: Final = 64 << 10
"""The most bytes of a worker's log in one message."""
_WORD: Final = 1 << 64


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
    limits: Mapping[str, Limit] = field(default_factory=dict)
    store: StoreAccess | None = None
    passed: tuple[int, ...] = ()

    def packed(self) -> bytes:
        """Return the order as bytes."""
        store = None if self.store is None else vars(self.store)
        limits = {gpu: asdict(limit) for gpu, limit in self.limits.items()}
        packed = {"spec": pack_spec(self.spec), "elsewhere": vars(self.elsewhere), "limits": limits, "store": store}
        return pack_body({**vars(self), **packed})

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
        vram = fields["elsewhere"].pop("vram")
        fields["spec"] = unpack_spec(fields["spec"])
        fields["elsewhere"] = Elsewhere(**fields["elsewhere"], vram=vram and tuple(vram))
        fields["limits"] = {gpu: Limit(**limit) for gpu, limit in fields["limits"].items()}
        fields["store"] = fields["store"] and StoreAccess(**fields["store"])
        fields["passed"] = tuple(fields["passed"])
        return Order(**fields)


@dataclass(frozen=True)
class Admitted:
    """The worker fits on the GPUs that were leased for it, and is about to be started.

    gpus     their indices; empty without a look at the GPUs, and on the CPU
    parts    the memory that the worker needs in bytes, by name; empty if that is not known
    unknown  why it is not known, for people; None if it is, and on the CPU
    cpus     the CPUs next to these GPUs, to which the worker is kept; None for all
    nodes    the NUMA nodes next to these GPUs, if the worker is kept to CPUs; else None
    """

    gpus: list[int]
    parts: dict[str, int]
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

    gpus: list[Any]
    held: list[Any]
    loaded: int | None


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

    word: int
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

    reason: str
    why: str
    retry: bool
    gpus: list[int] = field(default_factory=list)
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


REASONS: Final = ("config", "no room", "unreadable", "away", "spawn")
FromAgent = Copying | Admitted | Gpus | Up | Beat | Log | Ended | Refused
ToAgent = Heard | Signal | Stacks | Leave
_FROM_AGENT: Final[Mapping[str, type[Any]]] = {kind.__name__: kind for kind in get_args(FromAgent)}
_TO_AGENT: Final[Mapping[str, type[Any]]] = {kind.__name__: kind for kind in (Heard, Signal, Stacks, Leave)}
_TYPES: Final[Mapping[Any, tuple[type, ...]]] = {
    int: (int,), str: (str,), bytes: (bytes,), bool: (bool,), int | None: (int, type(None)),
    str | None: (str, type(None)), list[int]: (list,), list[Any]: (list,), dict[str, int]: (dict,),
}  # fmt: skip


def pack(message: FromAgent | ToAgent) -> bytes:
    """Return the frame of a message."""
    return pack_body({"kind": type(message).__name__, **vars(message)})


def read_from_agent(frame: bytes) -> FromAgent:
    """Return the message in a frame of an agent. Raises FrameError."""
    message: FromAgent = _read(frame, _FROM_AGENT)
    if isinstance(message, Beat):
        sound = 0 <= message.word < _WORD
    elif isinstance(message, Admitted):
        sound = all(map(_is_index, message.gpus)) and all(map(_is_part, message.parts.items()))
    elif isinstance(message, Gpus):
        sound = all(map(is_gpu, message.gpus)) and all(map(_is_held, message.held))
        sound = sound and (message.loaded is None or _is_size(message.loaded))
    elif isinstance(message, Refused):
        sound = message.reason in REASONS and all(map(_is_index, message.gpus))
    else:
        sound = True
    if not sound:
        raise FrameError(ErrorCode.BAD_FRAME, f"an agent's message {type(message).__name__} with wrong values")
    return message


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < _WORD


def _is_index(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_GPUS


def _is_part(part: tuple[object, object]) -> bool:
    name, size = part
    return isinstance(name, str) and name.isidentifier() and _is_size(size)


def is_gpu(entry: object) -> bool:
    """Return whether this is an entry of ``Gpus.gpus``."""
    if not isinstance(entry, list) or len(entry) != 5:
        return False
    index, uuid, *sizes = entry
    return _is_index(index) and isinstance(uuid, str) and uuid.isprintable() and all(map(_is_size, sizes))


def _is_held(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    index, size = entry
    return _is_index(index) and (size is None or _is_size(size))


def read_to_agent(frame: bytes) -> ToAgent:
    """Return the message in a frame of the supervisor. Raises FrameError."""
    message: ToAgent = _read(frame, _TO_AGENT)
    return message


def _read(frame: bytes, kinds: Mapping[str, type[Any]]) -> Any:
    fields = unpack_body(frame)
    kind = kinds.get(str(fields.pop("kind", None)))
    if kind is None:
        raise FrameError(ErrorCode.BAD_FRAME, "a message of an unknown kind between agent and supervisor")
    expected = kind.__annotations__
    if fields.keys() != expected.keys() or any(
        not isinstance(fields[name], _TYPES[hint]) or isinstance(fields[name], bool) is not (hint is bool)
        for name, hint in expected.items()
    ):
        raise FrameError(ErrorCode.BAD_FRAME, f"a message {kind.__name__} with other fields than {list(expected)}")
    return kind(**fields)
