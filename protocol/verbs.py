"""The verbs of CALL: the parameters that each takes and the result that it returns. See ``protocol.bodies``.

Tables of the supervisor decide who may use a verb, and on which socket: docs/wire-protocol.md shows them.
"""

from typing import Annotated, Any, Final, NamedTuple, NotRequired, TypedDict

from protocol.bodies import Bytes, MillisecondsFloat, Model, Seconds, Tokens


class NoParams(TypedDict):
    """An empty map."""


class ModelsResult(TypedDict):
    models: list[Model]
    """Every configured model."""


class StatusParams(TypedDict):
    model: NotRequired[str]
    """A model, or one worker of several (`letters:2`). Unset: all."""


class Counters(TypedDict):
    """Counts since the supervisor's start, of all client sockets."""

    connections_accepted: int
    """Connections that were taken."""
    connections_closed: int
    """Connections that ended, however."""
    handshakes_failed: int
    """Connections that ended in the handshake."""
    connections_denied: int
    """Handshakes of other users, or of keys that are not on the list."""
    connections_cut_off: int
    """Connections that the supervisor ended."""
    bad_frames: int
    """Frames that were refused."""
    worker_frames_dropped: int
    """Frames of workers that concerned no request any more."""


class TcpStatus(TypedDict):
    """The port over TCP."""

    listen: str
    """Its endpoint."""
    keys: list[dict[str, Any]]
    """For each key: `name`, `rights`, `connections`, `max_in_flight` (null: no limit), `tokens_per_minute` (null: no
    limit), `tokens_left` (null: no limit, or not used yet) and `rate_limited` (requests that were refused)."""
    forbidden: int
    """Messages that were refused for want of a right."""
    connected_too_often: int
    """Handshakes that were refused because a key connected too often."""
    cut_off: int
    """Connections that the supervisor ended."""


class SupervisorStatus(TypedDict):
    """The supervisor's process."""

    pid: int
    """Its process id."""
    version: str
    """Its version."""
    uptime_s: Seconds
    """Since its start."""
    config: str
    """The path of models.yaml."""
    runtime_dir: str
    """The directory with its sockets and logs."""
    log_trouble: str | None
    """Why its log cannot be written, null if it can."""
    shutting_down: bool
    """Whether it takes no new requests."""
    turnovers: list[dict[str, Any]]
    """The last orders to reload models, or to restart them in turns: `number`, `cause`, `running`, `settings` (keys of
    the section `supervisor` that were changed) and `models`, a list of `model`, `change` (`unchanged`, `settings`,
    `workers`, `added`, `removed`), `state` (`waiting`, `running`, `done`, `failed`) and, where they apply, `how` and
    `message`."""
    held_bytes: Bytes
    """Events that wait for clients to read."""
    forwarding: str
    """`compiled`, or why frames of tokens are forwarded by Python."""
    connections: int
    """Clients that are connected."""
    tcp: TcpStatus | None
    """The port over TCP, null if there is none."""
    counters: Counters
    """Counts since its start."""


class GpuStatus(TypedDict):
    """A GPU, as NVML sees it."""

    index: int
    """Its number in the order of the PCI bus."""
    uuid: str
    """Its name for good."""
    total_bytes: Bytes
    """All its memory."""
    used_bytes: Bytes
    """What all processes together use."""
    free_bytes: Bytes
    """What is left."""


class Totals(TypedDict):
    """Counts of a model since the supervisor's start."""

    tokens: Tokens
    """Tokens that were generated."""
    finished: int
    """Requests that ended as asked, or were cancelled."""
    errors: int
    """Requests that ended with an error."""
    resumed: int
    """How often a request went on in another worker."""


class WorkerStatus(TypedDict):
    """One worker of a model. What is not known is null."""

    name: str
    """The worker's name: that of its model, with a number if there are several (`letters:2`)."""
    model: str
    """The model's name."""
    state: str
    """One of the states below."""
    reason: str | None
    """Why the worker is in this state, for people. Null in a state that needs no reason."""
    state_s: Seconds
    """Since it is in this state."""
    engine: str
    """The engine of models.yaml."""
    gpu: str
    """The GPUs that its process may see, or `cpu`."""
    device: str | None
    """The device that the engine runs on, by its own words."""
    attention: str | None
    """How the engine computes attention."""
    context: Tokens | None
    """The longest prompt and answer together."""
    max_batch_size: int | None
    """Requests that are computed at once, as models.yaml has it."""
    chat: bool | None
    """Whether the model has a chat template."""
    active: int
    """Requests that the worker has."""
    queued: int
    """Requests that wait for the model."""
    tokens_per_s: Annotated[float, "tokens/s"]
    """In the last seconds."""
    idle_s: Seconds | None
    """Since its last request; null unless it is ready and has none."""
    until_s: Seconds | None
    """Until it is unloaded if no request comes; null if that is not due."""
    lazy: bool
    """Whether its first request starts it."""
    unloaded: str | None
    """Why it was unloaded, for people."""
    pid: int | None
    """Its process id."""
    phase: str | None
    """What its process does: `starting`, `loading`, `idle`, `step`, or `unknown`."""
    beat_s: Seconds | None
    """Since its process was last seen to make progress."""
    generation: int
    """The number of its process; it grows with each start."""
    restarts: int
    """How often it was started again without an order."""
    load_seconds: Seconds | None
    """How long the load took."""
    progress: dict[str, Any] | None
    """While it is being loaded: `phase`, `done` and `total`."""
    engine_stats: dict[str, Any]
    """The engine's last reading: `pending`, `active`, `steps`, and figures of its own."""
    totals: Totals
    """Counts of its model."""
    last_exit: dict[str, Any] | None
    """How its last process ended: `code`, `reason`, `message`, `retry` and `lines` (the last of its log)."""
    log: str
    """The path of its log."""
    placed: list[int] | None
    """Indices of the GPUs that it was placed on."""
    cpus: str | None
    """The cores that it is kept to; null is all."""
    numa_nodes: str | None
    """The NUMA nodes that it is kept to; null is all."""
    vram_estimate_bytes: Bytes | None
    """GPU memory that it was estimated to need."""
    vram_estimate: dict[str, int] | None
    """The estimate by part, in bytes."""
    vram_loaded_bytes: Bytes | None
    """GPU memory that it held when it was ready, measured."""
    vram_bytes: Bytes | None
    """GPU memory that its process holds now, by NVML."""
    vram_by_gpu: dict[str, int | None] | None
    """The same by GPU index."""
    vram_return: str | None
    """Whether the memory of its last process is back: `awaited`, `back`, `not back` or `not watched`."""
    vram_returned_ms: MillisecondsFloat | None
    """How long that took."""


