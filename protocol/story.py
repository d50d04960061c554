"""The results of the verbs that tell of ended requests: ``story``, ``ended_requests``. See
``protocol.results``."""

from typing import Annotated, NotRequired, TypedDict

from protocol.activity import HistoryEvent
from protocol.bodies import Tokens

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
