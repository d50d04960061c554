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
    """Share of the workers while other requests wait: ``interactive`` requests get most, ``batch`` requests least."""
    queue_ms: int
    """Longest wait for a worker, and in it for a place in its batch. A request that waits longer ends with
    ``queue_timeout``."""
    ttft_ms: int
    """Longest time to the first token. A request that takes longer ends with ``deadline_exceeded``."""
    deadline_ms: int
    """Longest time to the end of the answer. A request that takes longer ends with ``deadline_exceeded``."""
    affinity: str
    """Requests with the same text here go to the same worker, where their prefix is in the cache. If this is not set,
    the beginning of the prompt is used."""
    progress: bool
    """Report the place in the queue, and how far the load and the prompt are, until the first token."""
    keep_alive: float | str
    """Unload a lazy model when it has had no request for so long, as in Ollama. It replaces the model's `ttl` until the
    model is unloaded, or another request sets it. A key needs `--keep-alive` for it."""
    ttl: int
    """As `keep_alive`, by the name that LM Studio has for it: whole seconds."""
    on_behalf_of: str
    """Send the request for the HTTP key with this id. Its rights, models, limits and place in the queue apply. Only
    connections over ipc, and keys with the right ``gateway``, may give it."""
    trace_ids: list[str]
    """Names of the request, such as the id of the HTTP request that it belongs to. The verb ``story`` finds the request
    by them."""
    notes: list[str]
    """What the sender of the request has to know, such as an option that a gateway has ignored or changed. The verb
    ``story`` shows it."""


class Model(TypedDict):
    """A model as clients see it. If the model has several workers, the values are those of the worker that is nearest
    to `ready`."""

    name: str
    """The name that GENERATE takes."""
    state: str
    """One of the states below."""
    context: Tokens | None
    """The longest prompt and answer together; null until a worker has loaded the model."""
    chat: bool | None
    """True if the model has a chat template, so that requests may hold `messages`. Null until a worker has loaded the
    model."""
    tools: bool | None
    """True if the format in which the model calls tools is known, so that its calls can be told from text. Null until a
    worker has loaded the model."""
    unloads: bool
    """True if the model is unloaded after a time without requests, which `keep_alive` of a request may set: it is lazy,
    and not pinned."""
    aliases: list[str]
    """Further names of the model. GENERATE and CALL take them like its name."""
    variants: list[str]
    """The variants of the model. GENERATE reaches the variant `precise` as `NAME:precise`, with the name or an alias
    before the colon."""
    unlisted: list[str]
    """Those of its names and variants that lists for people leave out: `listed: false` in models.yaml."""
    default: str | None
    """The name for which a request without a model stands (`default_model` of models.yaml), if it is a name of this
    model; else null."""
    description: str | None
    """The model's `description` of models.yaml, in one line for people. Null if it has none."""


class WelcomeBody(TypedDict):
    """Facts about the supervisor that a client needs."""

    server: str
    """Name and version of the supervisor, for people: `modelctl 0.1.0`."""
    session: str
    """A random text that the supervisor draws when it starts. It is the same for all its connections, so another value
    after a reconnect means another supervisor process."""
    window: Events
    """The credit with which each stream starts, and the most that one CREDIT grants."""
    max_frame: Bytes
    """The largest frame that the socket takes. libzmq ends the connection of a client that sends a larger one. The
    limits per kind are lower."""
    models: list[Model]
    """The models that are configured now, as the verb `models` returns them."""


class AcceptedBody(TypedDict):
    """The place of the request in its queue."""

    model: str
    """The name of the model itself, also if the request has named an alias, a variant or nothing."""
    queue_position: int
    """The approximate number of requests that will be started before this one. 0 means that this one is next."""