class StatusResult(TypedDict):
    supervisor: SupervisorStatus
    """The supervisor."""
    gpus: list[GpuStatus]
    """Every GPU of the box; empty if none is used."""
    gpus_unknown: str | None
    """Why the GPUs cannot be read, null if they can."""
    models: list[WorkerStatus]
    """One entry for each worker."""


class ModelParams(TypedDict):
    model: str
    """A model, or one worker of several (`letters:2`)."""


class StopParams(ModelParams):
    now: NotRequired[bool]
    """Do not wait for unfinished requests; by default the worker finishes them, as long as the drain may take."""


class WorkerOrder(TypedDict):
    """What an order made of one worker."""

    state: str
    """Its state now. The order is carried out after the reply: ask `status` until the state is the one you want."""
    generation: int
    """The number of its process; of `restart`, the number that its next process will have."""


class OrderResult(WorkerOrder):
    """`state` and `generation` are those of the first worker."""

    workers: dict[str, WorkerOrder]
    """Each worker by its name."""


class RestartResult(OrderResult):
    turnover: int | None
    """The number of the entry in `turnovers` of `status`, if several workers are restarted one after the other."""


class ReloadParams(TypedDict):
    model: NotRequired[str]
    """A model whose workers are replaced in any case. Unset: models.yaml is read again, and what it changes is applied
    to all models."""
    how: NotRequired[str]
    """`auto` (the default: beside the old worker where both fit), `beside`, or `exchange` (the old worker leaves
    first)."""


class ReloadResult(TypedDict):
    turnover: int
    """The number of the entry in `turnovers` of `status`."""


class ShutdownParams(TypedDict):
    now: NotRequired[bool]
    """Do not wait for unfinished requests."""


class NoResult(TypedDict):
    """An empty map."""


class TokenizeParams(ModelParams):
    """Exactly one of `prompt` and `messages`."""

    prompt: NotRequired[str]
    """The text."""
    messages: NotRequired[list[dict[str, Any]]]
    """The conversation, for the model's chat template. This key and the following ones are as in GENERATE."""
    tools: NotRequired[list[dict[str, Any]]]
    """What the assistant may call."""
    template_kwargs: NotRequired[dict[str, Any]]
    """Further variables of the template."""
    add_generation_prompt: NotRequired[bool]
    """Whether the text ends where the assistant speaks next."""
    continue_final_message: NotRequired[bool]
    """Whether the answer goes on where the last message ends."""


class DetokenizeParams(ModelParams):
    token_ids: bytes
    """The ids, u32 little endian."""


class TokenizeResult(TypedDict):
    token_ids: bytes
    """The ids, u32 little endian."""
    count: Tokens
    """How many there are."""


class DetokenizeResult(TypedDict):
    text: str
    """The text; bytes that are no UTF-8 are U+FFFD."""


class Verb(NamedTuple):
    """A verb of CALL.

    purpose  one sentence for people
    result   the map in REPLY
    params   the map in CALL
    """

    purpose: str
    result: type
    params: type


VERBS: Final[dict[str, Verb]] = {
    "models": Verb("List the models.", ModelsResult, NoParams),
    "status": Verb("Describe the supervisor, its models and its GPUs.", StatusResult, StatusParams),
    "tokenize": Verb(
        "Return the ids that the model would read for a prompt or a conversation.", TokenizeResult, TokenizeParams
    ),
    "detokenize": Verb("Return the text of ids.", DetokenizeResult, DetokenizeParams),
    "start": Verb("Start the workers of a model.", OrderResult, ModelParams),
    "stop": Verb("Stop the workers of a model.", OrderResult, StopParams),
    "restart": Verb(
        "Stop the workers of a model and start them again, one after the other.", RestartResult, ModelParams
    ),
    "reload": Verb(
        "Read models.yaml again and apply what it changes, or replace the workers of one model.",
        ReloadResult,
        ReloadParams,
    ),
    "shutdown": Verb("Stop every model, then end the supervisor.", NoResult, ShutdownParams),
}
"""All verbs of CALL."""
