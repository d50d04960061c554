"""The specification with which the supervisor starts a worker process. It is plain data."""

import fcntl
import importlib
import importlib.util
import json
import mmap
import os
import shlex
import sys
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Final, Literal

from protocol.codec import pack_body, unpack_body
from protocol.process.shown import DEFAULT_STYLE, LogStyle
from protocol.values import ReadWith, read

# The progress lease: how a worker shows the supervisor that it makes progress.
#
# The lease is one word in a page of memory that both processes have mapped.
#
# The supervisor reads the word without any help of the worker. So the supervisor notices a worker that is stopped,
# that holds the GIL for ever, or that waits for a GPU kernel that never ends. The thread that loads and steps writes
# the word between its steps. A separate thread would go on writing while the engine hangs.
#
#     bits 63..32  counter, one more with each heartbeat (modulo 2**32)
#     bits 31..28  phase, a number of ``WorkerPhase``
#     bits 27..0   lease in milliseconds: the next heartbeat comes within this time
#
# The processor writes and reads an aligned word whole. So the supervisor never reads half of an old word and half of a
# new one.


PAGE_BYTES = mmap.PAGESIZE
MAX_LEASE_S = 24 * 3600.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class WorkerPhase(IntEnum):
    """The work that the worker is about to do when it writes its lease."""

    STARTING = 0
    """The worker's process has just been started. The supervisor writes this phase."""
    LOADING = 1
    """Importing its engine, reading a part of the weights, or a step of the warm-up."""
    IDLE = 2
    """Waiting for a message, for a fraction of a second."""
    STEP = 3
    """One step of the engine, or the work on one message, such as encoding a prompt."""
    MOVING = 4
    """Going to sleep or waking: copying the weights between the GPU and host memory."""


@dataclass(frozen=True)
class Leases:
    """The longest times until the next heartbeat, in seconds, by phase. Each is from 0.001 to MAX_LEASE_S."""

    start_s: float = 60.0
    load_s: float = 300.0
    idle_s: float = 10.0
    step_s: float = 60.0
    move_s: float = 60.0


DEFAULT_LEASES = Leases()


@dataclass(frozen=True, slots=True)
class Reading:
    """The content of a page when the supervisor read it.

    word   differs from the word of the last reading if and only if there was a heartbeat between (or 2**32 of them)
    phase  None if the page holds something that no worker writes
    """

    word: int
    phase: WorkerPhase | None
    lease_s: float


def read_word(word: int) -> Reading:
    number = word >> 28 & 0xF
    return Reading(word, WorkerPhase(number) if number < len(WorkerPhase) else None, (word & 0xFFFFFFF) / 1000)


def _low_bits(phase: WorkerPhase, lease_s: float) -> int:
    if not 0.001 <= lease_s <= MAX_LEASE_S:
        raise ValueError(f"a lease of {lease_s} s: must be between 1 ms and {MAX_LEASE_S:.0f} s")
    return phase << 28 | round(lease_s * 1000)


