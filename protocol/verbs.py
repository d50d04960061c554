"""The verbs of CALL: one table, which the supervisor, the gateway, the clients and the documentation read.

A verb is an entry of ``VERBS``, a class with its parameters, and the method of its name of the supervisor's class
``Calls``. For a verb that a worker answers, that method hands the question on, and ``protocol.chat`` has its body.

Every verb also takes the parameter ``on_behalf_of``, see ``protocol.messages.Call``.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Annotated, Any, Final, NotRequired, TypedDict

from protocol.limits import MAX_U64
from protocol.values import ReadWith, Within, hints_of, required_of


class Right(StrEnum):
    """A right of a key. No right includes another one. But a key that may give orders may also see their results."""

    INFER = "infer"
    """Send requests, and ask a model's tokenizer."""
    STATUS = "status"
    """See the supervisor, its models and its GPUs."""
    ADMIN = "admin"
    """Start and stop models, reload, shut down, and make, change and revoke keys."""
    GATEWAY = "gateway"
    """Send requests and calls for HTTP keys, with ``on_behalf_of``."""


ANY: Final = frozenset(Right)
INFER: Final = frozenset({Right.INFER})
ADMIN: Final = frozenset({Right.ADMIN})
SEES_ALL: Final = frozenset({Right.STATUS, Right.ADMIN})
"""Rights to see what concerns other keys, too. One of them is enough."""


class ModelScope(Enum):
    """The models that a call concerns if it names none, or if it names the supervisor or the gateway."""

    OWN = "own"
    """Those that the key may use. The answer tells of no other one."""
    ALL = "all"
    """All models. A key for some models may not call the verb so."""


Number = Annotated[int, Within(0, MAX_U64)]
_CHECKED_LATER: Final = ReadWith(lambda value: value)
"""Of a value that the supervisor checks with the rules of the list of keys."""


class NoParams(TypedDict):
    """An empty map."""


class ModelParams(TypedDict):
    model: str
    """A model, or one worker of several (`letters:2`)."""


class StatusParams(TypedDict):
    model: NotRequired[str]
    """A model, or one worker of several (`letters:2`). Unset: all models."""
    history: NotRequired[bool]
    """True: each worker has `speeds`."""


class RequestsParams(TypedDict):
    limit: NotRequired[Annotated[int, Within(1, 500)]]
    """Most requests in the result: 1 to 500, default 100."""


class EndedRequestsParams(TypedDict):
    after: NotRequired[Number]
    """The number of a request: only requests that ended after it."""
    limit: NotRequired[Annotated[int, Within(1, 1000)]]
    """Most requests in the result: 1 to 1000, default 100. Older ones are left out."""


class StoryParams(TypedDict):
    id: str
    """The `id` in `requests`, or one of the `trace_ids` in [GENERATE](#generate). The gateway's trace ids are the id of
    the HTTP request (`x-request-id`) and that of the answer (`chatcmpl-...`)."""


class EventsParams(TypedDict):
    model: NotRequired[str]
    """Only events of this model, also of one that left models.yaml. Unset: all events."""
    after: NotRequired[Number]
    """The number of an event: the oldest events after it. Unset: the newest events."""
    limit: NotRequired[Annotated[int, Within(1, 512)]]
    """Most events in the result: 1 to 512, default 100."""


class MetricsParams(TypedDict):
    model: NotRequired[str]
    """A model, or one worker of several (`letters:2`). Unset: all models."""


class UsageParams(TypedDict):
    key: NotRequired[str]
    """The name of a key; empty for requests without a key. Unset: all keys that the client may see."""
    model: NotRequired[str]
    """The name of a model. Unset: all models."""
    since: NotRequired[str]
    """The first day, such as `2026-01-31`. Unset: all days that are kept."""


class TokenizeParams(ModelParams):
    """Give exactly one of `prompt` and `messages`. Keys with the name of an option of GENERATE mean the same."""

    prompt: NotRequired[str]
    """The text."""
    messages: NotRequired[list[dict[str, Any]]]
    """The conversation, for the chat template."""
    tools: NotRequired[list[dict[str, Any]]]
    """The functions that the assistant may call."""
    template_kwargs: NotRequired[dict[str, Any]]
    """Variables of the template."""
    add_generation_prompt: NotRequired[bool]
    """True: the text ends where the assistant speaks next."""
    continue_final_message: NotRequired[bool]
    """True: the answer continues the last message."""
    add_special: NotRequired[bool]
    """False: the ids of a prompt do not begin with BOS."""
    with_text: NotRequired[bool]
    """True: the reply has the text as the chat template renders it."""
    with_pieces: NotRequired[bool]
    """True: the reply has the bytes of each token."""


class DetokenizeParams(ModelParams):
    token_ids: bytes
    """u32, little endian."""


class StopParams(ModelParams):
    now: NotRequired[bool]
    """True: do not wait for unfinished requests. By default the worker finishes them, within the time of the drain."""


class ReloadParams(TypedDict):
    model: NotRequired[str]
    """Replace the workers of this model in any case. Unset: read models.yaml and apply all changes."""
    how: NotRequired[str]
    """`auto` (default: beside the old worker where both fit), `beside`, or `exchange` (the old worker leaves first)."""


