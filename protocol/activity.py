"""The results of the verbs that show what goes on, such as ``requests``. See ``protocol.results``."""

from typing import Annotated, Any, NotRequired, TypedDict

from protocol.bodies import Milliseconds, Tokens


class RequestStatus(TypedDict):
    """One unfinished request."""

    id: str
    """The name of the request, such as `12-3`. A supervisor process never uses a name twice."""
    model: str
    """The model's name."""
    worker: str | None
    """The worker that has the request."""
    key: str | None
    """The name of the key that sent it, null for the supervisor's own user."""
    state: str
    """`queued` (waits for a worker, or in one for a place in its batch), `parked` (waits for its constraint to be
    compiled), `running` (a worker computes it), `cancelling` (cancelled, but still in its worker) or `delivering`
    (finished, but the client has not read the last events)."""
    queue_position: int | None
    """With `queued`: the approximate number of requests that start before this one."""
    age_ms: Milliseconds
    """Time since the request was accepted."""
    prompt_tokens: Tokens | None
    """Null until a worker reads the prompt."""
    prompt_tokens_estimate: Tokens
    """The supervisor's estimate from the prompt's bytes."""
    tokens: Tokens
    """Tokens of the answer so far."""
    priority: str
    """The request's priority."""


class RequestsResult(TypedDict):
    """All requests with the right `status` or `admin`, otherwise those of the client's own key."""

    requests: list[RequestStatus]
    """The oldest first."""
    total: int
    """The number of unfinished requests, also beyond `limit`."""


class HistoryEvent(TypedDict):
    """An event. Ignore a `kind` that you do not know."""

    number: int
    """The number of the event: 1, 2 and so on in each supervisor process."""
    time: Annotated[float, "s"]
    """Seconds since 1970 (UTC)."""
    kind: str
    """One of the kinds below."""
    level: str
    """`info`, `warning` or `error`."""
    model: str | None
    """The model of the event, null for none."""
    worker: str | None
    """The worker of the event, null for none."""
    message: str
    """The event for people, as in the supervisor's log. The wording may change."""
    before: NotRequired[str]
    """With `state`: the state that the worker left."""
    state: NotRequired[str]
    """With `state`: the worker's new state."""
    reason: NotRequired[str]
    """With `state`: the cause."""


class EventsResult(TypedDict):
    """The supervisor remembers the last 512 events, also those of earlier supervisor processes."""

    session: str
    """As in [WELCOME](#welcome). After a change numbers begin at 1 again: ask without `after`."""
    events: list[HistoryEvent]
    """The oldest first."""
    last: int
    """`after` of the next call."""
    newest: int
    """The number of the newest event, 0 if there is none."""
    dropped: bool
    """True if events after `after` are forgotten."""


class HistogramFigures(TypedDict):
    counts: list[int]
    """For each bound: values up to that bound and above the bound before. Last, values above all bounds."""
    sum: float
    """The sum of all values."""


class ModelFigures(TypedDict):
    """Counts of a model's ended requests since the supervisor's start, also those of workers that died."""

    oldest_waiting_s: Annotated[float, "s"]
    """The age of the oldest request that waits for a worker; 0 if none waits."""
    ends: dict[str, int]
    """Requests by finish reason; `disconnected`: the client was gone."""
    errors: dict[str, int]
    """Requests that ended with an error, by its name."""
    tokens: dict[str, int]
    """`prompt`, `cached` (those of the prompts in the cache), `draft_accepted` and `draft_rejected` (speculated)."""
    keys: list[list[Any]]
    """For each key: name (empty for the supervisor's own user), requests, tokens of prompts, tokens of answers. At most
    65; further keys together are `other`."""
    histograms: dict[str, HistogramFigures]
    """The histograms that have a value, by vLLM's name of the metric."""


