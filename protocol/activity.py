"""The results of the verbs that show what goes on, such as ``requests``. See ``protocol.results``."""

from typing import Annotated, Any, NotRequired, TypedDict

from protocol.bodies import Milliseconds, Tokens


class RequestStatus(TypedDict):
    """One unfinished request."""

    id: str
    """The name of the request for `cancel_request`, such as `12-3`. No other request of this supervisor process ever
    has the same name."""
    model: str
    """The model's name."""
    worker: str | None
    """The worker that has the request, null if none has it."""
    key: str | None
    """The name of the key that asked for it, null for the supervisor's own user."""
    state: str
    """`queued` (waits for a worker, or in one for a place in its batch), `parked` (waits until its constraint is
    compiled), `running` (a worker computes it),
    `cancelling` (it was cancelled, and its worker has yet to let it go) or `delivering` (the worker has finished it,
    and the client has yet to read the last events)."""
    queue_position: int | None
    """In state `queued`, the approximate number of requests that will be started before this one; null otherwise."""
    age_ms: Milliseconds
    """The time since the request was accepted."""
    prompt_tokens: Tokens | None
    """The length of the prompt. Null until a worker begins to read it."""
    prompt_tokens_estimate: Tokens
    """The length of the prompt as the supervisor estimates it from its bytes."""
    tokens: Tokens
    """Tokens of the answer so far."""
    priority: str
    """The request's priority."""


class RequestsResult(TypedDict):
    """With the right `status` or `admin` all requests, otherwise those of the client's own key only."""

    requests: list[RequestStatus]
    """The requests, the oldest first."""
    total: int
    """The number of unfinished requests, of which `requests` holds at most `limit`."""


class HistoryEvent(TypedDict):
    """One event. Ignore a `kind` that you do not know."""

    number: int
    """The number of the event. The first event that a supervisor process knows has number 1, and there are no gaps."""
    time: Annotated[float, "s"]
    """The time of the event, in seconds since 1970 (UTC)."""
    kind: str
    """One of the kinds below."""
    level: str
    """`info`, `warning` or `error`."""
    model: str | None
    """The model that the event is about, null if it is about no model."""
    worker: str | None
    """The worker that the event is about, null if it is about no worker."""
    message: str
    """The event in words for people, as the supervisor's log has it. Its wording may change."""
    before: NotRequired[str]
    """With `state`: the state that the worker has left."""
    state: NotRequired[str]
    """With `state`: the state that the worker is in since this event."""
    reason: NotRequired[str]
    """With `state`: the cause of the change."""


class EventsResult(TypedDict):
    """The supervisor remembers the last 512 events, also those of the supervisors before it."""

    session: str
    """The random text of this supervisor process, see `session` in [WELCOME](#welcome). Another value than before means
    that the numbers began at 1 again: ask without `after`."""
    events: list[HistoryEvent]
    """The events, the oldest first."""
    last: int
    """The value of `after` with which the next call goes on behind these events."""
    newest: int
    """The number of the newest event, 0 if there is none."""
    dropped: bool
    """True if events after `after` are not remembered any more."""


class HistogramFigures(TypedDict):
    counts: list[int]
    """For each bound of the histogram the number of values that are at most that bound, and above the bound before.
    Last, the number of values above all bounds."""
    sum: float
    """The sum of all values."""


class ModelFigures(TypedDict):
    """What the ended requests of a model have taken, since the supervisor was started. Workers that die lose none."""

    oldest_waiting_s: Annotated[float, "s"]
    """The age of the oldest request that waits for a worker; 0 if none waits."""
    ends: dict[str, int]
    """Requests by their finish reason. `disconnected`: the client has gone."""
    errors: dict[str, int]
    """Requests that ended with an error, by its name."""
    tokens: dict[str, int]
    """Tokens: `prompt`, those of them that the cache had (`cached`), and speculated ones (`draft_accepted`,
    `draft_rejected`)."""
    keys: list[list[Any]]
    """For each key: its name (empty for the supervisor's own user), requests, tokens of prompts, tokens of answers. At
    most 65; keys beyond are counted together as `other`."""
    histograms: dict[str, HistogramFigures]
    """The histograms that have a value, by the name that vLLM gives the metric."""


class MetricsResult(TypedDict):
    """Together with `status` everything that the metrics are made of."""

    session: str
    """The random text of this supervisor process, see `session` in [WELCOME](#welcome)."""
    cpu_s: Annotated[float, "s"]
    """Processor time of the supervisor."""
    waited_s: Annotated[float, "s"]
    """The time in which the supervisor's loop had nothing to do."""
    events: dict[str, int]
    """Events of this supervisor process, by kind."""
    bounds: dict[str, list[float]]
    """The upper bounds of each histogram, ascending."""
    models: dict[str, ModelFigures]
    """The models that the caller may know of."""


