"""The results of the verbs of CALL, also those in ``protocol.activity``.

``protocol.verbs`` names the class of each verb. Only the documentation and tests import it: the supervisor and the
clients would start more slowly.
"""

from typing import Annotated, Any, NotRequired, TypedDict

from protocol.activity import (  # noqa: F401
    ConfigResult,
    EndedRequestsResult,
    EventsResult,
    LogsResult,
    MetricsResult,
    RequestsResult,
    SettingsResult,
    StoryResult,
    UsageResult,
)
from protocol.bodies import Bytes, Model, Seconds, Tokens, WorkerStatus
from protocol.verbs import Verb


class ModelsResult(TypedDict):
    models: list[Model]
    """Every configured model that the key may use."""
    listen: str | None
    """Why `supervisor.listen` is not open yet. Null if it is open or not set."""


class Counters(TypedDict):
    """Counts since the supervisor's start, of all client sockets together."""

    connections_accepted: int
    """Accepted connections."""
    connections_closed: int
    """Connections that ended, for any reason."""
    handshakes_failed: int
    """Connections that ended in the handshake."""
    connections_denied: int
    """Handshakes refused because of the user or the key."""
    connections_cut_off: int
    """Connections that the supervisor ended."""
    bad_frames: int
    """Refused frames."""
    worker_frames_dropped: int
    """Workers' frames for no unfinished request."""


class TcpStatus(TypedDict):
    """The port over TCP."""

    listen: str
    """The port's endpoint."""
    problem: str | None
    """Why the port is not open yet, with the number of attempts. Null if it is open."""
    keys: list[dict[str, Any]]
    """For each key: `name`, `rights`, `models`, `expires`, `max_in_flight`, `requests_per_minute`, `tokens_per_minute`,
    `tokens_per_day` and `keep_alive_s` as in [Key](#map-key); `connections`; `rate_limited` (refused requests); and
    `requests_left`, `tokens_left`, `tokens_left_of_day` (null if unused)."""
    forbidden: int
    """Messages refused because a key lacked a right."""
    connected_too_often: int
    """Handshakes refused because a key connected too often."""
    cut_off: int
    """Connections that the supervisor ended."""


class GatewayStatus(TypedDict):
    """The HTTP gateway of this supervisor."""

    listen: str
    """The port's address."""
    auth: str
    """`keys` if requests need a token, else `none`."""
    tls: bool
    """True for HTTPS, false for HTTP."""
    pids: list[int]
    """Its running processes."""
    ready: bool
    """True if all of its processes serve."""
    restarts: int
    """How often one of its processes was started again."""
    problem: str | None
    """Why the gateway does not answer, null if it does."""
    log: str
    """The path of the log."""


class HttpKeys(TypedDict):
    """The keys of clients over HTTP."""

    listed: int
    """Their number."""
    keys: list[dict[str, Any]]
    """At most 100, first those used since the supervisor's start: the keys of `keys` in [TcpStatus](#map-tcpstatus) but
    `connections`, and `unfinished` (requests)."""


class UsageStatus(TypedDict):
    """The ledger of usage."""

    file: str
    """The path of the SQLite file."""
    days: int
    """Days that are kept."""
    trouble: str | None
    """Why the counts cannot be written to the file, null if they can. They stay in memory meanwhile."""
    crowded_out: int
    """Requests counted as `(others)`, because there are too many keys and models."""


class SpareStatus(TypedDict):
    """A spare worker: a process that has already imported what an engine needs."""

    engine: str
    """As in models.yaml."""
    pid: int
    """The process id, which the next worker of the engine will have."""
    ready: bool
    """True after the imports."""
    ram_bytes: Bytes | None
    """Host memory of the process."""


class RequestLogStatus(TypedDict):
    """The log with a line for each ended request."""

    file: str
    """The path of the log."""
    trouble: str | None
    """Why lines cannot be written, null if they can."""
    lost: int
    """Lines lost since the supervisor's start because of a slow disk."""


