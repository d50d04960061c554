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
    """The section ``gateway``. With it the supervisor starts a gateway, which serves OpenAI's API over HTTP.

    A reload applies changes: new processes take the connections, and the old processes complete their answers.
    """

    listen: GatewayListen = field(default_factory=lambda: Address("127.0.0.1", DEFAULT_PORT))
    """Address and port of the gateway. Either may be left out.

    Example: 0.0.0.0:8000
    """
    auth: Literal["keys", "none"] = "keys"
    """Authentication of requests. ``keys``: every request needs a token (``modelctl keys new NAME --http`` makes one).
    ``none``: no request needs a token. Then everybody who can reach the port may use and stop the models. So with
    ``none`` the gateway may listen only on an address of this machine (127.0.0.1 or [::1]).

    Example: none
    """
    processes: Annotated[int, Within(1, 64)] = 1
    """Number of gateway processes that share the port. One process serves about a thousand streams.

    Example: 4
    """
    allowed_hosts: list[HostName] = field(default_factory=list)
    """Names by which clients may call the gateway, besides localhost and the address itself. A request with another
    name in its Host header is refused. So a web page cannot reach the gateway by a name of its own.

    Example: [models.example.org]
    """
    cors_origins: list[Origin] = field(default_factory=list)
    """Origins of web pages that may use the API from a browser.

    Example: [https://chat.example.org]
    """
    certificate: UserPath | None = None
    """PEM file of the certificate chain, for HTTPS: absolute, or relative to models.yaml.

    Default: plain HTTP
    Example: ~/tls/fullchain.pem
    """
    private_key: UserPath | None = None
    """PEM file of the certificate's private key: absolute, or relative to models.yaml.

    Default: plain HTTP
    Example: ~/tls/privkey.pem
    """
    max_body: Size = 16 << 20
    """Largest body of a request, in bytes or as a size.

    Example: 64MiB
    """
    body_memory: OptionalSize = None
    """Most bytes of all bodies together that one gateway process holds at one time. A body counts from its first byte
    until the supervisor has read the request, with the memory of what the gateway makes of it. One key may use a
    quarter of the bytes, so that four bodies of ``max_body`` must fit. With ``auth: none`` one body must fit.

    Default: 256MiB, or four times max_body if that is more
    Example: 1GiB
    """
    stored_items: Annotated[int | None, ReadWith(parse_stored, "size or 0")] = None
    """Most bytes of items of /v1/responses that the gateway keeps in its memory, for clients that refer to earlier
    items and responses. They are kept for an hour at most, and never on disk. One key may use an eighth of them. 0
    keeps nothing. With several ``processes`` nothing is kept: a client's next request may reach another process.

    Default: 128MiB, or 0 with several processes
    Example: 0
    """
    keepalive: Literal["comment", "chunk", "off"] = "comment"
    """Sign of life on a stream that was silent for ten seconds. ``comment``: a comment of server-sent events, which
    says what the request waits for. ``chunk``: a chunk without text, for clients that fail at comments. ``off``: none.

    Example: chunk
    """
    progress: ProgressPlace = "comment"
    """Where a stream of /v1/chat/completions tells of the load of its model. ``comment``: in the comments of
    ``keepalive`` only. ``reasoning``: besides, in short lines of reasoning before the answer, for chat programs that
    hide comments.

    Example: reasoning
    """
    reasoning_key: ReasoningKey = "reasoning_content"
    """Key of the reasoning in the messages and deltas of /v1/chat/completions. Most clients read
    ``reasoning_content``; clients of newer versions of vLLM and of OpenRouter read ``reasoning``.

    Example: reasoning
    """
    unknown_options: Literal["ignore", "refuse"] = "ignore"
    """What happens to options of a request that no API has. ``ignore``: they are ignored, and the header
    ``x-modelctl-ignored`` of the answer names them. ``refuse``: they are errors.

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
    """The rules by which the supervisor restarts a model whose worker ended unexpectedly, and gives up."""

    limit: Annotated[int, Within(1, 1000)] = _RESTART.limit
    """Unexpected ends within the window after which the model is ``failed``. An operator has to start it again.

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
    """Longest pause before a restart. Up to a fifth is added at random.

    Example: 1m
    """


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """The longest time of each step of stopping a worker. After that time the supervisor takes the next step."""

    drain: Duration = 30.0
    """Time for running requests to finish, before the worker is told to end.

    Example: 2m
    """
    shutdown: Duration = PATIENT.shutdown_s
    """Time for the worker to end by itself after it was told to, before it gets SIGTERM.

    Example: 10s
    """
    sigterm: Duration = PATIENT.sigterm_s
    """Time between SIGTERM and SIGKILL.

    Example: 5s
    """


