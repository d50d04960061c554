"""The keys of models.yaml outside of ``models``, and the whole file. ``supervisor.config.file`` interprets them.

``supervisor.config.models`` has the keys of a model, and describes how the text below each key is read.
"""

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from protocol.process.shown import Format, Level, LogStyle
from protocol.process.sockets import parse_authority, written_origin
from protocol.process.worker_spec import DEFAULT_LEASES, SHARE, Leases, ProgressPlace, ReasoningKey
from protocol.values import ReadWith, Within
from supervisor.config.models import AT_START, LATER, ModelConfig, marked
from supervisor.config.reading import (
    Days,
    Duration,
    HeldSize,
    HostMemory,
    Lease,
    Listen,
    StoreSize,
    UserPath,
    VramLimit,
)
from supervisor.config.spelling import parse_size
from supervisor.requests.credit import SendBufferLimits
from supervisor.requests.poison import PoisonPolicy
from supervisor.workers.life import PATIENT, LadderTimes, RestartPolicy

# The keys of the section ``gateway`` of models.yaml. ``supervisor.config.file`` interprets them.


DEFAULT_PORT = 8000
_LISTEN = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+))(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an HTTP port. ``host`` is an IP address without brackets."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(value: object) -> Address:
    """Return the address of ``127.0.0.1:8000``, ``[::1]:8000``, ``localhost`` or a port alone. Raises ValueError."""
    host, port = "127.0.0.1", str(value)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(_MUST_BE)
    if isinstance(value, str) and (match := _LISTEN.fullmatch(value)):
        host, port = match[1] or match[2], match[3] or str(DEFAULT_PORT)
        if match[2] and match[2].isdecimal() and match[3] is None:
            host, port = "127.0.0.1", match[2]
    if host == "localhost":
        host = "127.0.0.1"
    try:
        ipaddress.ip_address(host)
        number = int(port)
    except ValueError:
        raise ValueError(_MUST_BE) from None
    if not 1 <= number <= 65535:
        raise ValueError(_MUST_BE)
    return Address(host, number)


_MUST_BE = "must be ADDRESS:PORT such as 127.0.0.1:8000, 0.0.0.0:8000 or [::1]:8000"


def parse_host(value: object) -> str:
    """Return a host name as the Host header has it, without a port. Raises ValueError."""
    found = parse_authority(value) if isinstance(value, str) else None
    if found is None or ":" in str(value):
        raise ValueError(f"must be a host name without a port, such as models.example.org{_ascii_hint(value)}")
    return found[0]


def parse_origin(value: object) -> str:
    """Return an origin as browsers send it. Raises ValueError."""
    origin = written_origin(value) if isinstance(value, str) else None
    if origin is None:
        raise ValueError(f"must be an origin such as https://chat.example.org, without a path{_ascii_hint(value)}")
    return origin


def _ascii_hint(value: object) -> str:
    return (
        "" if str(value).isascii() else "; write an international name as browsers send it, such as xn--mnchen-3ya.de"
    )


def parse_stored(value: object) -> int:
    """Return the bytes of a size, or 0. Raises ValueError."""
    return 0 if type(value) is int and value == 0 else parse_size(value)


GatewayListen = Annotated[Address, ReadWith(parse_address, "ADDRESS:PORT")]
HostName = Annotated[str, ReadWith(parse_host, "host name")]
Origin = Annotated[str, ReadWith(parse_origin, "origin")]
Size = Annotated[int, ReadWith(parse_size, "size")]
OptionalSize = Annotated[int | None, ReadWith(parse_size, "size")]


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """The section ``gateway``. With it the supervisor starts a gateway, which serves OpenAI's API over HTTP."""

    listen: GatewayListen = field(default_factory=lambda: Address("127.0.0.1", DEFAULT_PORT))
    """Address and port of the gateway. Either may be left out.

    Example: 0.0.0.0:8000
    """
    auth: Literal["keys", "none"] = "keys"
    """``keys``: every request needs a token (``modelctl keys new NAME --http`` makes one). ``none``: everybody who can
    reach the port may use and stop the models, so ``listen`` must be 127.0.0.1 or [::1].

    Example: none
    """
    processes: Annotated[int, Within(1, 64)] = 1
    """Gateway processes that share the port. One serves about a thousand streams.

    Example: 4
    """
    allowed_hosts: list[HostName] = field(default_factory=list)
    """Names by which clients may call the gateway (header Host), besides localhost and the address itself.

    Example: [models.example.org]
    """
    cors_origins: list[Origin] = field(default_factory=list)
    """Origins of web pages that may use the API from a browser.

    Example: [https://chat.example.org]
    """
    certificate: UserPath | None = None
    """PEM file of the certificate chain, for HTTPS.

    Default: plain HTTP
    Example: ~/tls/fullchain.pem
    """
    private_key: UserPath | None = None
    """PEM file of the certificate's private key.

    Default: plain HTTP
    Example: ~/tls/privkey.pem
    """
    max_body: Size = 16 << 20
    """Largest body of a request.

    Example: 64MiB
    """
    body_memory: OptionalSize = None
    """Most bytes of all bodies that one gateway process holds. One key may use a quarter, so four bodies of
    ``max_body`` must fit. With ``auth: none`` one body must fit.

    Default: 256MiB, or four times max_body if that is more
    Example: 1GiB
    """
    stored_items: Annotated[int | None, ReadWith(parse_stored, "size or 0")] = None
    """Most bytes of items of /v1/responses that the gateway keeps in its memory for an hour. One key may use an eighth.
    0 keeps nothing.

    Default: 128MiB, or 0 with several processes
    Example: 0
    """
    keepalive: Literal["comment", "chunk", "off"] = "comment"
    """Sign of life on a stream that was silent for ten seconds. ``comment``: a comment of server-sent events.
    ``chunk``: a chunk without text, for clients that fail at comments. ``off``: none.

    Example: chunk
    """
    progress: ProgressPlace = "comment"
    """Where a stream of /v1/chat/completions tells of the load of its model: in the comments of ``keepalive``, or also
    in lines of ``reasoning`` before the answer.

    Example: reasoning
    """
    reasoning_key: ReasoningKey = "reasoning_content"
    """Key of the reasoning in /v1/chat/completions. Most clients read ``reasoning_content``; those of newer vLLM and of
    OpenRouter read ``reasoning``.

    Example: reasoning
    """
    unknown_options: Literal["ignore", "refuse"] = "ignore"
    """Unknown options of a request. ``ignore``: the header ``x-modelctl-ignored`` of the answer names them. ``refuse``:
    they are errors.

    Example: refuse
    """


def gateway_problems(config: GatewayConfig) -> list[tuple[str, str]]:
    """Return (key, message) for each combination of keys that cannot work."""
    problems: list[tuple[str, str]] = []
    if config.auth == "none" and not config.listen.is_loopback:
        reach = f"is none, and the gateway listens on {config.listen}, which other machines can reach"
        problems.append(("auth", f"{reach}: use auth: keys, or listen on 127.0.0.1"))
    bodies = 1 if config.auth == "none" else SHARE
    if config.body_memory is not None and bodies * config.max_body > config.body_memory:
        message = f"is {config.body_memory} bytes: must be at least {bodies} times max_body, {bodies * config.max_body}"
        problems.append(("body_memory", f"{message}, or max_body smaller"))
    if config.stored_items and config.processes > 1:
        message = f"is {config.stored_items} bytes with {config.processes} processes, which do not share what they keep"
        problems.append(("stored_items", f"{message}: use processes: 1, or stored_items: 0"))
    if (config.certificate is None) != (config.private_key is None):
        key, other = "certificate", "private_key"
        if config.certificate is None:
            key, other = other, key
        problems.append((key, f"needs {other}, too"))
    return problems


_RESTART = RestartPolicy()


@dataclass(frozen=True, kw_only=True)
class RestartConfig:
    """How the supervisor restarts a model whose worker ended unexpectedly, and when it gives up."""

    limit: Annotated[int, Within(1, 1000)] = _RESTART.limit
    """Unexpected ends within the window after which the model is ``failed``.

    Example: 10
    """
    window: Duration = _RESTART.window_s
    """Length of the sliding window in which unexpected ends are counted.

    Example: 5m
    """
    initial: Duration = _RESTART.initial_s
    """Pause before the second restart. The first restart has no pause, and each later pause is twice as long.

    Example: 1s
    """
    max: Duration = _RESTART.max_s
    """Longest pause before a restart.

    Example: 1m
    """


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """The longest time of each step of stopping a worker."""

    drain: Duration = 30.0
    """Time for running requests to finish.

    Example: 2m
    """
    shutdown: Duration = PATIENT.shutdown_s
    """Time for the worker to end by itself, before it gets SIGTERM.

    Example: 10s
    """
    sigterm: Duration = PATIENT.sigterm_s
    """Time between SIGTERM and SIGKILL.

    Example: 5s
    """


_POISON = PoisonPolicy()


@dataclass(frozen=True, kw_only=True)
class PoisonConfig:
    """When the supervisor refuses a request because the workers that compute it die."""

    limit: Annotated[int, Within(1, 1000)] = _POISON.limit
    """Deaths of workers that are blamed on a request, after which it ends as ``poisoned``.

    A death with several requests in the worker is blamed on none of them; each is then tried alone.

    Example: 3
    """
    window: Duration = _POISON.window_s
    """Time after the last death for which a request is remembered.

    Example: 1h
    """


_WATCH = DEFAULT_LEASES


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """The longest time that a worker may show no progress before the supervisor kills it as hung."""

    start: Lease = _WATCH.start_s
    """Longest time from the start of the process to the first line of the worker's own code.

    Example: 2m
    """
    load: Lease = _WATCH.load_s
    """Longest time for one part of a load: the import of the engine, a module of the weights, or a warm-up step.

    Example: 10m
    """
    idle: Lease = _WATCH.idle_s
    """Longest time while the worker has nothing to compute.

    Example: 30s
    """
    step: Lease = _WATCH.step_s
    """Longest time for one step of the engine: one chunk of a prompt (chunk_size) and one token of each answer.

    Example: 2m
    """
    move: Lease = _WATCH.move_s
    """Longest time for one move of a model between GPU memory and host memory, when it goes to sleep or wakes.

    Example: 2m
    """


@dataclass(frozen=True, kw_only=True)
class UsageConfig:
    """The ledger of usage: requests and tokens by key, model and day. A change takes a restart of the supervisor."""

    record: bool = True
    """Count the tokens of requests, and keep the counts in a file. A full or broken disk refuses no request.

    Example: false
    """
    file: UserPath | None = None
    """The SQLite file with the counts. Two supervisors cannot share one.

    Default: usage.sqlite3 beside the directory of the logs
    Example: /var/lib/modelctl/usage.sqlite3
    """
    keep: Days = 400
    """Days that are kept, today included. Older days are deleted after 24 hours of running.

    Example: 90d
    """


_HELD = SendBufferLimits()


@dataclass(frozen=True, kw_only=True)
class HeldConfig:
    """The most bytes of answers that wait for clients that read slowly.

    Above a limit the stream that holds most ends as ``slow_consumer``. [Slow readers](http-api.md#slow-readers) says
    how to choose them.
    """

    stream: HeldSize = _HELD.of_stream
    """Bytes that may wait for one stream.

    Example: 4MiB
    """
    client: HeldSize = _HELD.of_party
    """Bytes that may wait for all streams of one client: a connection, or a key with all its connections.

    Example: 64MiB
    """
    all: HeldSize = _HELD.of_all
    """Bytes that may wait for all clients together.

    Example: 256MiB
    """


@dataclass(frozen=True, kw_only=True)
class SupervisorConfig:
    """The section ``supervisor``. It may be left out."""

    restart: RestartConfig = field(default_factory=RestartConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    poison: PoisonConfig = field(default_factory=PoisonConfig)
    watch: WatchConfig = field(default_factory=WatchConfig, metadata=LATER)
    usage: UsageConfig = field(default_factory=UsageConfig, metadata=AT_START)
    held: HeldConfig = field(default_factory=HeldConfig)
    log_level: Level = "info"
    """The least level of the lines in the logs of the supervisor, the workers and the gateway.

    ``modelctl log-level`` changes it until the supervisor ends.

    Example: debug
    """
    log_format: Format = "human"
    """How these logs are written: lines for people, or one JSON object in a line.

    Example: json
    """
    model_roots: list[UserPath] | None = field(default=None, metadata=LATER)
    """Directories into which the files of models' directories [may be links](security.md#linked-files).

    Default: files may be links into the model's own directory and Hugging Face's cache only
    Example: [/mnt/disk2/models]
    """
    request_log: UserPath | None = None
    """File that gets a [line of JSON](operate.md#the-request-log) for each request that ends.

    Default: no request log is written
    Example: /var/log/modelctl/requests.jsonl
    """
    listen: Listen = field(default=None, metadata=AT_START)
    """TCP endpoint for [clients with a key](security.md#open-a-port). A change takes a restart of the supervisor.

    Default: the supervisor listens on no port
    Example: tcp://192.168.1.5:5570
    """
    keys: UserPath | None = field(default=None, metadata=AT_START)
    """Directory of the keys. A change takes a restart of the supervisor.

    Default: $MODELCTL_KEYS, else ~/.config/modelctl/keys
    Example: ~/.config/modelctl/keys
    """
    stall: Duration = SendBufferLimits.stall_s
    """Longest time that events of a stream wait for a client that reads none. Then it ends as ``slow_consumer``.

    Example: 2m
    """
    vram_limit: VramLimit = field(default=None, metadata=LATER)
    """Most memory of a GPU that all models together may take: one limit for every GPU, or a map.

    There an index means a GPU of the supervisor's machine, and a UUID one of any machine.

    Default: no limit
    Example: {0: 20GiB, 1: 90%}
    """

    host_memory: HostMemory = None
    """Most host memory of the models that sleep, or keep a copy of their weights there. Beyond it, those that have
    slept longest are unloaded.

    Default: half of the memory that the machine and its cgroup have free when the supervisor starts
    Example: 64GiB
    """

    spare: Annotated[int, Within(0, 1)] = 1
    """[Spare workers](operate.md#deaths-and-hangs) for each engine. A start then takes some seconds less. Each holds
    some hundred MiB of host memory.

    Example: 0
    """

    @property
    def log_style(self) -> LogStyle:
        return LogStyle(self.log_level, self.log_format)

    @property
    def restart_policy(self) -> RestartPolicy:
        r = self.restart
        return RestartPolicy(limit=r.limit, window_s=r.window, initial_s=r.initial, max_s=r.max)

    @property
    def poison_policy(self) -> PoisonPolicy:
        return PoisonPolicy(limit=self.poison.limit, window_s=self.poison.window)

    @property
    def hold_limits(self) -> SendBufferLimits:
        h = self.held
        return SendBufferLimits(of_stream=h.stream, of_party=h.client, of_all=h.all, stall_s=self.stall)

    def leases(self, model: ModelConfig) -> Leases:
        """Return the leases of a model's workers."""
        w = self.watch
        return Leases(
            start_s=w.start,
            load_s=model.load_timeout or w.load,
            idle_s=w.idle,
            step_s=model.step_timeout or w.step,
            move_s=w.move,
        )

    @property
    def ladder(self) -> LadderTimes:
        return LadderTimes(shutdown_s=self.stop.shutdown, sigterm_s=self.stop.sigterm)


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """One group of models, an entry of the map ``groups``. A model may be in several groups."""

    models: list[str]
    """The models of the group, by their names in this file.

    Example: [qwen-coder, deepseek-coder]
    """
    loaded: Annotated[int, Within(1, 1000)] = 1
    """Models of the group that may be loaded at once. A model with several workers counts once.

    Example: 2
    """


@dataclass(frozen=True, kw_only=True)
class ModelStoreConfig:
    """Copying of model directories to the machines of the cluster. Without ``listen`` each directory must have the same
    path on all machines.
    """

    listen: Listen = None
    """TCP endpoint of this machine that the other machines can reach.

    Default: no directories are copied
    Example: tcp://192.168.1.5:5572
    """
    directory: str = "~/.cache/modelctl/models"
    """Directory on the other machines for the copies. ``~`` is the home of the user who runs Ray there.

    Example: /var/cache/modelctl
    """
    size: StoreSize = 200 << 30
    """Bytes that all copies on a machine may have together. The copy that was used longest ago makes room.

    Example: 500GiB
    """


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The section ``cluster``: workers on other machines, which a Ray cluster provides. Without it there are none.

    A change takes a restart of the supervisor.
    """

    advertise: Listen = None
    """TCP endpoint of this machine that workers on other machines can reach.

    Default: required
    Example: tcp://192.168.1.5:5571
    """
    ray: str = "auto"
    """Address of the cluster, as Ray takes it. ``auto`` is the cluster that this machine belongs to.

    Example: 192.168.1.5:6379
    """
    model_store: ModelStoreConfig = field(default_factory=ModelStoreConfig)
    lease: Lease = 10.0
    """Time without a sign of life after which a machine counts as lost. Its workers end themselves after the same time.

    Example: 30s
    """


@dataclass(frozen=True, kw_only=True)
class FolderConfig:
    """One folder, an entry of the list ``folders``. A path alone stands for a folder without ``defaults``."""

    path: UserPath
    """The directory. Models may lie at any depth below it.

    Example: /data/models
    """
    defaults: dict[str, Any] | None = None
    """Keys for each model of the folder: any [key of a model](#keys-of-a-model) but model_dir, aliases and description.
    They win over the file's [`defaults`](#defaults). A model of a folder is always lazy.

    Default: none
    Example: {cache_mode: Q8, ttl: 10m}
    """


@dataclass(frozen=True, kw_only=True)
class FileConfig:
    """Keys of the whole file, beside ``models`` and the sections."""

    models: dict[str, ModelConfig]
    defaults: dict[str, Any] | None = None
    """Keys for all models: any [key of a model](#keys-of-a-model) but model_dir, aliases and description.

    A model's own key wins; ``null`` there stands for the default of the key. The maps ``sampling``, ``forced``,
    ``limits``, ``variants``, ``template_kwargs`` and ``options`` are merged by their keys. A key applies to the models
    that may have it.

    Default: none
    Example: {gpu: auto, lazy: true, ttl: 10m, sampling: {temperature: 0.7}}
    """
    default_model: str | None = None
    """Name of the model for requests that name none: a model, an alias, or a variant.

    Default: a request without a model is refused
    Example: qwen
    """
    folders: list[FolderConfig] = field(default_factory=list)
    """Directories whose models are served without an entry of their own, see
    [Models of a folder](operate.md#models-of-a-folder). A path, or a list of paths and maps.

    Example: [{path: /data/models, defaults: {cache_mode: Q8, ttl: 10m}}]
    """
    groups: dict[str, GroupConfig] = field(default_factory=dict)
    """[Groups of models](operate.md#groups-of-models), of which a limited number is loaded at once.

    Example: {coders: {models: [qwen, deepseek], loaded: 1}}
    """
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    gateway: GatewayConfig | None = None
    cluster: ClusterConfig | None = field(default=None, metadata=AT_START)


FIXED_KEYS: Final = marked(SupervisorConfig, "at_start")
FIXED_SECTIONS: Final = marked(FileConfig, "at_start")
_FIXED: Final = (*(f"supervisor.{key}" for key in FIXED_KEYS), *(f"the section {name}" for name in FIXED_SECTIONS))
FIXED_CHANGED: Final = (
    f"{', '.join(_FIXED[:-1])} and {_FIXED[-1]} are applied at the next start only: put them back as they were, or "
    "shut down and serve again"
)
