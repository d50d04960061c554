"""The maps that messages between clients and the supervisor carry: every key, with its type and its unit.

A class describes one map, and the text under a key is the only description of that key: docs/wire-protocol.md is
generated from both. ``Annotated[int, "ms"]`` states a unit. A class whose name is that of a message class and ends in
``Body`` describes the body of that message. ``APPEARS`` says where each error can appear.

Other places describe the rest: ``protocol.verbs`` the parameters of CALL, ``protocol.results`` its results,
``protocol.request`` the body of GENERATE, and ``protocol.messages`` the maps between the supervisor and its workers.
"""

from enum import StrEnum
from typing import Annotated, Any, Final, NotRequired, TypedDict

from protocol.errors import ErrorCode

Milliseconds = Annotated[int, "ms"]
MillisecondsFloat = Annotated[float, "ms"]
Seconds = Annotated[float, "s"]
Tokens = Annotated[int, "tokens"]
Bytes = Annotated[int, "bytes"]
Events = Annotated[int, "events"]


class HelloBody(TypedDict):
    """A description of the client. The supervisor ignores keys that it does not know."""

    library: NotRequired[str]
    """Name and version of the client, for people: `mylib/1.2`."""


class RouteKeys(TypedDict, total=False):
    """The keys of ``route``, in GENERATE: options that the supervisor itself reads."""

    resume: bool
    """When the request's worker dies, go on with the answer in another worker: no token twice, none missing."""
    priority: str
    """Share of the workers while other requests wait: ``interactive`` most, ``batch`` least."""
    queue_ms: int
    """Longest wait for a worker and a place in its batch. A request that waits longer ends with ``queue_timeout``."""
    ttft_ms: int
    """Longest time to the first token. After it: ``deadline_exceeded``."""
    deadline_ms: int
    """Longest time to the end of the answer. After it: ``deadline_exceeded``."""
    affinity: str
    """Requests with the same text here go to the same worker, where their prefix is in the cache. Unset: the beginning
    of the prompt."""
    progress: bool
    """Report the place in the queue, and the progress of load and prompt, until the first token."""
    keep_alive: float | str
    """Unload a lazy model after this time without a request, as in Ollama. It replaces the model's `ttl` until the
    model is unloaded, or another request sets it. A key needs `--keep-alive` for it."""
    ttl: int
    """`keep_alive` by LM Studio's name, in whole seconds."""
    on_behalf_of: str
    """Send the request for the HTTP key with this id: its rights, models, limits and place in the queue apply. Only for
    connections over ipc, and keys with the right ``gateway``."""
    trace_ids: list[str]
    """Names of the request for the verb ``story``, such as the id of the HTTP request."""
    notes: list[str]
    """What the sender of the request has to know, such as an option that a gateway ignored or changed. The verb
    ``story`` shows it."""


class Model(TypedDict):
    """A model as clients see it. Of several workers, the one nearest to `ready` counts. `context`, `chat` and `tools`
    are null until a worker has loaded the model."""

    name: str
    """The name that GENERATE takes."""
    state: str
    """One of the states below."""
    context: Tokens | None
    """The most tokens of prompt and answer together."""
    chat: bool | None
    """True if the model has a chat template, so that requests may hold `messages`."""
    tools: bool | None
    """True if the format of the model's tool calls is known."""
    unloads: bool
    """True if the model is unloaded when idle: it is lazy and not pinned. A request may then set `keep_alive`."""
    makes: NotRequired[str]
    """`vectors` for a model that answers EMBED, `scores` for one that answers RERANK. Missing for a model that writes
    text, and until a worker has loaded the model."""
    aliases: list[str]
    """Further names of the model, for GENERATE and CALL."""
    variants: list[str]
    """The variants of the model. GENERATE takes `NAME:precise`, with the name or an alias."""
    unlisted: list[str]
    """The names and variants that lists for people leave out (`listed: false` in models.yaml)."""
    default: str | None
    """`default_model` of models.yaml if it names this model, else null."""
    description: str | None
    """`description` of models.yaml, in one line for people."""


class WelcomeBody(TypedDict):
    """Facts about the supervisor that a client needs."""

    server: str
    """Name and version of the supervisor, for people: `modelctl 0.1.0`."""
    session: str
    """A random text for this supervisor process. Another value after a reconnect means another process."""
    window: Events
    """The credit of each new stream, and the most that one CREDIT grants."""
    max_frame: Bytes
    """The largest frame of any kind. libzmq ends the connection of a client that sends a larger one."""
    models: list[Model]
    """The models, as the verb `models` returns them."""