class LogsResult(TypedDict):
    """One call returns at most 128 KiB of a log. A log that does not exist yet is empty."""

    lines: list[str]
    """The lines, the oldest first. Bytes that are not UTF-8 become U+FFFD. Control characters are left as they are."""
    unfinished: str
    """The beginning of a line that has no end yet, behind all other lines. It comes again with a later call."""
    position: str
    """The value of `after` with which the next call goes on behind these lines."""
    more: bool
    """True if further lines follow already: with `after`, a call returns the oldest lines first."""
    restarted: bool
    """True if the log of `after` is not there any more, since logs that are too long are moved away. Then the lines are
    the first ones of the present log."""


class ConfigSetting(TypedDict):
    """A key of models.yaml and its value."""

    key: str
    """The path of the key, such as `models.letters.gpu`."""
    value: str
    """The value as a line of YAML. Of a value with more than 400 characters, the beginning."""
    source: str
    """The place that the value comes from: `models.yaml:5`, a variable of the environment, or `default`."""
    line: int
    """The line in models.yaml; 0 if the value comes from elsewhere."""


class SettingsResult(TypedDict):
    settings: list[ConfigSetting]
    """Every key of the model, also one with its default, as models.yaml was when the supervisor last read it."""
    more: bool
    """True if there are more keys than fit into a reply."""


class ConfigProblem(TypedDict):
    """A fault of models.yaml. A reload changes nothing as long as there is one."""

    line: int
    """The line in models.yaml; 0 if the fault is that of the whole file or of another place."""
    place: str
    """The file, or the variable of the environment."""
    key: str
    """The path of the key, or an empty string."""
    message: str
    """What is wrong, and what to do."""


class ConfigChanges(TypedDict):
    """What a reload would change now."""

    settings: list[str]
    """Keys that differ, as in `turnovers` of `status`."""
    models: dict[str, str]
    """The models that differ, with their `change` as in `turnovers` of `status`."""


class ConfigResult(TypedDict):
    """The file is read and checked as for `reload`. The directories of models are not opened: `modelctl check` does."""

    file: str
    """The path of models.yaml."""
    text: str
    """Its content. Bytes that are not UTF-8 become `?`. Empty if it cannot be read, which `problems` say."""
    problems: list[ConfigProblem]
    """The faults, by their lines."""
    notes: list[str]
    """What was left out of files that give defaults, such as a tabby_config.yml."""
    settings: list[ConfigSetting]
    """The values that the file, the environment and the model's own directory set, as `modelctl config` prints them. At
    most 3000."""
    more: bool
    """True if there are more settings or faults than fit into a reply."""
    changes: ConfigChanges | None
    """What a reload would change; null if there are problems."""


class UsageCounts(TypedDict):
    """Counts of requests and tokens."""

    requests: int
    """Accepted requests."""
    prompt_tokens: Tokens
    """Tokens of prompts. A prompt counts when a worker begins to read it, and once, also if the answer is resumed."""
    cached_tokens: Tokens
    """Those tokens of prompts that the engine found in its cache. They count at the end of the answer."""
    completion_tokens: Tokens
    """Tokens of answers. A token counts when the supervisor sends it to the client."""


class UsageDay(UsageCounts):
    """The counts of a key and a model on one day."""

    day: str
    """The day (UTC) on which the requests were accepted."""
    key: str | None
    """The name of the key, null for requests without a key."""
    model: str
    """The name of the model, also for requests that named an alias or a variant."""


class UsageResult(TypedDict):
    """With the right `status` or `admin` the usage of all keys, otherwise that of the client's own key only."""

    rows: list[UsageDay]
    """The counts, the latest day first. At most 5000."""
    total: UsageCounts
    """The sums, also of rows that did not fit."""
    more: bool
    """True if there are more rows: ask for one key or model, or with a later `since`."""


# The results of the verbs that tell of ended requests: ``story``, ``ended_requests``. See ``protocol.results``.


Duration = Annotated[float, "ms"]