class ReportBody(TypedDict):
    """The progress of a request. Ignore a `phase` that you do not know."""

    phase: str
    """`queued` (waits for a worker), `loading` (its model is being loaded), `compiling` (its constraint is being
    compiled) or `prefill` (its prompt is being computed)."""
    queue_position: NotRequired[int]
    """With `queued`: the number of requests before this one. 0 means that this one is next."""
    waits_for: NotRequired[str]
    """With `queued`, while the model cannot be loaded because busy models are in the way: what it waits for, in words,
    such as `llama to finish 2 requests`. Models that the client may not use have no name there."""
    part: NotRequired[str]
    """With `loading`: the engine's name for the part of the load, such as `loading` or `warmup`. Before that,
    `checking model` or `copying model`, while another machine copies the model's directories."""
    done: NotRequired[int]
    """With `loading` and `prefill`: the amount that is done. `prefill` counts tokens. `loading` counts in a unit that
    the engine chooses."""
    total: NotRequired[int]
    """With `loading` and `prefill`: the value of `done` at the end of this part."""
    unit: NotRequired[str]
    """With `loading`: the unit of `done` and `total`, such as `bytes`, if it is known."""
    per_s: NotRequired[int]
    """With `loading`, while directories are copied: bytes in a second."""


class GoAwayBody(TypedDict):
    """The reason for which the supervisor takes no new requests."""

    reason: str
    """The reason, in words for people."""


class RefusedFrame(TypedDict):
    """The elements of a refused frame that could be read."""

    kind: NotRequired[int]
    """The second element of the frame. Missing if the element is no kind of this version."""
    number: NotRequired[int]
    """The third element of the frame, if it is the number of a request or call. Missing otherwise."""


class Failure(TypedDict):
    """An error. It is the same map in ERROR, in REPLY and in the terminal event of a request."""

    code: int
    """The stable number, see the table of errors. Treat a code that you do not know as `internal`."""
    name: str
    """The name that belongs to the code."""
    message: str
    """A text for people that says what is wrong and what to do. It holds no prompt, no answer and no key. Its wording
    may change."""
    retryable: bool
    """True if the same request may succeed later."""
    field: NotRequired[str]
    """The key that is wrong: a key of the body, `route.` and a key of the route, or an element of the frame."""
    retry_after_ms: NotRequired[Milliseconds]
    """The time after which a retry may help. Wait at least this long."""
    prompt_tokens: NotRequired[Tokens]
    """The tokens of the prompt, with `context_overflow`. Missing if they were not counted."""
    context: NotRequired[Tokens]
    """The tokens of the model's context. It is there if `prompt_tokens` is."""


class ErrorBody(Failure):
    """An error, and the frame that it answers."""

    refused: NotRequired[RefusedFrame]
    """With request 0 only: the frame that the error answers. Missing if the error is about the connection itself."""


class ReplyBody(TypedDict):
    """The answer to a CALL. It has exactly one of the two keys."""

    result: NotRequired[dict[str, Any]]
    """The result of the verb."""
    error: NotRequired[Failure]
    """The error, if the call failed."""


class Usage(TypedDict):
    """Counts of tokens."""

    prompt_tokens: Tokens
    """Tokens of the prompt. 0 if the request ended before a worker had read the prompt."""
    completion_tokens: Tokens
    """Tokens of the answer."""
    cached_tokens: NotRequired[Tokens]
    """Tokens of the prompt that the engine found in its cache. Missing if 0."""
    draft_accepted: NotRequired[Tokens]
    """Speculated tokens that were right. This count and the next one are missing if nothing was speculated."""
    draft_rejected: NotRequired[Tokens]
    """Speculated tokens that were wrong."""
    resumes: NotRequired[int]
    """The number of times that the answer was resumed in another worker. Missing if 0."""