class WatchedPage:
    """The supervisor's end of the lease. The worker gets ``descriptor``. The constructor raises OSError.

    The page is a memfd, so it needs no disk, and no file is left after a crash. Its size is sealed. Otherwise a faulty
    worker could make it shorter, and the supervisor would die of SIGBUS when it reads the page.
    """

    def __init__(self, start_s: float) -> None:
        self.descriptor = os.memfd_create("beat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, PAGE_BYTES)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.descriptor, PAGE_BYTES)
        except OSError:
            os.close(self.descriptor)
            raise
        self._words = memoryview(self._map).cast("Q")
        self._words[0] = _low_bits(WorkerPhase.STARTING, start_s)

    def expect(self, start_s: float) -> None:
        """Give the process a new first lease. Call this while it waits, since it writes leases, too."""
        counter = self._words[0] >> 32
        self._words[0] = (counter + 1 & 0xFFFFFFFF) << 32 | _low_bits(WorkerPhase.STARTING, start_s)

    def read(self) -> Reading:
        return read_word(self._words[0])

    def handed_over(self) -> None:
        """Close the descriptor, because the worker has a copy of its own."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        self.handed_over()
        self._words.release()
        self._map.close()


class ProgressLease:
    """The worker's end of the lease. The worker calls a method before each piece of work that cannot be interrupted.

    A call takes a fraction of a microsecond.

    descriptor  the descriptor of the page, which the constructor closes. None if no supervisor watches: heartbeats are
                then written to private memory

    ``words`` and ``step_bits`` are for code that does the work of ``step`` without calling it. Such code adds one to
    the counter in the first word, and sets the other bits of that word to ``step_bits``.
    """

    def __init__(self, leases: Leases = DEFAULT_LEASES, descriptor: int | None = None) -> None:
        if descriptor is None:
            self.words = memoryview(bytearray(8)).cast("Q")
        else:
            self.words = memoryview(mmap.mmap(descriptor, PAGE_BYTES)).cast("Q")
            os.close(descriptor)  # no child of the worker may inherit it. The mapping stays
        self._loading = _low_bits(WorkerPhase.LOADING, leases.load_s)
        self._idle = _low_bits(WorkerPhase.IDLE, leases.idle_s)
        self.step_bits = _low_bits(WorkerPhase.STEP, leases.step_s)
        self._moving = _low_bits(WorkerPhase.MOVING, leases.move_s)

    def loading(self) -> None:
        """Write that a part of the load follows."""
        self._write(self._loading)

    def idle(self) -> None:
        """Write that a wait for messages follows."""
        self._write(self._idle)

    def step(self) -> None:
        """Write that a step of the engine follows, or the work on one message."""
        self._write(self.step_bits)

    def moving(self) -> None:
        """Write that the model is about to go to sleep or to wake."""
        self._write(self._moving)

    def _write(self, bits: int) -> None:
        self.words[0] = ((self.words[0] >> 32) + 1 & 0xFFFFFFFF) << 32 | bits


PAGE_TOKENS = 256
"""Tokens of a page of ExLlamaV2's cache. The package fixes this number."""
DEFAULT_RESERVE_MB = 256
"""MB that ExLlamaV2's automatic split leaves free on each GPU, unless models.yaml sets another value. The memory is for
kernels that are loaded later, cuBLAS, attention and logits."""

OFF: Final = "off"
"""The value of ``tool_format`` and ``reasoning`` for a model that does not call tools, or does not reason."""


@dataclass(frozen=True)
class EngineSpec:
    """The settings that an engine needs to load a model.

    model          name in models.yaml
    engine         "transformers", "exllamav2", "embedding", or an import string "package.module:Class"
    model_dir      absolute path of the model's directory
    device         "cpu", or "cuda" (the worker hides all GPUs but its own before it imports torch)
    max_seq_len    tokens of context, None for the model's own
    max_batch_size requests decoded together
    options        the engine's further keys that models.yaml sets (cache_size, cache_mode, chunk_size, threads, ...).
                   The engine has the defaults of the others
    sleep          whether the model may be put to sleep
    prepare_sleep  whether its first sleep may be prepared while it is idle, which takes host memory
    model_roots    absolute paths of directories into which files of the model's directory may be links
    """

    model: str
    engine: str
    model_dir: str
    device: str = "cpu"
    max_seq_len: int | None = None
    max_batch_size: int = 8
    options: dict[str, Any] = field(default_factory=dict)
    sleep: bool = False
    prepare_sleep: bool = False
    model_roots: tuple[str, ...] = ()


@dataclass(frozen=True)
class LinkKeys:
    """The CURVE keys of one worker's connection over TCP, as Z85 text. They are made for one process, and count until
    it has ended.

    server          the supervisor's public key, which proves the supervisor to the worker
    public, secret  the worker's own keys
    """

    server: str
    public: str
    secret: str = field(repr=False)


def _markers(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


@dataclass(frozen=True)
class WorkerSpec:
    """The settings of one worker process.

    generation      number of this start of the model, from 1; part of every EVENTS frame
    visible_devices value of CUDA_VISIBLE_DEVICES, "" for none
    endpoint        ZeroMQ endpoint of the supervisor's worker socket
    routing_id      unguessable identity of this generation on that socket
    log_path        file that takes the worker's stdout and stderr
    supervisor_pid  the worker ends when this process is no longer its parent: the supervisor, or the agent that
                    started the worker on another machine
    sampling        values for options that requests leave out (``sampling_defaults.DEFAULTS``), checked
    limits          the most that requests may ask for (``sampling_defaults.LIMITS``), checked
    forced          values for all requests, whatever they ask for (``sampling_defaults.FORCED``), checked
    cpus            numbers of the CPUs that the worker may use: those next to its GPUs. Empty: all
    tool_format     name of the format of the model's calls, or OFF; None: the chat template tells
    reasoning       the markers before and behind the model's reasoning, or OFF; None: the chat template tells
    leases          longest times without a heartbeat, by phase
    name            the worker's name for people, such as "letters:2"; empty means the model's name
    log             how the worker writes its log
    masks           texts that the worker must not show → what it shows in their place (``shown.mask``)
    keys            for an endpoint over TCP
    link_lease_s    for an endpoint over TCP: seconds without a sign of the supervisor's machine after which the worker
                    ends, see ``sockets.end_when_silent``
    """

    engine: EngineSpec
    generation: int
    visible_devices: str
    endpoint: str
    routing_id: bytes
    log_path: str
    supervisor_pid: int
    sampling: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    forced: dict[str, Any] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    tool_format: str | None = None
    reasoning: Annotated[tuple[str, str] | Literal["off"] | None, ReadWith(_markers)] = None
    leases: Leases = DEFAULT_LEASES
    name: str = ""
    log: LogStyle = DEFAULT_STYLE
    masks: dict[str, str] = field(default_factory=dict)
    keys: LinkKeys | None = None
    link_lease_s: float = 0.0


def pack_spec(spec: WorkerSpec) -> bytes:
    """Return a specification as bytes, for a process that was started without one."""
    return pack_body(asdict(spec))


def unpack_spec(packed: bytes) -> WorkerSpec:
    """Return the specification that ``pack_spec`` has packed."""
    return read(WorkerSpec, unpack_body(packed))


# Exit codes and the last log line of a worker process. They decide whether the supervisor starts it again.


EXIT_ASKED = 0
"""The supervisor asked the worker to end, or the supervisor itself is gone."""
EXIT_ENGINE_FAULT = 70
"""The engine raised an exception (EX_SOFTWARE). The supervisor starts the worker again."""
EXIT_DISCONNECTED = 71
"""The worker lost its connection while the supervisor lives (EX_OSERR). The supervisor starts the worker again."""
EXIT_AWAY = 74
"""The model's files cannot be read now, for example because their file system is away (EX_IOERR). The supervisor tries
again for as long as that lasts."""
EXIT_CONFIG = 78
"""The model cannot be loaded as configured (EX_CONFIG). The supervisor does not start the worker again by itself."""
LOAD_ERROR_PREFIX = "cannot load: "
"""Prefix of the line that a worker logs when its model cannot be loaded. The supervisor quotes that line as the
reason."""


# The packages that the engines' workers import, and the extras of modelctl that install them.
#
# A plain installation of modelctl has the command line, the clients and the supervisor, without the engines' packages.
# The supervisor uses this module before it spawns a worker, and so does the check of a model. Neither imports the
# packages.


EXTRAS: Final = {"transformers": "embedded", "exllamav2": "exllamav2", "embedding": "embedded"}
"""The extra that installs all packages of an engine."""
READ_TOKENIZERS: Final = ("tokenizers",)
"""Packages that the check of a tokenizer needs. The check of a chat template needs them, too, because the template uses
the tokenizer's special tokens."""
_EVERY: Final = ("torch", *READ_TOKENIZERS, "safetensors", "llguidance", "numpy")
PACKAGES: Final = {
    "transformers": ("transformers", *_EVERY),
    "exllamav2": ("exllamav2", *_EVERY),
    "embedding": ("transformers", *_EVERY),
}
"""The packages that an engine's worker imports, by their import names."""

GATEWAY: Final = ("starlette", "uvicorn", "uvloop", "httptools", "orjson", "prometheus_client")
"""The packages that the HTTP gateway imports. The extra ``gateway`` installs them."""


def missing_for_gateway() -> str | None:
    """Return what to do if packages of the HTTP gateway are not installed, in one line; None if all are installed."""
    missing = not_installed(GATEWAY)
    if not missing:
        return None
    packages = f"package {missing[0]}" if len(missing) == 1 else f"packages {', '.join(missing)}"
    return f"the gateway needs the {packages}: run {install_command('gateway')}"


def missing_for(engine: str) -> str | None:
    """Return what to do if packages of an engine are not installed, in one line. Return None if all are installed.

    engine  the engine in models.yaml. For an import string the result is None, because its packages are not known
    """
    missing = not_installed(PACKAGES.get(engine, ()))
    if not missing:
        return None
    packages = f"package {missing[0]}" if len(missing) == 1 else f"packages {', '.join(missing)}"
    return f"engine {engine} needs the {packages}: run {install_command(EXTRAS[engine])}"


def install_command(extra: str) -> str:
    """Return the command that installs an extra of modelctl for the Python that runs this process."""
    return f"{shlex.quote(sys.executable)} -m pip install 'modelctl[{extra}]'"


def not_installed(packages: tuple[str, ...]) -> list[str]:
    """Return the packages that are not installed."""
    importlib.invalidate_caches()  # a long-lived supervisor sees what was installed a moment ago
    return [name for name in packages if importlib.util.find_spec(name) is None]


# The settings that the supervisor, or the command ``modelctl gateway``, gives a gateway process at its start.


MIB = 1 << 20
ReasoningKey = Literal["reasoning_content", "reasoning"]
ProgressPlace = Literal["comment", "reasoning"]
SHARE: Final = 4
"""One key may use the fourth part of ``body_memory``."""
STORED_ITEMS: Final = 128 * MIB
"""Bytes of responses' items that one gateway process keeps, unless models.yaml says it."""
READY: Final = b"+"
"""The record that a gateway process sends about once a second while it serves."""
TROUBLE: Final = b"!"
"""How the record begins that says why the process cannot serve."""
ENDED: Final = b"-"
"""How the record begins that names a session of the page that was ended (``Session.text``). The other processes get it
as JSON with the key ``ended``."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """The settings of one gateway process. They cross to the process as JSON, so paths are text.

    runtime_dir    directory of the supervisor's sockets; None with ``connect``
    connect        TCP endpoint of a supervisor on another machine; None with ``runtime_dir``
    key_file       the key for ``connect``. It needs the right ``gateway``
    listeners      descriptors of the sockets that the process accepts connections from
    host, port     the address of these sockets
    auth           "keys": every request needs a token (``modelctl keys new NAME --http``). "none": no request needs
                   one, on loopback only
    allowed_hosts  names that a request's Host header may have, besides localhost and the address itself
    cors_origins   origins whose pages may use the API from a browser
    certificate    PEM file of the certificate chain; None for HTTP without TLS
    private_key    PEM file of its private key
    certificate_files  what tells the present content of these files from another, as size, times, inode and device
    max_body       most bytes of a request's body
    body_memory    most bytes of all bodies together that the process holds at one time; None for 256 MiB, or room for
                   four of the largest bodies if that is more
    body_s         seconds in which a whole body must come
    body_pace_s    seconds in which each 160 KiB of a body must come, unless the body ends
    keepalive      what keeps a silent stream open: an SSE "comment", an empty "chunk", or "off"
    keepalive_s    seconds of silence after which that is sent
    progress       where a streamed chat tells of the load of its model: in an SSE "comment" only, or in its "reasoning"
    reasoning_key  the key of a chat's reasoning in messages and deltas
    unknown_options  "ignore": options that nobody knows are ignored, and the answer says so. "refuse": they are errors
    stored_items   most bytes of responses' items that the process keeps in memory; 0 keeps none
    seal_secret    secret that encrypts the reasoning of responses, 32 bytes in hex; the same for all
                   gateways of one supervisor
    cookie_secret  secret of the cookies' signatures, in hex; processes that share a port share it
    ended_sessions  the sessions of the page that were ended before the process began (``EndedSessions.texts``)
    parent         pid of the process that started this one, and with which it ends; None to live on
    masks          texts that the process must not show → what it shows in their place (``shown.mask``)
    log            path of the process's log; None to write to standard error
    log_style      how the log is written at first. Records of ``LogStyle.to_json`` after the settings change it
    """

    runtime_dir: str | None = None
    connect: str | None = None
    key_file: str | None = None
    listeners: tuple[int, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    auth: Literal["keys", "none"] = "keys"
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    certificate: str | None = None
    private_key: str | None = None
    certificate_files: tuple[tuple[int, int, int, int] | None, ...] = ()
    max_body: int = 16 * MIB
    body_memory: int | None = None
    body_s: float = 60.0
    body_pace_s: float = 10.0
    keepalive: Literal["comment", "chunk", "off"] = "comment"
    keepalive_s: float = 10.0
    progress: ProgressPlace = "comment"
    reasoning_key: ReasoningKey = "reasoning_content"
    unknown_options: Literal["ignore", "refuse"] = "ignore"
    stored_items: int = STORED_ITEMS
    seal_secret: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)
    cookie_secret: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)
    ended_sessions: tuple[str, ...] = ()
    parent: int | None = None
    masks: dict[str, str] = field(default_factory=dict, compare=False)
    log: str | None = None
    log_style: LogStyle = DEFAULT_STYLE

    def to_json(self) -> bytes:
        """Return the settings as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "GatewaySettings":
        """Return the settings in JSON that ``to_json`` made."""
        given: dict[str, Any] = json.loads(text)
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**(given | lists | {"log_style": LogStyle(**given["log_style"])}))
