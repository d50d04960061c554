"""The results of the orders of CALL, such as ``stop``. See ``protocol.results``."""

from typing import TypedDict


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
