"""The specification with which the supervisor starts a worker process. It is plain data."""

from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from protocol.codec import pack_body, unpack_body
from protocol.process.log_style import DEFAULT_STYLE, LogStyle
from protocol.process.progress_lease import DEFAULT_LEASES, Leases

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
    engine         "transformers", "exllamav2", or an import string "package.module:Class"
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
    masks           texts that the worker must not show → what it shows in their place (``masking``)
    keys            for an endpoint over TCP
    link_lease_s    for an endpoint over TCP: seconds without a sign of the supervisor's machine after which the worker
                    ends, see ``silent_links``
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
    reasoning: tuple[str, str] | Literal["off"] | None = None
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
    fields = unpack_body(packed)
    fields["engine"]["model_roots"] = tuple(fields["engine"]["model_roots"])
    fields["engine"], fields["leases"] = EngineSpec(**fields["engine"]), Leases(**fields["leases"])
    fields["log"] = LogStyle(**fields["log"])
    fields["cpus"] = tuple(fields["cpus"])
    fields["keys"] = fields["keys"] and LinkKeys(**fields["keys"])
    if isinstance(fields["reasoning"], list):
        start, end = fields["reasoning"]
        fields["reasoning"] = start, end
    return WorkerSpec(**fields)
