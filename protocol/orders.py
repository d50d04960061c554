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


class ShutdownParams(TypedDict):
    now: NotRequired[bool]
    """Do not wait for unfinished requests."""