class NodeStatus(TypedDict):
    """A machine of the Ray cluster."""

    node_id: str
    """Ray's id of the machine. It changes if the machine leaves and comes back."""
    name: str
    """The name for `node` of models.yaml."""
    address: str
    """The IP address."""
    gpus: float
    """GPUs that Ray leases there."""
    free: float
    """GPUs that are not leased."""
    others: float
    """GPUs leased by other programs than modelctl."""
    own: bool
    """True for the supervisor's machine."""
    labels: dict[str, str]
    """Ray's labels of the machine."""
    devices: "list[GpuStatus] | None"
    """The GPUs. A worker with GPUs reports them every second; without one they are read once a minute. Null without
    GPUs, if they cannot be read, and for the supervisor's own machine."""
    version: str | None
    """The version of modelctl there, null until an agent of a worker has told it."""
    heard_s: Seconds | None
    """Time since an agent there was last heard, null without a worker there."""


class GoneNodeStatus(TypedDict):
    """A machine that the Ray cluster does not list any more."""

    name: str
    """As in [NodeStatus](#map-nodestatus)."""
    address: str
    """As in [NodeStatus](#map-nodestatus)."""
    gpus: float
    """GPUs that Ray leased there."""
    gone_s: Seconds
    """Time since Ray does not list it."""


class ClusterStatus(TypedDict):
    """The Ray cluster for workers on other machines."""

    ray: str
    """The address of the Ray cluster, or `auto`."""
    advertise: str
    """The endpoint to which workers on other machines connect."""
    model_store: str | None
    """The endpoint of the model store, null if no directories are copied."""
    trouble: str | None
    """Why the cluster cannot be used, null if it can."""
    nodes: list[NodeStatus]
    """The machines, empty until the cluster has answered."""
    gone: list[GoneNodeStatus]
    """Machines that left in the last 24 hours, since the supervisor's start. At most 100."""
    answered_s: Seconds | None
    """Time since Ray last answered; the supervisor asks each second. Null before the first answer."""


class SupervisorStatus(TypedDict):
    """The supervisor's process."""

    pid: int
    """The process id."""
    session: str
    """As in [WELCOME](#welcome)."""
    version: str
    """The version of modelctl."""
    uptime_s: Seconds
    """Time since the supervisor's start."""
    config: str
    """The path of models.yaml."""
    runtime_dir: str
    """The directory of sockets and logs."""
    log_trouble: str | None
    """Why the supervisor cannot write its log, null if it can."""
    troubles: dict[str, str]
    """What is wrong with the supervisor as a whole, in words, by name: `log` (cannot be written), `config` (a changed
    models.yaml is not used), `gpus` (cannot be read), `gateway` (does not answer), `keys` (cannot be read), `queue`
    (full queues refuse requests), `cluster` (cannot be used), `listen` (`supervisor.listen` is not open yet), `folders`
    (one cannot be read). A key for some models sees `gpus`, `gateway`, `cluster` and `listen` only. After five minutes
    a trouble becomes an event."""
    spares: list[SpareStatus]
    """The spare workers."""
    shutting_down: bool
    """True during the shutdown, when no new requests are taken."""
    turnovers: list[dict[str, Any]]
    """The last reloads and rolling restarts: `number`, `cause`, `running`, `settings` (changed keys of the section
    `supervisor`, and of `gateway` with `gateway.` before them) and `models`, a list of `model`, `change` (`unchanged`,
    `settings`, `workers`, `added`, `removed`), `state` (`waiting`, `running`, `done`, `failed`) and, where they apply,
    `how` and `message`."""
    held_bytes: Bytes
    """Events held until clients read them."""
    forwarding: str
    """`compiled`, or why Python forwards the frames with tokens."""
    connections: int
    """Connected clients."""
    tcp: TcpStatus | None
    """The port over TCP, null if there is none."""
    gateway: GatewayStatus | None
    """Null if models.yaml has no section of this name."""
    cluster: ClusterStatus | None
    """Null if models.yaml has no section of this name."""
    usage: UsageStatus | None
    """Null if models.yaml switches the ledger off."""
    request_log: RequestLogStatus | None
    """Null if models.yaml names no log."""
    http_keys: HttpKeys
    """The keys for which gateways ask."""
    counters: Counters
    """Counts since the start."""