_POISON = PoisonPolicy()


@dataclass(frozen=True, kw_only=True)
class PoisonConfig:
    """The rule by which the supervisor refuses a request because the workers that compute it die."""

    limit: Annotated[int, Within(1, 1000)] = _POISON.limit
    """Deaths of workers that are blamed on a request, after which it ends as ``poisoned``.

    A death is blamed on the only request that the worker computed, or on the request that is on probation. A death
    with several requests in the worker puts each of them on probation, and is blamed on none.

    Example: 3
    """
    window: Duration = _POISON.window_s
    """Time after the last death for which a request, and every request with the same payload, is remembered.

    Example: 1h
    """


_WATCH = DEFAULT_LEASES


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """The longest time that a worker may show no progress. After that time the supervisor kills it as hung.

    A reload changes these times for workers that are started after it.
    """

    start: Lease = _WATCH.start_s
    """Longest time from the start of the process to the first line of the worker's own code.

    Example: 2m
    """
    load: Lease = _WATCH.load_s
    """Longest time for one part of a load: the import of the engine, a module of the weights, or a warm-up step.

    The whole load may take longer.

    Example: 10m
    """
    idle: Lease = _WATCH.idle_s
    """Longest time while the worker has nothing to compute. An idle worker shows progress five times a second.

    Example: 30s
    """
    step: Lease = _WATCH.step_s
    """Longest time for one step of the engine: one chunk of a prompt (chunk_size) and one token of each answer.

    The whole prompt may take longer. The encoding of one prompt counts as a step, too.

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
    """Count the tokens of requests, and keep the counts in a file. A full or broken disk never refuses a request.

    Example: false
    """
    file: UserPath | None = None
    """The SQLite file with the counts: absolute, or relative to models.yaml. Two supervisors cannot share one.

    Default: usage.sqlite3 beside the directory of the logs
    Example: /var/lib/modelctl/usage.sqlite3
    """
    keep: Days = 400
    """Days that are kept, today included. A day begins at midnight UTC. Older days are deleted once they have been too
    old for 24 hours of the supervisor's running time, so that a clock that jumps deletes nothing.

    Example: 90d
    """


_HELD = SendBufferLimits()


@dataclass(frozen=True, kw_only=True)
class HeldConfig:
    """The most bytes of answers that wait in the supervisor for clients that read slowly.

    Above a limit one stream ends as ``slow_consumer``: of the streams under this limit, the one that holds most. A
    token takes about 28 bytes, and 120 bytes with five log-probabilities. A reload applies changes at once.
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
    """Bytes that may wait for all clients together. The supervisor may grow by about this much memory.

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
    """The least level of the lines in the logs of the supervisor, the workers and the gateway: ``debug``, ``info``,
    ``warning`` or ``error``.

    ``modelctl log-level`` changes it until the supervisor ends. A reload that changes this key applies it to all logs.

    Example: debug
    """
    log_format: Format = "human"
    """How these logs are written, and what `serve` prints: lines for people, or ``json`` for one JSON object in a line.

    Example: json
    """
    model_roots: list[UserPath] | None = field(default=None, metadata=LATER)
    """Directories into which the files of models' directories may be links: absolute, or relative to models.yaml.
    Weights may be links to other places, too, see [Security](security.md#linked-files). Changed roots apply to workers
    that are started from now on.

    Default: files may be links into the model's own directory and Hugging Face's cache only
    Example: [/mnt/disk2/models]
    """
    request_log: UserPath | None = None
    """File that gets a line of JSON for each request that ends: absolute, or relative to models.yaml. No line has texts
    of prompts or answers.

    Default: no request log is written
    Example: /var/log/modelctl/requests.jsonl
    """
    listen: Listen = field(default=None, metadata=AT_START)
    """TCP endpoint for clients with a key (``modelctl keys new``). A change takes a restart of the supervisor.

    Default: the supervisor listens on no port
    Example: tcp://192.168.1.5:5570
    """
    keys: UserPath | None = field(default=None, metadata=AT_START)
    """Directory of the keys: absolute, or relative to models.yaml. A change takes a restart of the supervisor.

    Default: $MODELCTL_KEYS, else ~/.config/modelctl/keys
    Example: ~/.config/modelctl/keys
    """
    stall: Duration = SendBufferLimits.stall_s
    """Longest time that events of a stream may wait while its client reads none. After it, the stream ends as
    ``slow_consumer``.

    Example: 2m
    """
    vram_limit: VramLimit = field(default=None, metadata=LATER)
    """Most memory of a GPU that all models together may take: one limit for every GPU, or a map from GPU to limit.

    One limit for every GPU holds on all machines of a cluster. In a map, an index means a GPU of the supervisor's own
    machine, and a UUID a GPU of any machine.

    Default: no limit
    Example: {0: 20GiB, 1: 90%}
    """

    host_memory: HostMemory = None
    """Most host memory that the models may take that sleep, or that keep a copy of their weights there.

    When another model is to sleep, and this would be too much, those that have slept longest are unloaded.

    Default: half of the memory that the machine and its cgroup have free when the supervisor starts
    Example: 64GiB
    """

    spare: Annotated[int, Within(0, 1)] = 1
    """Spare workers for each engine: processes that have imported PyTorch and wait for a model, without GPU memory.

    A start, and a restart after a death, then take some seconds less. Each holds some hundred MiB of host memory. With
    a `cluster`, other machines with GPUs have them too, for the models that may run there.

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
    """One group of models, an entry of the map ``groups``. A model may be in several groups.

    A request for a model of a full group first makes an idle model of the group leave, as a request for memory does.
    """

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

    A process beside the supervisor sends the directories, with checksums, to the machines whose workers need them.
    """

    listen: Listen = None
    """TCP endpoint of that process: an address of this machine that the other machines can reach.

    Default: no directories are copied
    Example: tcp://192.168.1.5:5572
    """
    directory: str = "~/.cache/modelctl/models"
    """Directory on the other machines for the copies. ``~`` is the home of the user who runs Ray there.

    Example: /var/cache/modelctl
    """
    size: StoreSize = 200 << 30
    """Bytes that all copies on a machine may have together. The copy that was used longest ago makes room. One that a
    worker uses is never removed.

    Example: 500GiB
    """


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The section ``cluster``: workers on other machines, which a Ray cluster provides. Without it there are none.

    A change takes a restart of the supervisor.
    """

    advertise: Listen = None
    """TCP endpoint to which workers on other machines connect: an address of this machine that they can reach.

    Default: required
    Example: tcp://192.168.1.5:5571
    """
    ray: str = "auto"
    """Address of the cluster, as Ray takes it. ``auto`` is the cluster that this machine belongs to.

    Example: 192.168.1.5:6379
    """
    model_store: ModelStoreConfig = field(default_factory=ModelStoreConfig)
    lease: Lease = 10.0
    """Time without a sign of life after which a machine counts as lost. Its workers end themselves after the same time,
    counted by them.

    Example: 30s
    """


@dataclass(frozen=True, kw_only=True)
class FolderConfig:
    """One folder, an entry of the list ``folders``. A path alone stands for a folder without ``defaults``."""

    path: UserPath
    """The directory: absolute, or relative to models.yaml. Models may lie at any depth below it.

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

    A model's own key wins, also with the value ``null``. The maps ``sampling``, ``forced``, ``limits``, ``variants``,
    ``template_kwargs`` and ``options`` are merged by their keys, so a model replaces single options. A key that a
    model's engine does not know does not apply to that model. A key that is for lazy models applies to lazy models
    only. A default wins over the model's ``tabby_config.yml``. `modelctl config` shows what each model gets, and from
    which line.

    Default: none
    Example: {gpu: auto, lazy: true, ttl: 10m, sampling: {temperature: 0.7}}
    """
    default_model: str | None = None
    """Name of the model for requests that name none: a model, an alias, or a variant. A request that names an unknown
    model is refused all the same.

    Default: a request without a model is refused
    Example: qwen
    """
    folders: list[FolderConfig] = field(default_factory=list)
    """Directories whose models are served without an entry of their own, see
    [Models of a folder](operate.md#models-of-a-folder). A path, or a list of paths and maps. With folders,
    ``models`` may be left out.

    Example: [{path: /data/models, defaults: {cache_mode: Q8, ttl: 10m}}]
    """
    groups: dict[str, GroupConfig] = field(default_factory=dict)
    """Groups of models, of which a limited number is loaded at once. To let one model never be loaded beside another
    one, make a group of these two.

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
