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
    """The reason why `supervisor.listen` is not open yet, null if it is open or not set."""


class Counters(TypedDict):
    """Counts since the supervisor's start, for all client sockets together."""

    connections_accepted: int
    """Connections that were taken."""
    connections_closed: int
    """Connections that ended, for any reason."""
    handshakes_failed: int
    """Connections that ended in the handshake."""
    connections_denied: int
    """Handshakes that were refused because of another user, or of a key that is not on the list."""
    connections_cut_off: int
    """Connections that the supervisor ended."""
    bad_frames: int
    """Frames that were refused."""
    worker_frames_dropped: int
    """Frames of workers that belonged to no unfinished request."""


class TcpStatus(TypedDict):
    """The port over TCP."""

    listen: str
    """The endpoint of the port."""
    problem: str | None
    """The reason why it is not open yet, with the number of attempts; null if it is open."""
    keys: list[dict[str, Any]]
    """For each key: `name`, `rights`, `models` (null: all), `expires` (null: never), `connections`, `rate_limited`
    (refused requests), and, null for no limit, `max_in_flight`, `requests_per_minute`, `tokens_per_minute`,
    `tokens_per_day`, and what is left of them: `requests_left`, `tokens_left`, `tokens_left_of_day` (null if unused).
    `keep_alive_s`, the most seconds that its requests may keep a model loaded, is null if they may not say so."""
    forbidden: int
    """Messages that were refused because a key lacked a right."""
    connected_too_often: int
    """Handshakes that were refused because a key connected too often."""
    cut_off: int
    """Connections that the supervisor ended."""


class GatewayStatus(TypedDict):
    """The HTTP gateway of this supervisor."""

    listen: str
    """The address of its port."""
    auth: str
    """`keys` if requests need a token, else `none`."""
    tls: bool
    """True if the port takes HTTPS, false for HTTP."""
    pids: list[int]
    """The ids of its processes that run."""
    ready: bool
    """True if all of its processes serve."""
    restarts: int
    """How often one of its processes was started again."""
    problem: str | None
    """The reason why it does not answer, null if it does."""
    log: str
    """The path of its log."""


class HttpKeys(TypedDict):
    """The keys of clients over HTTP."""

    listed: int
    """How many there are."""
    keys: list[dict[str, Any]]
    """At most 100 of them, first those that were used since the supervisor's start: `name`, `rights`, `models`,
    `expires`, the limits and what is left of them, and `rate_limited`, as for the port over TCP, and `unfinished`
    (requests)."""


class UsageStatus(TypedDict):
    """The ledger of usage."""

    file: str
    """The path of the SQLite file."""
    days: int
    """The number of days that are kept."""
    trouble: str | None
    """The reason why the counts cannot be written to the file, null if they can. They are kept in memory meanwhile."""
    crowded_out: int
    """Requests whose key and model are counted as `(others)`, because there are too many keys and models."""


class SpareStatus(TypedDict):
    """A spare worker: a process that has imported what an engine needs."""

    engine: str
    """The engine of models.yaml."""
    pid: int
    """The process id. The next worker of the engine has the same one."""
    ready: bool
    """True if the imports are done."""
    ram_bytes: Bytes | None
    """The host memory that the process holds."""


class RequestLogStatus(TypedDict):
    """The log with a line for each request that has ended."""

    file: str
    """The path of the log."""
    trouble: str | None
    """The reason why lines cannot be written, null if they can."""
    lost: int
    """Lines that were lost since the supervisor's start, because the disk was slower than the requests."""


class NodeStatus(TypedDict):
    """A machine of the Ray cluster."""

    node_id: str
    """Ray's id of the machine. A machine that leaves and comes back has another one."""
    name: str
    """The name by which `node` of models.yaml means it."""
    address: str
    """Its IP address."""
    gpus: float
    """GPUs that Ray leases there."""
    free: float
    """GPUs that are not leased."""
    others: float
    """GPUs that other programs than modelctl have leased from Ray."""
    own: bool
    """True for the supervisor's machine."""
    labels: dict[str, str]
    """The labels with which Ray was started there."""
    devices: "list[GpuStatus] | None"
    """The GPUs there and their memory, as a worker with GPUs reports them every second; without such a worker as they
    were read in the last minute. Null if they cannot be read, without GPUs, and for the supervisor's own machine."""
    version: str | None
    """The version of modelctl there, null until an agent of a worker has told it."""
    heard_s: Seconds | None
    """The time since an agent there was last heard, null if no worker runs there."""