class Timings(TypedDict):
    """Measured times. If the answer was resumed in another worker, `prefill_ms`, `decode_ms` and `tokens_per_s` are
    those of the last worker. A value that was not measured is missing."""

    queue_ms: NotRequired[MillisecondsFloat]
    """The time from ACCEPTED until a worker began to compute the request. If the answer was resumed, the time between
    two workers is not part of it."""
    prefill_ms: NotRequired[MillisecondsFloat]
    """The time from the start in the engine to the first token."""
    decode_ms: NotRequired[MillisecondsFloat]
    """The time from the first token to the end."""
    tokens_per_s: NotRequired[Annotated[float, "tokens/s"]]
    """The speed of decoding. The first token is not counted."""


class AnswerFormat(TypedDict):
    """The way in which a model writes reasoning and calls of tools."""

    tools: str | None
    """The name of the format of calls, such as `hermes`. Null if it is not known."""
    headers: NotRequired[str]
    """The name of the format whose headers stand in the answer, if `tools` is null because of `tool_format: off`."""
    reasoning: list[str] | None
    """The markers before and behind the reasoning. Null if the model does not reason, or its markers are not known."""
    inside: bool
    """True if the prompt ended within the reasoning, so that the answer begins within it."""


class PromptLogprobsPiece(TypedDict):
    """Log-probabilities of some neighbouring tokens of a prompt, packed: a long prompt has many."""

    first: int
    """The number of the first of these tokens in the prompt, counted from 0."""
    top: int
    """The number of likeliest tokens at each place. It is `prompt_logprobs`, or the size of the vocabulary."""
    ids: bytes
    """Token ids, u32, little endian: for each of the tokens its own id, then `top` ids of the likeliest tokens at its
    place, best first."""
    logprobs: bytes
    """The log-probabilities of `ids`, in their order: floats of 32 bits, little endian. One may be minus infinity."""
    before: int
    """The id of the token before the first of these tokens."""
    known: bytes
    """The distinct ids in `ids` and `before`, ascending: u32, little endian."""
    bytes: list[bytes]
    """What each of `known` adds to the text, as in `logprobs` of a delta."""


class DeltaEvent(TypedDict):
    """The map of an event without a terminal flag."""

    text: str
    """New text, in whole characters. It may be empty although the event has ids. Text that may begin a stop string, and
    bytes of an incomplete character, come with a later event."""
    logprobs: NotRequired[list[list[Any]]]
    """If the request asked for `logprobs`: one entry `[logprob, bytes, top]` for each id of the event. `logprob`, a
    float, is the natural logarithm of the token's probability by the model alone, before penalties, bias and
    temperature. `bytes`, a bin, is what the token adds to the text: UTF-8, of which a character may be incomplete.
    `top`, an array, holds the likeliest tokens at this place, best first, each as `[id, logprob, bytes]`."""
    prompt_logprobs: NotRequired[PromptLogprobsPiece]
    """If the request asked for `prompt_logprobs`. Such events come before all events with tokens, in the order of the
    prompt. Each has the next tokens up to one whose number is a multiple of 256, and no text and no ids of its own. A
    prompt of one token has one such event, without tokens."""
    format: NotRequired[AnswerFormat]
    """With the first event of an answer, if the request asked `with_format`."""
    prompt_tokens: NotRequired[Tokens]
    """Tokens of the prompt, with the first event of an answer, if the request asked `with_format`."""
    left_out: NotRequired[list[str]]
    """With the first event of an answer: options that the worker did without, as the request allows it
    (`budget_if_reasoning`)."""
    max_tokens: NotRequired[Tokens]
    """With the first event of an answer, if `cut_to_context` has cut the request's `max_tokens`: the most tokens that
    the answer can have."""
    forced: NotRequired[dict[str, float | None]]
    """With the first event of an answer: options of the request that the model's `forced` values have replaced, with
    the value that counts. Null stands for a value that is no number and no switch."""