class AcceptedBody(TypedDict):
    """The place of the request in its queue."""

    model: str
    """The model's own name, also if the request named an alias, a variant or nothing."""
    queue_position: int
    """The approximate number of requests that start before this one."""


class ReportBody(TypedDict):
    """The progress of a request. Ignore a `phase` that you do not know."""

    phase: str
    """`queued` (waits for a worker), `loading` (its model is loading), `compiling` (a worker compiles its constraint)
    or `prefill` (a worker computes its prompt)."""
    queue_position: NotRequired[int]
    """With `queued`: the number of requests before this one."""
    waits_for: NotRequired[str]
    """With `queued`, if busy models are in the way of the load: the reason in words, such as `llama to finish 2
    requests`. It does not name models that the client may not use."""
    part: NotRequired[str]
    """With `loading`: the engine's name for the part of the load, such as `warmup`; before that `checking model` or
    `copying model`, while another machine copies the model's directories."""
    done: NotRequired[int]
    """With `loading` and `prefill`: the amount done. `prefill` counts tokens."""
    total: NotRequired[int]
    """The value of `done` at the end of this part."""
    unit: NotRequired[str]
    """With `loading`: the unit of `done` and `total`, such as `bytes`, if known."""
    per_s: NotRequired[int]
    """With `copying model`: bytes in a second."""


class GoAwayBody(TypedDict):
    """The reason of the shutdown."""

    reason: str
    """A text for people."""


class RefusedFrame(TypedDict):
    """The elements of a refused frame, as far as they could be read."""

    kind: NotRequired[int]
    """The frame's kind, if this version knows it."""
    number: NotRequired[int]
    """The number of the request or call."""


class Failure(TypedDict):
    """An error in ERROR, in REPLY or in a terminal event."""

    code: int
    """The stable number, see [Errors](#errors). Treat an unknown code as `internal`."""
    name: str
    """The name of the code."""
    message: str
    """What is wrong and what to do, for people. It holds no prompt, answer or key. The wording may change."""
    retryable: bool
    """True if the same request may succeed later."""
    field: NotRequired[str]
    """The wrong key: a key of the body, `route.` and a key of the route, or an element of the frame."""
    retry_after_ms: NotRequired[Milliseconds]
    """Wait at least this long before a retry."""
    prompt_tokens: NotRequired[Tokens]
    """With `context_overflow`: the tokens of the prompt, if they were counted."""
    context: NotRequired[Tokens]
    """The tokens of the model's context. Present with `prompt_tokens`."""


class ErrorBody(Failure):
    """An error, and the frame that it answers."""

    refused: NotRequired[RefusedFrame]
    """The frame that an ERROR of request 0 answers. Missing if the error is about the connection."""


class ReplyBody(TypedDict):
    """One of the two keys."""

    result: NotRequired[dict[str, Any]]
    """The result of the verb."""
    error: NotRequired[Failure]
    """The error of a call that failed."""


class Usage(TypedDict):
    """Counts of tokens."""

    prompt_tokens: Tokens
    """0 if the request ended before a worker read the prompt."""
    completion_tokens: Tokens
    """Tokens of the answer."""
    cached_tokens: NotRequired[Tokens]
    """Tokens of the prompt that were in the engine's cache. Missing if 0."""
    draft_accepted: NotRequired[Tokens]
    """Speculated tokens that were right. Missing without speculation."""
    draft_rejected: NotRequired[Tokens]
    """Speculated tokens that were wrong. Missing without speculation."""
    resumes: NotRequired[int]
    """How often the answer was resumed in another worker. Missing if 0."""


class Timings(TypedDict):
    """Measured times; what was not measured is missing. After a resume, all but `queue_ms` are those of the last
    worker."""

    queue_ms: NotRequired[MillisecondsFloat]
    """From ACCEPTED until a worker began to compute, without the time between two workers of a resumed answer."""
    prefill_ms: NotRequired[MillisecondsFloat]
    """From the start in the engine to the first token."""
    decode_ms: NotRequired[MillisecondsFloat]
    """From the first token to the end."""
    tokens_per_s: NotRequired[Annotated[float, "tokens/s"]]
    """The speed of decoding, without the first token."""