class GoneNodeStatus(TypedDict):
    """A machine that the Ray cluster had, and does not list any more."""

    name: str
    """Its name."""
    address: str
    """The IP address that it had."""
    gpus: float
    """GPUs that Ray could lease there."""
    gone_s: Seconds
    """The time since Ray does not list it."""


class ClusterStatus(TypedDict):
    """The machines for workers besides the supervisor's own."""

    ray: str
    """The address of the Ray cluster, or `auto`."""
    advertise: str
    """The endpoint to which workers on other machines connect."""
    model_store: str | None
    """The endpoint of the model store, null if no directories are copied."""
    trouble: str | None
    """The reason why the cluster cannot be used, null if it can."""
    nodes: list[NodeStatus]
    """The machines, once the cluster has answered."""
    gone: list[GoneNodeStatus]
    """Machines that were there since the supervisor's start, and went in the last 24 hours. At most 100."""
    answered_s: Seconds | None
    """The time since Ray last answered, null if it has not answered yet. The supervisor's helper asks each second."""


class SupervisorStatus(TypedDict):
    """The supervisor's process."""

    pid: int
    """The supervisor's process id."""
    session: str
    """The random text of this supervisor process, see `session` in [WELCOME](#welcome)."""
    version: str
    """The supervisor's version."""
    uptime_s: Seconds
    """The time since the supervisor's start."""
    config: str
    """The path of models.yaml."""
    runtime_dir: str
    """The directory with the supervisor's sockets and logs."""
    log_trouble: str | None
    """The reason why the supervisor cannot write its log, null if it can."""
    troubles: dict[str, str]
    """What is wrong with the supervisor as a whole, in words, by name: `log` (it cannot be written), `config` (a
    changed models.yaml is not used), `gpus` (they cannot be read), `gateway` (it does not answer), `keys` (they cannot
    be read), `queue` (requests are refused because queues are full), `cluster` (the Ray cluster cannot be used),
    `listen` (`supervisor.listen` cannot be opened yet), `folders` (one of them cannot be read). A key for some models
    sees `gpus`, `gateway`, `cluster` and `listen` only. A trouble that lasts for five minutes is an event."""
    spares: list[SpareStatus]
    """The processes that are ahead of their time, and wait for a model."""
    shutting_down: bool
    """True while the supervisor shuts down and takes no new requests."""
    turnovers: list[dict[str, Any]]
    """The last orders to reload models, or to restart workers one after the other: `number`, `cause`, `running`,
    `settings` (keys of the section `supervisor` that were changed, and those of the section `gateway` with
    `gateway.` before them) and `models`, a list of `model`, `change` (`unchanged`, `settings`, `workers`, `added`,
    `removed`), `state` (`waiting`, `running`, `done`, `failed`) and, where they apply, `how` and `message`."""
    held_bytes: Bytes
    """The size of the held events, which wait until clients read."""
    forwarding: str
    """`compiled`, or the reason why Python forwards the frames with tokens."""
    connections: int
    """The number of connected clients."""
    tcp: TcpStatus | None
    """The port over TCP, null if there is none."""
    gateway: GatewayStatus | None
    """The HTTP gateway, null if models.yaml has no section `gateway`."""
    cluster: ClusterStatus | None
    """The Ray cluster, null if models.yaml has no section `cluster`."""
    usage: UsageStatus | None
    """The ledger of usage, null if models.yaml switches it off."""
    request_log: RequestLogStatus | None
    """The request log, null if models.yaml names none."""
    http_keys: HttpKeys
    """The keys of clients over HTTP, for which gateways ask."""
    counters: Counters
    """Counts since the supervisor's start."""


class GpuStatus(TypedDict):
    """A GPU, as NVML sees it."""

    index: int
    """The number of the GPU in the order of the PCI bus."""
    uuid: str
    """The name of the GPU, which never changes."""
    total_bytes: Bytes
    """The memory of the GPU."""
    used_bytes: Bytes
    """Memory that all processes together use."""
    free_bytes: Bytes
    """Memory that is free."""
    limit_bytes: Bytes | None
    """The most that all workers together may hold there (`vram_limit` in models.yaml); null for no limit."""
    utilization_percent: Annotated[int, "%"] | None
    """The share of the driver's last sample period in which the GPU computed. This value and the following ones are
    null if the driver does not offer them, and for GPUs of other machines."""
    temperature_celsius: Annotated[int, "°C"] | None
    """The temperature of the GPU."""
    power_watts: Annotated[float, "W"] | None
    """The power that the GPU takes."""
    power_limit_watts: Annotated[float, "W"] | None
    """The most power that the GPU may take."""