class FinishedEvent(TypedDict):
    """The map of the event flagged FINISHED. The event may hold the last ids and the last text."""

    text: NotRequired[str]
    """The last text. Append it to the answer."""
    logprobs: NotRequired[list[list[Any]]]
    """Log-probabilities of the last ids, in the form that a delta has."""
    format: NotRequired[AnswerFormat]
    """If the request asked `with_format`, and the answer has no other event."""
    prompt_tokens: NotRequired[Tokens]
    """If the request asked `with_format`, and the answer has no other event: as `usage` has it."""
    left_out: NotRequired[list[str]]
    """Options that the worker did without, as the request allows it (`budget_if_reasoning`)."""
    max_tokens: NotRequired[Tokens]
    """If `cut_to_context` has cut the request's `max_tokens`: the most tokens that the answer could have."""
    forced: NotRequired[dict[str, float | None]]
    """Options of the request that the model's `forced` values have replaced, with the value that counted. Null stands
    for a value that is no number and no switch."""
    finish_reason: str
    """The reason why the answer ended. The values are listed below."""
    stop_string: NotRequired[str]
    """The stop string that ended the answer. Missing if no stop string has."""
    usage: Usage
    """Counts of tokens."""
    timings: Timings
    """Measured times."""


class ErrorEvent(TypedDict):
    """The map of the event flagged ERROR."""

    error: Failure
    """The error that ended the request."""
    delivered_tokens: NotRequired[Tokens]
    """The number of ids in all earlier events of this request."""


class Where(StrEnum):
    """A place in which an error can appear."""

    REQUEST = "ERROR of the request"
    """The answer to a GENERATE that is refused. It comes instead of ACCEPTED."""
    FRAME = "ERROR of request 0, with `refused`"
    """The answer to a frame that is neither a CALL nor a GENERATE with a free number."""
    CONNECTION = "ERROR of request 0, without `refused`"
    """The connection ends."""
    REPLY = "REPLY"
    """The answer to a CALL."""
    EVENT = "error event"
    """The end of a request that was accepted."""
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
    """Tokens that were generated."""
    finished: int
    """Requests that ended as asked, or were cancelled."""
    errors: int
    """Requests that ended with an error."""
    resumed: int
    """The number of times that a request was resumed in another worker."""
    refused: int
    """Requests that were refused because the queue was full."""


class ReasoningMarkers(TypedDict):
    """The markers between which a model writes its reasoning."""

    start: str
    """The marker before the reasoning."""
    end: str
    """The marker behind the reasoning."""