class MetricsResult(TypedDict):
    """The figures of the metrics that `status` does not have."""

    session: str
    """As in [WELCOME](#welcome)."""
    cpu_s: Annotated[float, "s"]
    """Processor time of the supervisor."""
    waited_s: Annotated[float, "s"]
    """Time in which the supervisor's loop was idle."""
    events: dict[str, int]
    """Events of this supervisor process, by kind."""
    bounds: dict[str, list[float]]
    """The upper bounds of each histogram, ascending."""
    models: dict[str, ModelFigures]
    """The models that the client may know of."""


class LogsResult(TypedDict):
    """At most 128 KiB of a log. A log that does not exist yet is empty."""

    lines: list[str]
    """The oldest first. Bytes that are not UTF-8 become U+FFFD. Control characters stay."""
    unfinished: str
    """A last line without an end so far. A later call returns it again."""
    position: str
    """`after` of the next call."""
    more: bool
    """True if more lines follow already."""
    restarted: bool
    """True if the log of `after` was moved away because of its size. `lines` are then the first of the new log."""


class ConfigSetting(TypedDict):
    """A key of models.yaml."""

    key: str
    """The path, such as `models.letters.gpu`."""
    value: str
    """One line of YAML; the beginning if it has more than 400 characters."""
    source: str
    """Where the value comes from: `models.yaml:5`, a variable of the environment, or `default`."""
    line: int
    """The line in models.yaml, 0 for another source."""


class SettingsResult(TypedDict):
    settings: list[ConfigSetting]
    """Every key of the model, with or without a value in models.yaml, as the supervisor last read the file."""
    more: bool
    """True if not all keys fit."""


class ConfigProblem(TypedDict):
    """A fault of models.yaml. Any fault stops a reload."""

    line: int
    """The line in models.yaml; 0 for the whole file or another place."""
    place: str
    """The file, or the variable of the environment."""
    key: str
    """The path of the key, or empty."""
    message: str
    """What is wrong and what to do."""


class ConfigChanges(TypedDict):
    """What a reload would change now, in the form of `turnovers` of `status`."""

    settings: list[str]
    """Keys that differ."""
    models: dict[str, str]
    """The `change` of each model that differs."""


class ConfigResult(TypedDict):
    """The file is checked as for `reload`. The models' directories are not opened; `modelctl check` opens them."""

    file: str
    """The path of models.yaml."""
    text: str
    """The content; bytes that are not UTF-8 become `?`. Empty if the file cannot be read."""
    problems: list[ConfigProblem]
    """The faults, by line."""
    notes: list[str]
    """What was ignored in files that give defaults, such as a tabby_config.yml."""
    settings: list[ConfigSetting]
    """The values from the file, the environment and the model's directory, as `modelctl config` prints them. At most
    3000."""
    more: bool
    """True if not all settings or faults fit."""
    changes: ConfigChanges | None
    """Null if there are problems."""


class UsageCounts(TypedDict):
    """Counts of requests and tokens."""

    requests: int
    """Accepted requests."""
    prompt_tokens: Tokens
    """Tokens of prompts, counted once when a worker begins to read the prompt."""
    cached_tokens: Tokens
    """Those of them in the engine's cache, counted at the end of the answer."""
    completion_tokens: Tokens
    """Tokens of answers, counted when the supervisor sends them."""


class UsageDay(UsageCounts):
    """The counts of one key and model on one day."""

    day: str
    """The day (UTC) on which the requests were accepted."""
    key: str | None
    """The name of the key, null without a key."""
    model: str
    """The model's own name, also for aliases and variants."""


class UsageResult(TypedDict):
    """The usage of all keys with the right `status` or `admin`, otherwise that of the client's own key."""

    rows: list[UsageDay]
    """The latest day first. At most 5000."""
    total: UsageCounts
    """The sums, also of rows that did not fit."""
    more: bool
    """True if rows are missing: ask for one key or model, or a later `since`."""


# The results of the verbs that tell of ended requests: ``story``, ``ended_requests``. See ``protocol.results``.


Duration = Annotated[float, "ms"]