class StatusResult(TypedDict):
    rights: list[str]
    """The rights of the client's key. The supervisor's own user has all of them."""
    supervisor: SupervisorStatus
    """The supervisor."""
    gpus: list[GpuStatus]
    """Every GPU of the machine; empty if none is used."""
    gpus_unknown: str | None
    """The reason why the GPUs cannot be read, null if they can."""
    models: list[WorkerStatus]
    """One entry for each worker."""


class NoResult(TypedDict):
    """An empty map."""


class TokenizeResult(TypedDict):
    token_ids: bytes
    """The ids, u32 little endian."""
    count: Tokens
    """The number of ids."""
    context: Tokens
    """The longest prompt and answer together."""
    text: NotRequired[str]
    """The rendered conversation, or the prompt, if `with_text` was true."""
    pieces: NotRequired[list[bytes]]
    """The bytes that each token adds to a text, or the name of a special token, if `with_pieces` was true."""


class ChatTemplateResult(TypedDict):
    """The chat template of a model, a program for Jinja. Null if the model has none."""

    source: str | None
    tool_source: str | None
    """The template for conversations with tools, if the model has another one for them."""
    special_tokens: dict[str, str]
    """The texts of the special tokens by their names, such as `bos_token`."""


class DetokenizeResult(TypedDict):
    text: str
    """The text. Bytes that are not UTF-8 become U+FFFD."""


class WorkerOrder(TypedDict):
    """The effect of an order on one worker."""

    state: str
    """The state of the worker now. The order is carried out after the reply: ask `status` until the state is the one
    that you want."""
    generation: int
    """The number of the worker's process. In the reply to `restart`, the number of its next process."""


class OrderResult(WorkerOrder):
    """The effect of an order on all workers of a model. `state` and `generation` are those of the first worker."""

    workers: dict[str, WorkerOrder]
    """The effect on each worker, by the worker's name."""


class RestartResult(OrderResult):
    turnover: int | None
    """The number of the entry in `turnovers` of `status`, if several workers are restarted one after the other."""


class ReloadResult(TypedDict):
    turnover: int
    """The number of the entry in `turnovers` of `status`."""


class LogLevelResult(TypedDict):
    levels: dict[str, str]
    """The levels now, by the name of the model, or `supervisor` or `gateway`."""


class Key(TypedDict):
    """A key on the list."""

    name: str
    """Its name."""
    http: bool
    """True for a token over HTTP, false for a key of a client over TCP."""
    rights: list[str]
    """Its rights."""
    models: list[str] | None
    """Names and patterns of the models that it may use, null for all models."""
    created: str
    """When it was made, such as `2026-01-31T12:00:00Z`."""
    expires: str | None
    """When it ends, null for never. An expired key stays on the list until it is revoked."""
    max_in_flight: int | None
    """Most requests that may be unfinished, null for no limit, as for the next three."""
    requests_per_minute: int | None
    """Most requests in a minute."""
    tokens_per_minute: int | None
    """Most tokens in a minute."""
    tokens_per_day: int | None
    """Most tokens in a day."""
    keep_alive_s: int | None
    """The most seconds that its requests may keep a model loaded, null if they may not say so."""
    last_used: str | None
    """When it last asked for something. Of requests before the supervisor's start only the day is known, and its
    beginning stands here. Null if nothing is known."""
    own: bool
    """True for the key that asks."""


class KeysResult(TypedDict):
    keys: list[Key]
    """The keys on the list, by name."""
    more: bool
    """True if there are further keys: ask again with the last name as `after`."""


class SetKeyResult(TypedDict):
    key: Key | None
    """The key as it is now, null if it was revoked meanwhile."""
    notes: list[str]
    """A sentence for each pattern of `models` that matches no model yet."""


class NewKeyResult(SetKeyResult):
    token: str
    """The token. It is kept nowhere, and no other answer has it."""


def result_of(verb: Verb) -> type:
    """Return the class that describes the result of a verb."""
    found: type = globals()[verb.result]
    return found