class WorkerStatus(TypedDict):
    """One worker of a model. A value that is not known is null."""

    name: str
    """The worker's name: that of its model, with a number if there are several (`letters:2`)."""
    model: str
    """The model's name."""
    folder: str | None
    """The directory of `folders` in models.yaml below which the model was found; null for a model with an entry."""
    state: str
    """One of the states below."""
    reason: str | None
    """The reason for this state, for people. Null in a state that needs no reason."""
    state_s: Seconds
    """The time since the worker entered this state."""
    aliases: list[str]
    """Further names of the model."""
    variants: list[str]
    """The variants of the model."""
    unlisted: list[str]
    """Those of its names and variants that lists for people leave out."""
    default: str | None
    """The name for which a request without a model stands, if it is a name of this model."""
    description: str | None
    """The model's description of models.yaml."""
    engine: str
    """The engine of models.yaml."""
    gpu: str
    """The GPUs that the worker's process may see, or `cpu`."""
    device: str | None
    """The engine's name for the device that it runs on."""
    attention: str | None
    """The engine's way to compute attention."""
    decoding: str | None
    """The engine's way to launch a step, and the reason if that is not the fastest. Null if there is only one."""
    context: Tokens | None
    """The longest prompt and answer together."""
    max_batch_size: int | None
    """The number of requests that are computed at once, from models.yaml."""
    chat: bool | None
    """True if the model has a chat template."""
    template: str | None
    """What the worker changes in conversations for the model's chat template, for people, or why the template renders
    none. Null if the template takes every conversation."""
    end_tokens: str | None
    """The tokens that end the answer to a conversation, separated by spaces: those that the model's files name, and
    those that the chat template writes behind the assistant's words. Null until the model is loaded."""
    tool_format: str | None
    """The name of the format in which the model writes calls of tools; null if it is not known."""
    parallel_tool_calls: bool | None
    """True if one answer may have several calls. False if the chat template shows only one."""
    reasoning: ReasoningMarkers | None
    """The markers of the model's reasoning; null if it does not reason."""
    active: int
    """Requests that the worker computes."""
    queued: int
    """Requests that wait for the model, those included that wait in a worker for a place in its batch."""
    tokens_per_s: Annotated[float, "tokens/s"]
    """The worker's speed in the last second."""
    speeds: NotRequired[list[float]]
    """The worker's speed in each of the last two minutes' seconds, the newest one last, if `history` was true."""
    idle_s: Seconds | None
    """The time since the worker's last request; null unless the worker is ready or asleep and has no request."""
    until_s: Seconds | None
    """The time until the worker is unloaded if no request comes; null if it will not be unloaded."""
    lazy: bool
    """True if the first request starts the worker."""
    can_sleep: bool
    """True if the verb `sleep` can put the worker to sleep. It depends on the engine and on models.yaml.
    False until the worker has loaded, since only its engine knows."""
    host_bytes: Bytes
    """Host memory that the worker takes because it sleeps, or that it keeps for its next sleep."""
    wake_s: Seconds | None
    """The time that the worker's last wake took."""
    unloaded: str | None
    """The reason why the worker was put to sleep or unloaded, for people."""
    pid: int | None
    """The process id of the worker."""
    node: str | None
    """The name of the machine on which the process runs, or `node` of models.yaml while no process does; null for the
    supervisor's own."""
    phase: str | None
    """The work that the worker's process does: `starting`, `loading`, `idle`, `step`, `moving` (to sleep, or awake), or
    `unknown`."""
    beat_s: Seconds | None
    """The time since the supervisor last saw the worker's process make progress."""
    generation: int
    """The number of the worker's process; it grows with each start."""
    restarts: int
    """The number of times that the worker was started again without an order."""
    load_seconds: Seconds | None
    """The time that the load took."""
    progress: dict[str, Any] | None
    """While the worker loads the model, or its directories are copied to another machine: `phase`, `done`, `total` and
    the `unit` of both, if it is known, such as `bytes`. While they are copied, also `per_s`: bytes in a second."""
    engine_stats: dict[str, Any]
    """The worker's last reading: `pending`, `active`, `steps`, and further figures of the engine. `prompt_tokens`
    counts the tokens of the prompts of all requests that this process has finished, and `cached_tokens` how many of
    them the cache had."""
    totals: Totals
    """Counts of the worker's model."""
    last_exit: dict[str, Any] | None
    """The end of the worker's last process: `code`, `reason`, `message`, `retry`, `lines` (the last of its log) and
    `time` (in seconds since 1970)."""
    log: str
    """The path of the worker's log."""
    placed: list[int] | None
    """Indices of the GPUs that the worker was placed on."""
    cpus: str | None
    """The cores that the worker may use; null is all."""
    numa_nodes: str | None
    """The NUMA nodes that the worker may use; null is all."""
    vram_estimate_bytes: Bytes | None
    """The estimated need of GPU memory."""
    vram_estimate: dict[str, int] | None
    """The estimate by part, in bytes."""
    vram_loaded_bytes: Bytes | None
    """GPU memory that the worker held when it was ready, measured."""
    vram_bytes: Bytes | None
    """GPU memory that the worker's process holds now, by NVML."""
    vram_by_gpu: dict[str, int | None] | None
    """GPU memory that the worker's process holds now, in bytes, by GPU index."""
    vram_return: str | None
    """The return of the memory of the worker's last process: `awaited`, `back`, `not back` or `not watched`."""
    vram_returned_ms: MillisecondsFloat | None
    """The time until that memory was back."""