class GpuStatus(TypedDict):
    """A GPU, as NVML sees it. Values from `utilization_percent` on are null if the driver does not offer them, and for
    GPUs of other machines."""

    index: int
    """The number in the order of the PCI bus."""
    uuid: str
    """The permanent name."""
    total_bytes: Bytes
    """All memory."""
    used_bytes: Bytes
    """Memory in use by any process."""
    free_bytes: Bytes
    """Free memory."""
    limit_bytes: Bytes | None
    """Most memory of all workers together (`vram_limit` in models.yaml), null for no limit."""
    utilization_percent: Annotated[int, "%"] | None
    """The share of the driver's last sample period in which the GPU computed."""
    temperature_celsius: Annotated[int, "°C"] | None
    """The temperature."""
    power_watts: Annotated[float, "W"] | None
    """The power drawn."""
    power_limit_watts: Annotated[float, "W"] | None
    """The most power that the GPU may draw."""


class StatusResult(TypedDict):
    rights: list[str]
    """The rights of the client's key; all for the supervisor's own user."""
    supervisor: SupervisorStatus
    """The supervisor."""
    gpus: list[GpuStatus]
    """Every GPU of the machine; empty if none is used."""
    gpus_unknown: str | None
    """Why the GPUs cannot be read, null if they can."""
    models: list[WorkerStatus]
    """One entry for each worker."""


class NoResult(TypedDict):
    """An empty map."""


class TokenizeResult(TypedDict):
    token_ids: bytes
    """u32, little endian."""
    count: Tokens
    """The number of ids."""
    context: Tokens
    """The most tokens of prompt and answer together."""
    text: NotRequired[str]
    """With `with_text`: the rendered conversation, or the prompt."""
    pieces: NotRequired[list[bytes]]
    """With `with_pieces`: for each token its bytes in a text, or the name of a special token."""


class ChatTemplateResult(TypedDict):
    """Templates are programs for Jinja."""

    source: str | None
    """The template, null if the model has none."""
    tool_source: str | None
    """The template for conversations with tools, if it is another one."""
    special_tokens: dict[str, str]
    """The texts of the special tokens, by names such as `bos_token`."""


class DetokenizeResult(TypedDict):
    text: str
    """Bytes that are not UTF-8 become U+FFFD."""


class WorkerOrder(TypedDict):
    """The effect of an order on one worker."""

    state: str
    """The worker's state at the reply. The order is carried out later: ask `status`."""
    generation: int
    """The number of the worker's process, after `restart` that of its next process."""


class OrderResult(WorkerOrder):
    """The effect of an order on all workers of a model. `state` and `generation` are those of the first worker."""

    workers: dict[str, WorkerOrder]
    """By the worker's name."""


class RestartResult(OrderResult):
    turnover: int | None
    """The `number` in `turnovers` of `status`, if several workers are restarted one after the other; else null."""


class ReloadResult(TypedDict):
    turnover: int
    """The `number` in `turnovers` of `status`."""


class LogLevelResult(TypedDict):
    levels: dict[str, str]
    """By model, `supervisor` or `gateway`."""


class Key(TypedDict):
    """A client's key. A limit of null is no limit."""

    name: str
    """The name."""
    http: bool
    """True for a token over HTTP, false for a key over TCP."""
    rights: list[str]
    """The rights."""
    models: list[str] | None
    """Names and patterns of the models that it may use. Null: all models."""
    created: str
    """Such as `2026-01-31T12:00:00Z`."""
    expires: str | None
    """When it ends, null for never. An expired key stays on the list until it is revoked."""
    max_in_flight: int | None
    """Most unfinished requests."""
    requests_per_minute: int | None
    """Most requests in a minute."""
    tokens_per_minute: int | None
    """Most tokens of prompts and answers in a minute."""
    tokens_per_day: int | None
    """Most tokens of prompts and answers in a day."""
    keep_alive_s: int | None
    """The most seconds that its requests may keep a model loaded. Null: they may not ask for it."""
    last_used: str | None
    """The time of the last use; for use before the supervisor's start the beginning of that day. Null if unknown."""
    own: bool
    """True for the key that asks."""


class KeysResult(TypedDict):
    keys: list[Key]
    """By name."""
    more: bool
    """True if keys are missing: ask again with the last name as `after`."""


class SetKeyResult(TypedDict):
    key: Key | None
    """The key now, null if it was revoked meanwhile."""
    notes: list[str]
    """A sentence for each pattern of `models` that matches no model."""


class NewKeyResult(SetKeyResult):
    token: str
    """The token. It is kept nowhere, and no other answer has it."""


def result_of(verb: Verb) -> type:
    """Return the class that describes the result of a verb."""
    found: type = globals()[verb.result]
    return found