class AnswerFormat(TypedDict):
    """How a model writes reasoning and tool calls."""

    tools: str | None
    """The [format of tool calls](http-api.md#formats-of-calls), such as `hermes`. Null if it is not known."""
    headers: NotRequired[str]
    """With `tool_format: off`, where `tools` is null: the format whose headers are in the answer."""
    reasoning: list[str] | None
    """The markers before and after the reasoning. Null if there is none, or they are not known."""
    inside: bool
    """True if the prompt ended within the reasoning, so that the answer begins there."""


class PromptLogprobsPiece(TypedDict):
    """Packed log-probabilities of neighbouring tokens of a prompt. Ids are u32, little endian."""

    first: int
    """The place of the first of these tokens in the prompt, from 0."""
    top: int
    """How many likeliest tokens each place has: `prompt_logprobs`, or the size of the vocabulary."""
    ids: bytes
    """For each token its own id, then the ids of the `top` likeliest tokens at its place, best first."""
    logprobs: bytes
    """The log-probabilities of `ids`: floats of 32 bits, little endian. One may be minus infinity."""
    before: int
    """The id of the token before `first`."""
    known: bytes
    """The distinct ids in `ids` and `before`, ascending."""
    bytes: list[bytes]
    """What each of `known` adds to the text, as in `logprobs` of a delta."""


class VectorsPiece(TypedDict):
    """The vectors of neighbouring texts of an EMBED, or the scores of documents of a RERANK."""

    first: int
    """The number of the first of these texts, from 0."""
    size: int
    """How many numbers a vector has; 1 for scores."""
    data: bytes
    """The numbers of all these vectors: floats of 32 bits, little endian."""
    maker: bytes
    """A mark of the model and of how it is used. Vectors of one answer with different marks do not belong together: a
    reload has changed the model meanwhile. Then send the request again."""


class DeltaEvent(TypedDict):
    """The map of an event without a terminal flag. `format` and all keys below it come with the first event of an
    answer only."""

    text: str
    """New text in whole characters, possibly empty. Text that may begin a stop string comes with a later event."""
    logprobs: NotRequired[list[list[Any]]]
    """With the option `logprobs`: for each id `[logprob, bytes, top]`. `logprob`, a float, is the natural logarithm of
    the token's probability by the model alone, before penalties, bias and temperature. `bytes`, a bin, is the token's
    text in UTF-8, maybe with an incomplete character. `top` is an array of the likeliest tokens, best first, each as
    `[id, logprob, bytes]`."""
    prompt_logprobs: NotRequired[PromptLogprobsPiece]
    """With the option `prompt_logprobs`. Such events come before all events with tokens, in the order of the prompt,
    and have no text and no ids. Each ends at the next token whose number is a multiple of 256. A prompt of one token
    has one such event, without tokens."""
    vectors: NotRequired[VectorsPiece]
    """In the answer to EMBED and RERANK: the next vectors or scores, in the order of the texts. Such events have no
    text and no ids."""
    format: NotRequired[AnswerFormat]
    """With the option `with_format`."""
    prompt_tokens: NotRequired[Tokens]
    """With the option `with_format`: tokens of the prompt."""
    left_out: NotRequired[list[str]]
    """Options that the worker did without, as the request allows it (`budget_if_reasoning`)."""
    max_tokens: NotRequired[Tokens]
    """The `max_tokens` that counts, if `cut_to_context` cut the request's."""
    forced: NotRequired[dict[str, float | None]]
    """Options that the model's `forced` values replaced, with the value that counts; null for one that is no number or
    switch."""


class FinishedEvent(TypedDict):
    """The map of an event with the flag FINISHED, which may hold the last ids and the last text."""

    text: NotRequired[str]
    """The last text."""
    logprobs: NotRequired[list[list[Any]]]
    """As in a delta."""
    format: NotRequired[AnswerFormat]
    """As in a delta, if the answer has no other event."""
    prompt_tokens: NotRequired[Tokens]
    """As in a delta, if the answer has no other event."""
    left_out: NotRequired[list[str]]
    """As in a delta."""
    max_tokens: NotRequired[Tokens]
    """As in a delta."""
    forced: NotRequired[dict[str, float | None]]
    """As in a delta."""
    finish_reason: str
    """Why the answer ended, see below."""
    stop_string: NotRequired[str]
    """The stop string that ended the answer."""
    usage: Usage
    """Counts of tokens."""
    timings: Timings
    """Measured times."""


class ErrorEvent(TypedDict):
    """The map of an event with the flag ERROR."""

    error: Failure
    """The error that ended the request."""
    delivered_tokens: NotRequired[Tokens]
    """The number of ids in all earlier events of the request."""


