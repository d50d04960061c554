"""What the processes of a cluster tell each other, see ``protocol.values``. Every value is checked when it is read.

First the supervisor and the agents of its workers: the order to an agent, and messages, each of which is one ZeroMQ
frame. An agent is not trusted. Then the supervisor and its helper process that talks to Ray, and at last a model store
and the agents that copy from it.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final, get_args

from protocol import __version__, values
from protocol.codec import pack_body, unpack_body
from protocol.process.worker_spec import EngineSpec, LinkKeys, WorkerSpec, pack_spec, unpack_spec
from protocol.values import Kinds, ReadWith, Then, Unfit, Within, read, reader
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


# What the supervisor and its helper process that talks to Ray tell each other.
#
# A message is one record of a ``helper_link``.


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


# What a model store and the agents that copy from it tell each other.
#
# An agent sends one frame, a msgpack map, and gets one answer with the same ``number``: a map, and behind a ``Chunk``
# a second frame with the bytes. Neither side trusts the other: every value is checked, and a name becomes part of a
# path only if it matches ``NAME``.


CHUNK: Final = 2 << 20
"""The most bytes of a file in one answer."""
WINDOW: Final = 4
"""Chunks that an agent may have asked for and not received yet."""
MAX_REQUEST: Final = 16 << 10
MAX_ANSWER: Final = 4 << 20
MOST_FILES: Final = 2000
"""Files of one directory, its subdirectories included."""
DEEPEST: Final = 4
"""Parts of a file's name: subdirectories, and the file."""
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,199}", re.ASCII)
"""A part of a file's name. It cannot be hidden, and cannot lead to another directory."""
_SUM: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
MOST_BYTES: Final = 1 << 50
Bytes = Annotated[int, Within(0, MOST_BYTES)]


def is_safe(name: str) -> bool:
    """Return whether a file's name may become part of a path."""
    parts = name.split("/")
    return len(parts) <= DEEPEST and all(NAME.fullmatch(part) for part in parts)


@dataclass(frozen=True)
class File:
    """A file of a directory that is copied.

    name    its path in the directory, with "/" between the parts
    size    bytes
    sha256  checksum, in hex
    """

    name: str
    size: int
    sha256: str


def _file(entry: Any) -> File:
    """Return the file of an entry [name, size, sum] of a manifest. Raises ValueError for what cannot be."""
    match entry:
        case [str(name), _, str(_)] if not is_safe(name):
            raise ValueError(f"a file with the name {name[:80]!r}")
        case [str(name), size, str(sha256)] if _SUM.fullmatch(sha256):
            return File(name, reader(Bytes)(size, False), sha256)
    raise ValueError("must be the name, the size and the checksum of a file")


_FILES = list[Annotated[Any, values.ReadWith(_file)]]


@dataclass(frozen=True)
class Manifest:
    """All files of a directory, in the order of their names."""

    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def key(self) -> str:
        """A text of 32 characters that only a directory with the same content has."""
        lines = "".join(f"{file.sha256} {file.size} {file.name}\n" for file in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()[:32]

    def packed(self) -> list[list[Any]]:
        """Return the manifest as a list for a message."""
        return [[file.name, file.size, file.sha256] for file in self.files]

    @staticmethod
    def read(listed: Any) -> "Manifest":
        """Return the manifest that ``packed`` has made. Raises FrameError for names that are not safe, and for all else
        that cannot be."""
        try:
            files: list[File] = reader(_FILES)(listed, False)
        except Unfit as e:
            raise _ANSWERS.wrong(f"a manifest: {e}") from None
        names = [file.name for file in files]
        if not files or len(files) > MOST_FILES or names != sorted(set(names)):
            raise _ANSWERS.wrong(f"a manifest of {len(files)} files, or with names that are not in order")
        above = {name[:at] for name in names for at in range(len(name)) if name[at] == "/"}
        if above & set(names):
            raise _ANSWERS.wrong("a manifest in which a name is a file and a directory")
        return Manifest(tuple(files))


@dataclass(frozen=True)
class AskManifest:
    """Ask for the manifest of a directory."""

    number: int
    directory: str


@dataclass(frozen=True)
class ReadPart:
    """Ask for bytes of a file of the manifest ``key``."""

    number: int
    directory: str
    key: str
    name: str
    offset: Bytes
    size: Annotated[int, Within(1, CHUNK)]


@dataclass(frozen=True)
class Preparing:
    """The manifest is not ready: so many bytes of the directory were read for its checksums."""

    number: int
    done: int
    total: int


@dataclass(frozen=True)
class Listing:
    """The manifest, packed."""

    number: int
    files: list[Any]


@dataclass(frozen=True)
class Chunk:
    """Bytes of a file, in the frame behind this one."""

    number: int
    key: str
    name: str
    offset: int


@dataclass(frozen=True)
class StoreFailure:
    """A request cannot be fulfilled. ``why`` is one line for people."""

    number: int
    why: str


Request = AskManifest | ReadPart
Answer = Preparing | Listing | Chunk | StoreFailure
REQUESTS: Final = Kinds[Request]("a model store and an agent", *get_args(Request))
_ANSWERS: Final = Kinds[Answer]("a model store and an agent", *get_args(Answer))


def read_answer(frames: Sequence[bytes]) -> tuple[Answer, bytes]:
    """Return the message in an answer of a store, and the bytes of a chunk. Raises FrameError."""
    message = _ANSWERS.read(frames[0])
    if len(frames) != 1 + isinstance(message, Chunk):
        raise _ANSWERS.wrong(f"an answer of {len(frames)} frames")
    return message, frames[1] if isinstance(message, Chunk) else b""