class StoryStep(TypedDict):
    """A step of a request. Ignore a `step` that you do not know."""

    ms: Duration
    """Time since the request was accepted."""
    step: str
    """`accepted`, `placed` (a worker got the request), `first_token`, `parked` (a worker compiles its constraint
    first), `compiled`, `worker_ended` (its worker's process ended before the answer did), `cancelled` or `ended`."""
    queue_position: NotRequired[int]
    """With `accepted`: the approximate number of requests that start before this one."""
    ready: NotRequired[bool]
    """With `accepted`: true if a worker was ready, false if one has to be loaded or woken."""
    worker: NotRequired[str]
    """The name of the worker."""
    gpu: NotRequired[str]
    """The worker's GPUs, such as `0, 1`, or `cpu`."""
    reason: NotRequired[str]
    """With `worker_ended`: why the process ended, for people."""


class RequestSummary(TypedDict):
    """A request, without any text of its prompt or answer."""

    id: str
    """As in [RequestStatus](#map-requeststatus)."""
    trace_ids: list[str]
    """The client's names of the request."""
    model: str
    """The model's name."""
    key: str | None
    """As in [RequestStatus](#map-requeststatus)."""
    priority: str
    """The request's priority."""
    finish_reason: str | None
    """Why the answer ended; `disconnected` if the client was gone. Null after an error, and for an unfinished
    request."""
    error: str | None
    """The name of the error that ended the request, else null."""
    error_message: str | None
    """The error for people. If the client's message may quote the request, this text only names the refused option, or
    is null."""
    prompt_tokens: Tokens | None
    """Null until a worker reads the prompt."""
    cached_tokens: Tokens | None
    """Tokens of the prompt in the engine's cache. Null until a worker finished the answer."""
    tokens: Tokens
    """Tokens sent to the client."""
    resumes: int
    """How often the answer was resumed in another process."""
    accepted: Annotated[float, "s"]
    """When the request was accepted: seconds since 1970 (UTC)."""
    queue_ms: Duration | None
    """Time until a worker began to compute the request; if no worker finished it, until a worker got it. Null if none
    did."""
    first_token_ms: Duration | None
    """Time until the first token, null without one."""
    total_ms: Duration | None
    """Time until the end, null for an unfinished request."""
    tokens_per_s: Annotated[float, "tokens/s"] | None
    """Tokens after the first one, by the time from the first one to the end, measured by the worker if possible. Null
    for fewer than two tokens, for less than a millisecond, and for an unfinished request."""
    worker: str | None
    """The last worker that got the request."""


class Story(RequestSummary):
    """What became of one request."""

    notes: list[str]
    """Options that the gateway ignored (`ignored foo`) or changed (`changed images: 1`). After the end also options
    changed by the context (`changed max_tokens=3071`) or by the model's `forced` values (`changed temperature=0.7`),
    and `ignored reasoning_budget` for a model that does not reason."""
    state: str
    """`ended`, or the state in [RequestStatus](#map-requeststatus)."""
    prompt_tokens_estimate: Tokens
    """The supervisor's estimate from the prompt's bytes."""
    steps: list[StoryStep]
    """In order: at most 50 steps, the first token, and the end."""
    events: list[HistoryEvent]
    """The model's events during the request, such as a load or a death. At most 50, and none without the right `status`
    or `admin`."""


class StoryResult(TypedDict):
    """The supervisor remembers the last 2000 ended requests. It refuses an unknown name. Without the right `status` or
    `admin` the client may only see requests of its own key; other names are unknown."""

    requests: list[Story]
    """The requests of that name, the oldest first. One HTTP request may ask for several answers. At most 100."""


class EndedRequest(RequestSummary):
    """One request that has ended."""

    number: int
    """The number of the request: 1 for the first one that ended in a supervisor process."""


class EndedRequestsResult(TypedDict):
    """All requests with the right `status` or `admin`, otherwise those of the client's own key, among the last 2000
    that ended in this supervisor process. Refused requests are not among them."""

    session: str
    """As in [WELCOME](#welcome). After a change numbers begin at 1 again: ask without `after`."""
    requests: list[EndedRequest]
    """The newest requests, the oldest of them first."""
    last: int
    """`after` of the next call."""
    dropped: bool
    """True if requests after `after` may be missing, because of `limit` or because they are forgotten."""