class ConfigParams(TypedDict):
    all: NotRequired[bool]
    """True: `settings` also has keys with their defaults."""


class ShutdownParams(TypedDict):
    now: NotRequired[bool]
    """True: do not wait for unfinished requests."""


class CancelRequestParams(TypedDict):
    id: str
    """The `id` in `requests`, or a trace id, which several requests may have. Without the right `admin` only requests
    of the client's own key are cancelled."""


class LogLevelParams(TypedDict):
    model: NotRequired[str]
    """A model, `supervisor` or `gateway`. Unset: all."""
    level: NotRequired[str]
    """The new level: `debug`, `info`, `warning` or `error`. Unset: no change."""


class KeysParams(TypedDict):
    after: NotRequired[str]
    """Only keys with names after this one in the alphabet."""
    limit: NotRequired[Annotated[int, Within(1, 1000)]]
    """Most keys in the result: 1 to 1000, default 100."""


class KeyFields(TypedDict):
    """Rights and limits of a key. A limit of null is no limit."""

    rights: NotRequired[Annotated[list[str], _CHECKED_LATER]]
    """Any of `infer`, `status`, `admin`, `gateway`. A key over HTTP cannot have `gateway`."""
    models: NotRequired[Annotated[list[str] | None, _CHECKED_LATER]]
    """Names of models, or patterns such as `qwen*`. Null: all models."""
    expires: NotRequired[Annotated[str | None, _CHECKED_LATER]]
    """A lifetime from now (`12h`, `30d`, `8w`) or a time (`2026-01-31T12:00:00Z`). Null: never."""
    max_in_flight: NotRequired[Annotated[int | None, _CHECKED_LATER]]
    """Most unfinished requests."""
    requests_per_minute: NotRequired[Annotated[int | None, _CHECKED_LATER]]
    """Most requests in a minute."""
    tokens_per_minute: NotRequired[Annotated[int | None, _CHECKED_LATER]]
    """Most tokens of prompts and answers in a minute."""
    tokens_per_day: NotRequired[Annotated[int | None, _CHECKED_LATER]]
    """Most tokens of prompts and answers in a day."""
    keep_alive_s: NotRequired[Annotated[int | str | None, _CHECKED_LATER]]
    """The longest time that its requests may keep a model loaded: seconds, or a text such as `2h`. Null: they may not
    ask for it."""


class NewKeyParams(KeyFields):
    name: str
    """The name. Without `rights` the key has `infer`."""


class SetKeyParams(KeyFields):
    name: str
    """The name. What is not given stays."""


class RevokeKeyParams(TypedDict):
    name: str
    """The name of the key."""


class LogsParams(TypedDict):
    model: NotRequired[str]
    """A model (its first worker), one worker of several (`letters:2`), `gateway`, or `supervisor` (the default)."""
    lines: NotRequired[Annotated[int, Within(1, 1000)]]
    """Most lines in the result: 1 to 1000, default 200."""
    after: NotRequired[str]
    """A `position`: the oldest lines after it. Unset: the last lines."""
    since: NotRequired[Annotated[float, "s"]]
    """In place of `after`, seconds since 1970: the oldest lines from then on. Files that were moved away are not
    read."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of CALL. There is none without rights and a scope.

    rights     the rights, one of which a key needs
    scope      the models that a call concerns if it names none
    params     the map in CALL
    result     the map in REPLY: the name of a class in ``protocol.results``, which the supervisor does not load
    purpose    one sentence for people
    order      True: the verb changes something, so of the sockets over ipc only the admin socket takes it
    by_worker  True: a worker of the model answers the verb, and checks its parameters
    http       its endpoints in the gateway, after ``/v1``, with commas. What stands in braces is one of its parameters
    off        plural of what its endpoints give, for people, if they are off in a gateway without keys
    """

    rights: frozenset[Right]
    scope: ModelScope
    params: type
    result: str
    purpose: str
    order: bool = False
    by_worker: bool = False
    http: str = ""
    off: str = ""

    def __post_init__(self) -> None:
        if not self.rights:
            raise ValueError(f"no key may call the verb {self.purpose!r}: name one right at least")

    @property
    def known(self) -> list[str]:
        """The names of the parameters. Those that must be given come first."""
        required = required_of(self.params)
        return sorted(hints_of(self.params), key=lambda name: name not in required)


