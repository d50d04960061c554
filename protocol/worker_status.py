"""One worker as ``status`` describes it. See ``protocol.results``."""

from typing import Annotated, Any, NotRequired, TypedDict

from protocol.bodies import Bytes, MillisecondsFloat, Seconds, Tokens


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