class StoryStep(TypedDict):
    """Something that happened to a request. Ignore a `step` that you do not know."""

    ms: Duration
    """The time since the request was accepted."""
    step: str
    """`accepted`, `placed` (a worker was given the request), `first_token`, `parked` (a worker compiles its constraint
    first), `compiled`, `worker_ended` (the process of its worker ended before the answer did), `cancelled` (somebody
    cancelled it) or `ended`."""
    queue_position: NotRequired[int]
    """With `accepted`: the approximate number of requests that were to be started before this one."""
    ready: NotRequired[bool]
    """With `accepted`: true if a worker of the model was ready, false if the request had to wait until one is loaded,
    or woken."""
    worker: NotRequired[str]
    """The name of the worker."""
    gpu: NotRequired[str]
    """The GPUs of the worker, such as `0, 1`, or `cpu`."""
    reason: NotRequired[str]
    """With `worker_ended`: why the process ended, in words for people."""


class RequestSummary(TypedDict):
    """Who sent a request, what it took, and how it ended. It never has the text of a prompt or of an answer."""

    id: str
    """The name of the request, as `requests` has it."""
    trace_ids: list[str]
    """The names that the client gave the request."""
    model: str
    """The model's name."""
    key: str | None
    """The name of the key that asked for it, null for the supervisor's own user."""
    priority: str
    """The request's priority."""
    finish_reason: str | None
    """Why the answer ended; `disconnected` if its client has gone. Null for a request that has not ended, or ended with
    an error."""
    error: str | None
    """The name of the error with which the request ended. Null for any other request."""
    error_message: str | None
    """The error in words for people. Where the message to the client may quote the request, it names only the option
    that was refused, or is null."""
    prompt_tokens: Tokens | None
    """The length of the prompt. Null until a worker begins to read it."""
    cached_tokens: Tokens | None
    """Tokens of the prompt that the engine had in its cache. Null until a worker has finished the answer."""
    tokens: Tokens
    """Tokens of the answer that were sent to the client."""
    resumes: int
    """How often the answer went on in another worker, or in a new process."""
    accepted: Annotated[float, "s"]
    """When the request was accepted, in seconds since 1970 (UTC)."""
    queue_ms: Duration | None
    """The time until a worker began to compute the request. If no worker has finished it, the time until a worker was
    given it; null if none was."""
    first_token_ms: Duration | None
    """The time until the first token came; null if none did."""
    total_ms: Duration | None
    """The time until the end; null for an unfinished request."""
    tokens_per_s: Annotated[float, "tokens/s"] | None
    """Tokens of the answer after the first one, by the time from the first one to the end, which is the worker's own if
    it is known. Null if there was one token or none, if they came within a millisecond, and for an unfinished
    request."""
    worker: str | None
    """The worker that was given the request last; null if none was."""


class Story(RequestSummary):
    """What became of one request."""

    notes: list[str]
    """What became of the options of the request: what the gateway has ignored (`ignored foo`) or changed (`changed
    images: 1`). Once the answer has ended, `changed max_tokens=3071` is added if the context has cut that option,
    `changed temperature=0.7` if the model has replaced that option by its `forced` value, and `ignored
    reasoning_budget` if the model does not reason."""
    state: str
    """`ended`, or the state of an unfinished request, as `requests` has it."""
    prompt_tokens_estimate: Tokens
    """The length of the prompt as the supervisor estimates it from its bytes."""
    steps: list[StoryStep]
    """What happened, in order. At most 50 steps, the first token, and the end."""
    events: list[HistoryEvent]
    """The events of the model while the request was unfinished, such as a load or the death of a worker. At most 50.
    They take the right `status` or `admin`; without it the list is empty."""


class StoryResult(TypedDict):
    """The supervisor remembers the last 2000 requests that have ended. It refuses a name that it does not know, or of
    which the client may not know: without the right `status` or `admin`, only requests of its own key are shown."""

    requests: list[Story]
    """The requests of that name, the oldest first. There are several if one HTTP request asks for several answers. At
    most 100."""


class EndedRequest(RequestSummary):
    """One request that has ended."""

    number: int
    """The number of the request. The first request that has ended in a supervisor process has number 1."""


class EndedRequestsResult(TypedDict):
    """With the right `status` or `admin` all requests, otherwise those of the client's own key only. They are among the
    last 2000 that have ended in this supervisor process. A request that was refused is not among them."""

    session: str
    """The random text of this supervisor process, see `session` in [WELCOME](#welcome). Another value than before means
    that the numbers began at 1 again: ask without `after`."""
    requests: list[EndedRequest]
    """The newest requests, the oldest of them first."""
    last: int
    """The value of `after` with which the next call goes on behind these requests."""
    dropped: bool
    """True if requests after `after` may be missing, because of `limit` or because they are not remembered any more."""
