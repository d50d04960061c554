"""The parameters and results of the orders of CALL, such as ``stop``. See ``protocol.verbs``."""

from typing import NotRequired, TypedDict


class ModelParams(TypedDict):
    model: str
    """A model, or one worker of several (`letters:2`)."""


class StopParams(ModelParams):
    now: NotRequired[bool]
    """Do not wait for unfinished requests. By default the worker finishes them, within the time limit of the drain."""


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


class ReloadParams(TypedDict):
    model: NotRequired[str]
    """A model whose workers are replaced in any case. Unset: the supervisor reads models.yaml again and applies the
    changes to all models."""
    how: NotRequired[str]
    """`auto` (the default: beside the old worker where both fit), `beside`, or `exchange` (the old worker leaves
    first)."""


class ReloadResult(TypedDict):
    turnover: int
    """The number of the entry in `turnovers` of `status`."""


class LogLevelParams(TypedDict):
    model: NotRequired[str]
    """A model, `supervisor` or `gateway`. Unset: all of them."""
    level: NotRequired[str]
    """The new level: `debug`, `info`, `warning` or `error`. Unset: nothing is changed."""


class LogLevelResult(TypedDict):
    levels: dict[str, str]
    """The levels now, by the name of the model, or `supervisor` or `gateway`."""


class KeyFields(TypedDict):
    """The rights and the limits of a key. Null takes a limit away."""

    rights: NotRequired[list[str]]
    """Of `infer`, `status`, `admin`, `gateway`. A key over HTTP cannot have `gateway`."""
    models: NotRequired[list[str] | None]
    """Names of models, or patterns such as `qwen*`. Null: all models."""
    expires: NotRequired[str | None]
    """The end of the key: a lifetime from now, such as `12h`, `30d` or `8w`, or a time such as `2026-01-31T12:00:00Z`.
    Null: never."""
    max_in_flight: NotRequired[int | None]
    """Most requests that may be unfinished."""
    requests_per_minute: NotRequired[int | None]
    """Most requests in a minute."""
    tokens_per_minute: NotRequired[int | None]
    """Most tokens in a minute, of prompts and answers together."""
    tokens_per_day: NotRequired[int | None]
    """Most tokens in a day, of prompts and answers together."""
    keep_alive_s: NotRequired[int | str | None]
    """The longest time that its requests may keep a model loaded, in seconds or as a text such as `2h`. Null: its
    requests may not say so."""


class NewKeyParams(KeyFields):
    name: str
    """The name of the new key. Without `rights` it may send requests (`infer`)."""


class SetKeyParams(KeyFields):
    name: str
    """The name of the key. What is not given stays as it is."""


class RevokeKeyParams(TypedDict):
    name: str
    """The name of the key."""


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


class KeysParams(TypedDict):
    after: NotRequired[str]
    """Only keys whose names come after this one in the alphabet."""
    limit: NotRequired[int]
    """The most keys, 1 to 1000. Default: 100."""


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


class ShutdownParams(TypedDict):
    now: NotRequired[bool]
    """Do not wait for unfinished requests."""
