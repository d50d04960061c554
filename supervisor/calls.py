"""The verbs of CALL: a closed table. Queries may be asked on either socket, orders on the admin socket only.

No verb takes a command, a path or a module.
"""

from collections.abc import Callable
from typing import Any, Protocol

from protocol.codec import unpack_body
from protocol.errors import ErrorCode, RequestError, WireError
from supervisor.fleet import Fleet
from supervisor.model import Model
from supervisor.scheduler import Scheduler

Params = dict[str, Any]
Result = dict[str, Any]


class Host(Protocol):
    """What the verbs need of the loop."""

    fleet: Fleet
    scheduler: Scheduler

    def describe(self) -> dict[str, Any]: ...
    def now(self) -> float: ...
    @property
    def shutting_down(self) -> bool: ...
    def begin_shutdown(self, cause: str, *, now: bool = False) -> None: ...


def answer(host: Host, verb: str, body: bytes, *, admin: bool) -> Result:
    """The result of one CALL. Raises WireError naming verb or parameter."""
    entry = _VERBS.get(verb)
    if entry is None:
        raise WireError(
            ErrorCode.UNSUPPORTED, f"unknown verb {verb!r}: known are {', '.join(sorted(_VERBS))}", field="verb"
        )
    handler, is_order = entry
    if is_order and not admin:
        raise WireError(ErrorCode.UNSUPPORTED, f"{verb!r} is an order: send it to the admin socket", field="verb")
    return handler(host, unpack_body(body))


def _models(host: Host, params: Params) -> Result:
    _take(params)
    return {
        "models": [
            {"name": m.name, "state": str(m.state), "context": m.info.get("context"), "chat": bool(m.info.get("chat"))}
            for m in host.fleet.models.values()
        ]
    }


def _status(host: Host, params: Params) -> Result:
    name = _take(params, model=str).get("model")
    models = list(host.fleet.models.values()) if name is None else [_model(host, name)]
    return {
        "supervisor": host.describe(),
        "gpus": host.fleet.vram.describe_gpus(),
        "models": [_described(host, m) for m in models],
    }


def _described(host: Host, model: Model) -> Result:
    pid = model.process.pid if model.process else None
    return {**model.describe(host.scheduler, host.now()), **host.fleet.vram.describe(model.name, pid)}


def _start(host: Host, params: Params) -> Result:
    model = _model(host, _take(params, model=str).get("model"))
    _refuse_when_leaving(host)
    host.fleet.start(model.name, "start ordered")
    return {"state": str(model.state), "generation": model.generation}


def _stop(host: Host, params: Params) -> Result:
    given = _take(params, model=str, now=bool)
    model = _model(host, given.get("model"))
    host.fleet.stop(model.name, "stop ordered", now=given.get("now", False))
    return {"state": str(model.state), "generation": model.generation}


def _restart(host: Host, params: Params) -> Result:
    model = _model(host, _take(params, model=str).get("model"))
    _refuse_when_leaving(host)
    before = model.generation
    host.fleet.restart(model.name, "restart ordered")
    return {"state": str(model.state), "generation": before + 1}


def _shutdown(host: Host, params: Params) -> Result:
    host.begin_shutdown("shutdown ordered", now=_take(params, now=bool).get("now", False))
    return {}


_VERBS: dict[str, tuple[Callable[[Host, Params], Result], bool]] = {
    "models": (_models, False),
    "status": (_status, False),
    "start": (_start, True),
    "stop": (_stop, True),
    "restart": (_restart, True),
    "shutdown": (_shutdown, True),
}


def _take(params: Params, **known: type) -> Params:
    """The parameters, each checked for its name and exact type."""
    for key, value in params.items():
        if key not in known:
            hint = f"known are {', '.join(known)}" if known else "this verb takes none"
            raise RequestError(f"unknown parameter {str(key)[:64]!r}: {hint}", field=str(key)[:64])
        if type(value) is not known[key]:
            raise RequestError(f"{key} must be a {known[key].__name__}", field=str(key))
    return params


def _refuse_when_leaving(host: Host) -> None:
    if host.shutting_down:
        raise WireError(ErrorCode.DRAINING, "the supervisor is shutting down and starts nothing")


def _model(host: Host, name: str | None) -> Model:
    if name is None:
        raise RequestError("model is missing: name a model", field="model")
    model = host.fleet.models.get(name)
    if model is None:
        known = ", ".join(sorted(host.fleet.models))
        raise WireError(
            ErrorCode.MODEL_NOT_FOUND, f"no model {name[:64]!r} is configured: there is {known}", field="model"
        )
    return model