class Where(StrEnum):
    """A place in which an error can appear."""

    REQUEST = "ERROR of the request"
    """A GENERATE is refused. The ERROR comes instead of ACCEPTED."""
    FRAME = "ERROR of request 0, with `refused`"
    """A frame is refused that is neither a CALL nor a GENERATE with a free number."""
    CONNECTION = "ERROR of request 0, without `refused`"
    """The connection ends."""
    REPLY = "REPLY"
    """A CALL failed."""
    EVENT = "error event"
    """An accepted request ended."""
    CLIENT = "never on the wire"
    """The client library raises the error itself."""


APPEARS: Final[dict[ErrorCode, tuple[Where, ...]]] = {
    ErrorCode.BAD_FRAME: (Where.REQUEST, Where.FRAME, Where.REPLY),
    ErrorCode.BAD_VERSION: (Where.FRAME,),
    ErrorCode.INVALID_REQUEST: (Where.REQUEST, Where.FRAME, Where.REPLY, Where.EVENT),
    ErrorCode.UNSUPPORTED: (
        Where.REQUEST,
        Where.FRAME,
        Where.REPLY,
        Where.EVENT,
        Where.CONNECTION,
    ),
    ErrorCode.TOO_LARGE: (Where.REQUEST, Where.FRAME, Where.REPLY),
    ErrorCode.DUPLICATE_REQUEST: (Where.FRAME,),
    ErrorCode.CONTEXT_OVERFLOW: (Where.EVENT, Where.REPLY),
    ErrorCode.UNAUTHORIZED: (
        Where.REQUEST,
        Where.REPLY,
        Where.EVENT,
        Where.CONNECTION,
        Where.CLIENT,
    ),
    ErrorCode.FORBIDDEN: (Where.REQUEST, Where.FRAME, Where.REPLY),
    ErrorCode.MODEL_NOT_FOUND: (Where.REQUEST, Where.REPLY),
    ErrorCode.MODEL_NOT_RUNNING: (Where.REQUEST, Where.REPLY, Where.EVENT),
    ErrorCode.MODEL_FAILED: (Where.REQUEST, Where.REPLY, Where.EVENT),
    ErrorCode.OVERLOADED: (Where.REQUEST, Where.REPLY),
    ErrorCode.RATE_LIMITED: (Where.REQUEST, Where.CONNECTION),
    ErrorCode.DRAINING: (Where.REQUEST, Where.REPLY, Where.EVENT),
    ErrorCode.DEADLINE_EXCEEDED: (Where.EVENT,),
    ErrorCode.QUEUE_TIMEOUT: (Where.EVENT,),
    ErrorCode.SLOW_CONSUMER: (Where.EVENT,),
    ErrorCode.WORKER_DIED: (Where.EVENT, Where.REPLY),
    ErrorCode.POISONED: (Where.REQUEST, Where.EVENT),
    ErrorCode.HELPER_FAILED: (Where.EVENT, Where.REPLY),
    ErrorCode.INTERNAL: (Where.EVENT, Where.REPLY, Where.CLIENT),
    ErrorCode.CONNECTION_LOST: (Where.CLIENT,),
}
"""The places in which each error can appear."""


# One worker as ``status`` describes it. See ``protocol.results``.


class Totals(TypedDict):
    """Counts of a model since the supervisor's start."""

    tokens: Tokens
    """Generated tokens."""
    finished: int
    """Requests that ended as asked or were cancelled."""
    errors: int
    """Requests that ended with an error."""
    resumed: int
    """How often a request was resumed in another worker."""
    refused: int
    """Requests refused because of a full queue."""


class ReasoningMarkers(TypedDict):
    """The markers around a model's reasoning."""

    start: str
    """The marker before the reasoning."""
    end: str
    """The marker after the reasoning."""