VERBS: Final[dict[str, Verb]] = {
    "models": Verb(ANY, ModelScope.OWN, NoParams, "ModelsResult", "List the models."),
    "status": Verb(SEES_ALL, ModelScope.OWN, StatusParams, "StatusResult",
        "Describe the supervisor, its models and its GPUs."),
    "requests": Verb(ANY, ModelScope.OWN, RequestsParams, "RequestsResult",
        "List the unfinished requests, the oldest first.", http="GET /requests"),
    "ended_requests": Verb(ANY, ModelScope.OWN, EndedRequestsParams, "EndedRequestsResult",
        "List the last requests that have ended.", http="GET /requests/ended"),
    "story": Verb(ANY, ModelScope.OWN, StoryParams, "StoryResult", "Tell what became of a request."),
    "events": Verb(SEES_ALL, ModelScope.OWN, EventsParams, "EventsResult",
        "Return the latest events of the supervisor and its workers.", http="GET /events"),
    "metrics": Verb(SEES_ALL, ModelScope.OWN, MetricsParams, "MetricsResult",
        "Return counts and histograms of the requests that have ended."),
    "usage": Verb(ANY, ModelScope.OWN, UsageParams, "UsageResult",
        "Return the requests and tokens by key, model and day.", http="GET /usage"),
    "tokenize": Verb(INFER, ModelScope.OWN, TokenizeParams, "TokenizeResult",
        "Return the ids that the model would read for a prompt or a conversation.", by_worker=True),
    "detokenize": Verb(INFER, ModelScope.OWN, DetokenizeParams, "DetokenizeResult",
        "Return the text of ids.", by_worker=True),
    "chat_template": Verb(INFER, ModelScope.OWN, ModelParams, "ChatTemplateResult",
        "Return the model's chat template.", by_worker=True),
    "start": Verb(ADMIN, ModelScope.OWN, ModelParams, "OrderResult",
        "Start the workers of a model.", order=True, http="POST /models/{model}/load"),
    "stop": Verb(ADMIN, ModelScope.OWN, StopParams, "OrderResult",
        "Stop the workers of a model.", order=True, http="POST /models/{model}/stop"),
    "unload": Verb(ADMIN, ModelScope.OWN, ModelParams, "OrderResult",
        "Stop the workers of a model as `stop` does, but let its next request start them again.",
        order=True, http="POST /models/{model}/unload"),
    "sleep": Verb(ADMIN, ModelScope.OWN, ModelParams, "OrderResult",
        "Put the workers of a lazy model to sleep in host memory, as soon as they have no request.",
        order=True, http="POST /models/{model}/sleep"),
    "wake": Verb(ADMIN, ModelScope.OWN, ModelParams, "OrderResult",
        "Wake the workers of a model.", order=True, http="POST /models/{model}/wake"),
    "restart": Verb(ADMIN, ModelScope.OWN, ModelParams, "RestartResult",
        "Stop and start the workers of a model, one after the other.", order=True, http="POST /models/{model}/restart"),
    "reload": Verb(ADMIN, ModelScope.ALL, ReloadParams, "ReloadResult",
        "Read models.yaml again and apply what it changes, or replace the workers of one model.",
        order=True, http="POST /models/{model}/reload, POST /reload"),
    "config": Verb(ADMIN, ModelScope.ALL, ConfigParams, "ConfigResult",
        "Return models.yaml as it is on the disk, its values and faults, and what a reload would change.",
        http="GET /config", off="answers about models.yaml"),
    "settings": Verb(SEES_ALL, ModelScope.OWN, ModelParams, "SettingsResult",
        "Return the keys of a model, their values, and where each comes from."),
    "shutdown": Verb(ADMIN, ModelScope.ALL, ShutdownParams, "NoResult",
        "Stop every model, then end the supervisor.", order=True),
    "cancel_request": Verb(INFER | ADMIN, ModelScope.OWN, CancelRequestParams, "NoResult",
        "Cancel a request. Its own client gets what was computed, and the finish reason `cancelled`.",
        order=True, http="POST /requests/{id}/cancel"),
    "log_level": Verb(ADMIN, ModelScope.ALL, LogLevelParams, "LogLevelResult",
        "Return the least levels of the lines in logs, and set them until the supervisor ends.", order=True),
    "keys": Verb(ADMIN, ModelScope.ALL, KeysParams, "KeysResult",
        "List the keys of clients, with their rights and limits.", http="GET /keys", off="keys over HTTP"),
    "new_key": Verb(ADMIN, ModelScope.ALL, NewKeyParams, "NewKeyResult",
        "Make a key for a client over HTTP.", order=True, http="POST /keys", off="keys over HTTP"),
    "set_key": Verb(ADMIN, ModelScope.ALL, SetKeyParams, "SetKeyResult",
        "Change the rights and limits of a key.", order=True, http="PATCH /keys/{name}", off="keys over HTTP"),
    "revoke_key": Verb(ADMIN, ModelScope.ALL, RevokeKeyParams, "NoResult",
        "Take a key off the list. Its requests and connections end.",
        order=True, http="DELETE /keys/{name}", off="keys over HTTP"),
    "logs": Verb(ADMIN, ModelScope.ALL, LogsParams, "LogsResult",
        "Return the last lines of a log, or the lines after a position.", http="GET /logs", off="logs over HTTP"),
}  # fmt: skip
"""All verbs of CALL. No verb takes a command, a path or a module.

For ``requests``, ``ended_requests``, ``story`` and ``cancel_request`` the supervisor's ``may_see`` and ``may_cancel``
decide about each request. The answer to ``usage`` has only what the key may see."""

QUESTION_VERBS: Final = frozenset(name for name, verb in VERBS.items() if verb.by_worker)
"""Verbs that a worker answers, see ``protocol.chat``."""