class WorkerStatus(TypedDict):
    """One worker of a model. A value that is not known is null. A text without fixed values is for people."""

    name: str
    """The model's name, with a number if the model has several workers (`letters:2`)."""
    model: str
    """The model's name."""
    folder: str | None
    """The directory of `folders` in models.yaml that holds the model; null for a model with an entry."""
    state: str
    """As in [Model](#map-model)."""
    reason: str | None
    """The reason of the state, null if it needs none."""
    state_s: Seconds
    """Time in this state."""
    aliases: list[str]
    """As in [Model](#map-model)."""
    variants: list[str]
    """As in [Model](#map-model)."""
    unlisted: list[str]
    """As in [Model](#map-model)."""
    default: str | None
    """As in [Model](#map-model)."""
    description: str | None
    """As in [Model](#map-model)."""
    engine: str
    """The engine of models.yaml."""
    gpu: str
    """The GPUs that the process may see, or `cpu`."""
    device: str | None
    """The engine's name for its device."""
    attention: str | None
    """How the engine computes attention."""
    decoding: str | None
    """How the engine launches a step, and why not in the fastest way. Null if there is one way only."""
    context: Tokens | None
    """As in [Model](#map-model)."""
    max_batch_size: int | None
    """Requests computed at once, from models.yaml."""
    chat: bool | None
    """As in [Model](#map-model)."""
    makes: str | None
    """`vectors` or `scores`, for a model that writes no text. Null until a worker has loaded it."""
    template: str | None
    """What the worker changes in conversations for the chat template, or why the template renders none. Null if the
    template takes every conversation."""
    end_tokens: str | None
    """The tokens that end the answer to a conversation, with spaces between, by the model's files and its chat
    template."""
    tool_format: str | None
    """The format of tool calls."""
    parallel_tool_calls: bool | None
    """True if one answer may have several tool calls. False if the chat template shows only one."""
    reasoning: ReasoningMarkers | None
    """Null if the model does not reason."""
    active: int
    """Requests that the worker computes."""
    queued: int
    """Requests that wait for the model, or in a worker for a place in its batch."""
    tokens_per_s: Annotated[float, "tokens/s"]
    """Speed in the last second."""
    speeds: NotRequired[list[float]]
    """With `history`: the speed in each of the last 120 seconds, the newest last."""
    idle_s: Seconds | None
    """Time since the last request. Null unless the worker is ready or asleep and has no request."""
    until_s: Seconds | None
    """Time until the worker is unloaded if no request comes. Null if it will not be unloaded."""
    lazy: bool
    """True if the first request starts the worker."""
    can_sleep: bool
    """True if the verb `sleep` works: the engine and models.yaml allow it, and the worker has loaded."""
    host_bytes: Bytes
    """Host memory for the worker's sleep, held now or kept for the next sleep."""
    wake_s: Seconds | None
    """Time that the last wake took."""
    unloaded: str | None
    """Why the worker was put to sleep or unloaded."""
    pid: int | None
    """The process id."""
    node: str | None
    """The machine of the process, or `node` of models.yaml while there is no process. Null for the supervisor's own
    machine."""
    phase: str | None
    """What the process does: `starting`, `loading`, `idle`, `step`, `moving` (to sleep, or awake) or `unknown`."""
    beat_s: Seconds | None
    """Time since the process last made progress."""
    generation: int
    """The number of the process; it grows with each start."""
    restarts: int
    """Starts of the worker without an order."""
    load_seconds: Seconds | None
    """Time that the load took."""
    progress: dict[str, Any] | None
    """During a load, or while directories are copied to another machine: `phase`, `done`, `total`, their `unit` if
    known, and for copies `per_s` (bytes in a second)."""
    engine_stats: dict[str, Any]
    """The last reading: `pending`, `active`, `steps`, figures of the engine, and of all requests that this process
    finished `prompt_tokens` and `cached_tokens`."""
    totals: Totals
    """Counts of the worker's model."""
    last_exit: dict[str, Any] | None
    """The end of the last process: `code`, `reason`, `message`, `retry`, `lines` (the last of its log) and `time`
    (seconds since 1970)."""
    log: str
    """The path of the log."""
    placed: list[int] | None
    """The indices of the worker's GPUs."""
    cpus: str | None
    """The cores that the worker may use. Null: all."""
    numa_nodes: str | None
    """The NUMA nodes that the worker may use. Null: all."""
    vram_estimate_bytes: Bytes | None
    """GPU memory that the worker needs, estimated."""
    vram_estimate: dict[str, int] | None
    """The estimate by part, in bytes."""
    vram_loaded_bytes: Bytes | None
    """GPU memory that the process held when it became ready."""
    vram_bytes: Bytes | None
    """GPU memory that the process holds now, by NVML."""
    vram_by_gpu: dict[str, int | None] | None
    """GPU memory that the process holds now, in bytes, by GPU index."""
    vram_return: str | None
    """Whether the GPU memory of the last process is back: `awaited`, `back`, `not back` or `not watched`."""
    vram_returned_ms: MillisecondsFloat | None
    """Time until that memory was back."""
