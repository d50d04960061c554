"""The verbs of CALL: a closed table. Queries may be asked on either socket, orders on the admin socket only.

No verb takes a command, a path or a module.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from protocol import limits
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.messages import QUESTION_VERBS
from protocol.process.masking import masked_values
from supervisor.config_report import describe_config, describe_settings
from supervisor.event_history import KEPT, EventHistory
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.on_demand import OnDemandLoader
from supervisor.fleet.reloads import Reloads
from supervisor.fleet.replica import Replica
from supervisor.fleet.rollout import Change, How
from supervisor.key_orders import DONE, MOST_KEYS, KeyOrders
from supervisor.keys.rights import SEES_ALL, Identity, Right
from supervisor.log_control import LogControl
from supervisor.log_reading import MOST_LINES, read_log
from supervisor.model_names import ModelNames
from supervisor.reactor import Reactor
from supervisor.requests import request_list
from supervisor.requests.effect_queue import EffectQueue
from supervisor.requests.request_figures import HISTOGRAMS
from supervisor.requests.scheduler import Scheduler
from supervisor.requests.stories import MOST_LISTED
from supervisor.shutdown import SupervisorShutdown
from supervisor.spelling import spelled_name
from supervisor.supervisor_status import SupervisorDescription
from supervisor.usage_keeper import UsageKeeper
from supervisor.workers.launcher import local_pid
from supervisor.workers.lifecycle import AT_REST, WorkerState
from supervisor.workers.worker_life import Desired

USAGE: Final = "usage"
"""The verb that the usage writer answers."""
LATER: Final = frozenset({USAGE, *DONE})
"""The verbs that processes of the supervisor answer."""
_OPEN_TROUBLES: Final = ("gpus", "gateway", "cluster", "listen")
"""Troubles whose words name no model. A key for some models sees these only."""
_FOR_PEOPLE: Final = ("message", "reason", "unloaded", "error_message")
"""Keys whose values are sentences."""
Params = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class AdminContext:
    """The parts of the supervisor that verbs read and give orders to."""

    on_demand: OnDemandLoader
    fleet: Fleet
    reloads: Reloads
    scheduler: Scheduler
    shutdown: SupervisorShutdown
    status: SupervisorDescription
    history: EventHistory
    effects: EffectQueue
    usage: UsageKeeper | None
    reactor: Reactor
    logs: LogControl
    keys: KeyOrders


def answer(context: AdminContext, verb: str, params: Params, identity: Identity, *, admin: bool) -> Result:
    """Return the result of one CALL. Raises WireError that names the verb or the parameter.

    params    without ``on_behalf_of``
    identity  who asks: the owner of the connection, or the key for which it asks. Its right to use the verb, and to use
              the model that ``params`` names, have been checked
    admin     whether the client may give orders on this socket
    """
    entry = _VERBS.get(verb)
    if entry is None:
        known = ", ".join(sorted(QUESTION_VERBS.union(_VERBS, LATER)))
        raise WireError(ErrorCode.UNSUPPORTED, f"unknown verb {verb!r}: known are {known}", field="verb")
    handler, is_order = entry
    if is_order:
        check_takes_order(verb, admin=admin)
    return handler(context, params, identity)


def check_takes_order(verb: str, *, admin: bool) -> None:
    """Raise WireError if an order came to a socket that takes none. ``admin``: whether this socket takes orders."""
    if not admin:
        raise WireError(ErrorCode.UNSUPPORTED, f"{verb!r} is an order: send it to the admin socket", field="verb")


def models(context: AdminContext, identity: Identity) -> list[Result]:
    """Return the models that a key may use, as clients see them."""
    models: dict[str, list[Replica]] = {}
    for replica in context.fleet.registry.replicas.values():
        models.setdefault(replica.model, []).append(replica)
    names = context.fleet.registry.config.names
    return [_as_one(name, replicas, names) for name, replicas in models.items() if identity.may_use(name)]


def _models(context: AdminContext, params: Params, identity: Identity) -> Result:
    _take(params)
    return {"models": models(context, identity), "listen": context.status.listen_problem}


def _as_one(name: str, replicas: list[Replica], names: ModelNames) -> Result:
    """Return a model as clients see it: as the worker that is ready, or that comes closest to it."""
    order = list(_READINESS)
    best = min(replicas, key=lambda replica: order.index(replica.state))
    return {
        "name": name,
        "state": str(best.state),
        "context": best.info.get("context"),
        "chat": best.chat,
        "tools": best.tools,
        "unloads": best.may_be_evicted,
        **names.describe(name),
    }


_READINESS = (
    WorkerState.READY,
    WorkerState.WAKING,
    WorkerState.FALLING_ASLEEP,
    WorkerState.ASLEEP,
    WorkerState.LOADING,
    WorkerState.STARTING,
    WorkerState.BACKOFF,
    WorkerState.UNLOADED,
    WorkerState.DRAINING,
    WorkerState.STOPPING,
    WorkerState.STOPPED,
    WorkerState.FAILED,
)


_TOKENIZES = (WorkerState.READY, WorkerState.WAKING, WorkerState.FALLING_ASLEEP, WorkerState.ASLEEP)
"""States in which a worker's tokenizer answers."""
_COMING = (WorkerState.LOADING, WorkerState.STARTING, WorkerState.BACKOFF, WorkerState.UNLOADED)
"""States of a worker that will be ready. One that was just woken is still unloaded while it waits for room."""


def ready_worker(context: AdminContext, verb: str, name: object, identity: Identity) -> Replica:
    """Return a worker that can answer a question about this model. Raises WireError if there is none.

    A worker that sleeps can answer, since it keeps its tokenizer. One that is unloaded is started, so that the client
    may ask again. But a look at its template starts nothing.
    """
    if not isinstance(name, str):
        raise RequestError("model is missing: name a model", field="model")
    replicas = _replicas(context, name, identity)
    if ready := [replica for replica in replicas if replica.state in _TOKENIZES]:
        return min(ready, key=lambda replica: context.scheduler.work(replica.name)[0])
    context.shutdown.check_not_begun()
    if any(replica.state is WorkerState.UNLOADED for replica in replicas):
        if verb == "chat_template":
            message = f"model {name!r} is not loaded, so its chat template is not known: a request loads it"
            raise WireError(ErrorCode.MODEL_NOT_RUNNING, message)
        context.on_demand.wake(replicas[0].model)
    if any(replica.state in _COMING for replica in replicas):
        message = f"model {name!r} is being loaded: try later"
        raise WireError(ErrorCode.MODEL_NOT_RUNNING, message, retry_after_ms=1000)
    failed = [replica for replica in replicas if replica.state is WorkerState.FAILED]  # its error says most
    raise (failed or replicas)[0].refusal()


def _status(context: AdminContext, params: Params, identity: Identity) -> Result:
    given = _take(params, model=str, history=bool)
    name = given.get("model")
    replicas = list(context.fleet.registry.replicas.values()) if name is None else _replicas(context, name, identity)
    supervisor = context.status.describe()
    if identity.models is not None:
        replicas = [replica for replica in replicas if identity.may_use(replica.model)]
        supervisor["troubles"] = {k: words for k, words in supervisor["troubles"].items() if k in _OPEN_TROUBLES}
        supervisor["turnovers"] = [*_turnovers_for(identity, supervisor["turnovers"])]
        for keys in filter(None, (supervisor["http_keys"], supervisor["tcp"])):
            keys["keys"] = [key for key in keys["keys"] if key["name"] == identity.name]  # others name their models
    return {
        "rights": [right for right in Right if right in identity.rights],
        "supervisor": supervisor,
        "gpus": context.fleet.vram.describe_gpus(context.fleet.registry.config.supervisor.vram_limit),
        "gpus_unknown": context.fleet.vram.trouble,
        "models": _without_others(
            context,
            identity,
            [
                _described(context, replica) | ({"speeds": list(replica.speeds)} if given.get("history") else {})
                for replica in replicas
            ],
        ),
    }


def _without_others(context: AdminContext, identity: Identity, value: Any) -> Any:
    """Return a part of an answer whose texts for people name no model that a key may not use.

    Such a text can say which other models hold a GPU's memory, or for which one a model was evicted.
    """
    if identity.models is None:
        return value
    registry = context.fleet.registry
    models = {*registry.config.models, *(replica.model for replica in registry.replicas.values())}
    hidden = sorted((model for model in models if not identity.may_use(model)), key=len, reverse=True)
    if not hidden:
        return value
    names = "|".join(map(re.escape, hidden))
    return _replaced(value, re.compile(rf"(?<![a-z0-9._-])(?:{names})(?::[0-9]+)?(?![a-z0-9_-]|\.[a-z0-9])"))


def _replaced(value: Any, names: re.Pattern[str]) -> Any:
    if isinstance(value, list):
        return [_replaced(part, names) for part in value]
    if not isinstance(value, dict):
        return value
    return {
        key: names.sub("another model", part)
        if key in _FOR_PEOPLE and isinstance(part, str)
        else _replaced(part, names)
        for key, part in value.items()
    }


def _turnovers_for(identity: Identity, turnovers: Iterable[Result]) -> Iterator[Result]:
    """Yield the turnovers that change a model that a key may use. The cause of another one may name other models."""
    for turnover in turnovers:
        models = [change for change in turnover["models"] if identity.may_use(change["model"])]
        if any(change["change"] != Change.UNCHANGED for change in models):
            yield {**turnover, "models": models}


def _described(context: AdminContext, replica: Replica) -> Result:
    pid = local_pid(replica.process) if replica.process else None
    placed = {**replica.memory.describe(), **context.fleet.vram.describe(replica.name, pid)}
    if replica.process is not None:
        placed |= replica.process.gpu_memory() or {}
    names = context.fleet.registry.config.names.describe(replica.model)
    return {**masked_values(replica.describe(context.scheduler, time.monotonic())), **names, **placed}


def _start(context: AdminContext, params: Params, identity: Identity) -> Result:
    replicas = _current(context, _take(params, model=str).get("model"), identity)
    context.shutdown.check_not_begun()
    for replica in replicas:
        context.fleet.start(replica.name, f"start {_by(identity)}")
    return _ordered(replicas)


def _stop(context: AdminContext, params: Params, identity: Identity) -> Result:
    given = _take(params, model=str, now=bool)
    replicas = _replicas(context, given.get("model"), identity)
    for replica in replicas:
        context.fleet.stop(replica.name, f"stop {_by(identity)}", now=given.get("now", False))
    return _ordered(replicas)


def _unload(context: AdminContext, params: Params, identity: Identity) -> Result:
    replicas = _replicas(context, _take(params, model=str).get("model"), identity)
    cause = f"unload {_by(identity)}"
    for replica in replicas:
        if replica.current:
            context.fleet.let_go_of(replica.name, cause)
        else:  # a reload brings it, or lets it leave: no request shall start it beside the other one
            context.fleet.stop(replica.name, cause)
    return _ordered(replicas)


def _sleep(context: AdminContext, params: Params, identity: Identity) -> Result:
    replicas = _current(context, _take(params, model=str).get("model"), identity)
    for replica in replicas:
        context.on_demand.sleep(replica, f"sleep {_by(identity)}")
    return _ordered(replicas)


def _wake(context: AdminContext, params: Params, identity: Identity) -> Result:
    replicas = _current(context, _take(params, model=str).get("model"), identity)
    context.shutdown.check_not_begun()
    for replica in replicas:
        context.on_demand.wake_up(replica, f"wake {_by(identity)}")
    return _ordered(replicas)


def _by(identity: Identity) -> str:
    """Return who gave an order, as the reason of what follows says it."""
    return "ordered" if identity.name is None else f"ordered by key {identity.name}"


def _ordered(replicas: list[Replica]) -> Result:
    """Return the states of a model's workers after an order. The first worker's state also stands at the top level."""
    workers = {r.shown: {"state": str(r.state), "generation": r.generation} for r in replicas}
    return {**workers[replicas[0].shown], "workers": workers}


def _restart(context: AdminContext, params: Params, identity: Identity) -> Result:
    replicas = _current(context, _take(params, model=str).get("model"), identity)
    context.shutdown.check_not_begun()
    wanted = {replica.shown: replica.generation + 1 for replica in replicas}
    rollout = None
    up = [replica for replica in replicas if replica.desired is Desired.UP and replica.state not in AT_REST]
    for replica in replicas:
        if len(replicas) == 1 or replica not in up:  # a worker that is down is just started
            context.fleet.restart(replica.name, f"restart {_by(identity)}")
    if up and len(replicas) > 1:
        rollout = context.reloads.restart_in_turns(up, f"restart {_by(identity)}")
    workers = {r.shown: {"state": str(r.state), "generation": wanted[r.shown]} for r in replicas}
    return {**workers[replicas[0].shown], "workers": workers, "turnover": rollout}


def _reload(context: AdminContext, params: Params, identity: Identity) -> Result:
    given = _take(params, model=str, how=str)
    context.shutdown.check_not_begun()
    try:
        how = How(given.get("how", How.AUTO))
    except ValueError:
        message = f"how is {given['how'][:64]!r}: must be one of {', '.join(How)}"
        raise RequestError(message, field="how") from None
    model = given.get("model")
    cause = f"reload {_by(identity)}" if model is None else f"reload of {model[:64]} {_by(identity)}"
    try:
        return {"turnover": context.reloads.read_again(cause, how, model)}
    except WireError as e:
        if identity.models is None:
            raise
        if e.code is ErrorCode.MODEL_NOT_FOUND:
            raise _unknown(context, model or "", identity) from None
        # What is wrong with models.yaml may name any model.
        message = "nothing is changed: models.yaml cannot be used, and the supervisor's log says why"
        raise WireError(e.code, message) from None


def _config(context: AdminContext, params: Params, identity: Identity) -> Result:
    given = _take(params, all=bool)
    return describe_config(context.fleet.registry.config.file, context.reloads, every=given.get("all", False))


def _settings(context: AdminContext, params: Params, identity: Identity) -> Result:
    replica = _replicas(context, _take(params, model=str).get("model"), identity)[0]
    config = context.fleet.registry.config  # which has no model that a reload is about to remove
    return describe_settings(config.models.get(replica.model, replica.spec), config.file)


def _shutdown(context: AdminContext, params: Params, identity: Identity) -> Result:
    context.shutdown.begin(f"shutdown {_by(identity)}", now=_take(params, now=bool).get("now", False))
    return {}


def _requests(context: AdminContext, params: Params, identity: Identity) -> Result:
    limit = _whole(_take(params, limit=int), "limit", 100, 1, request_list.MOST)
    workers = context.fleet.registry.replicas

    def shown(worker: str) -> str | None:
        return workers[worker].shown if worker in workers else None

    return context.scheduler.unfinished.describe(identity, limit, shown, time.monotonic())


def _ended_requests(context: AdminContext, params: Params, identity: Identity) -> Result:
    given = _take(params, after=int, limit=int)
    limit = _whole(given, "limit", 100, 1, MOST_LISTED)
    after = None if "after" not in given else _whole(given, "after", 0, 0, limits.MAX_U64)
    unix = time.time() - time.monotonic()
    ended = context.scheduler.unfinished.ended(identity, after, limit, unix)
    return {"session": context.status.session, **_without_others(context, identity, ended)}


def _cancel_request(context: AdminContext, params: Params, identity: Identity) -> Result:
    name = _take(params, id=str).get("id")
    if name is None:
        raise RequestError("id is missing: name a request as `requests` shows it, or by a trace id", field="id")
    for request in context.scheduler.unfinished.find(identity, name):
        context.effects.add(context.scheduler.cancel(*request.key, time.monotonic()))
    return {}


def _story(context: AdminContext, params: Params, identity: Identity) -> Result:
    name = _take(params, id=str).get("id")
    if name is None:
        raise RequestError("id is missing: name a request as `requests` shows it, or by a trace id", field="id")
    told = context.scheduler.unfinished.story(name, identity, time.time() - time.monotonic())
    for story in told:
        sees = bool(identity.rights & SEES_ALL)
        story["events"] = context.history.during(story["model"], story["accepted"], story["total_ms"]) if sees else []
    return {"requests": _without_others(context, identity, told)}


def _events(context: AdminContext, params: Params, identity: Identity) -> Result:
    given = _take(params, model=str, after=int, limit=int)
    limit, name = _whole(given, "limit", 100, 1, KEPT), given.get("model")
    # models.yaml may have lost a model since
    if name is not None and name not in context.fleet.registry.config.models and not context.history.knows(name):
        raise _unknown(context, name, identity)

    def visible(model: str | None) -> bool:
        if name is not None and model != name:
            return False
        # an event of no model may name any model
        return identity.models is None or (model is not None and identity.may_use(model))

    after = None if "after" not in given else _whole(given, "after", 0, 0, limits.MAX_U64)
    found = context.history.since(after, limit, visible)
    return {"session": context.status.session, **_without_others(context, identity, found)}


def _metrics(context: AdminContext, params: Params, identity: Identity) -> Result:
    name = _take(params, model=str).get("model")
    replicas = context.fleet.registry.replicas.values() if name is None else _replicas(context, name, identity)
    models = {replica.model for replica in replicas if identity.may_use(replica.model)}
    return {
        "session": context.status.session,
        "cpu_s": time.process_time(),
        "waited_s": context.reactor.waited_s,
        "bounds": {name: [float(bound) for bound in bounds] for name, bounds in HISTOGRAMS.items()},
        "events": context.history.counts,
        "models": {name: context.scheduler.figures(name, time.monotonic()) for name in sorted(models)},
    }


def _logs(context: AdminContext, params: Params, identity: Identity) -> Result:
    given = _take(params, model=str, lines=int, after=str, since=float)
    after, since = given.get("after"), given.get("since")
    if after is not None and since is not None:
        raise RequestError("after and since are two places to begin at: give one of them", field="since")
    lines, name = _whole(given, "lines", 200, 1, MOST_LINES), given.get("model", limits.SUPERVISOR_NAME)
    own = context.status.own_logs.get(name)
    if own is not None and identity.models is not None:
        message = f"the log of the {name} names all models, and key {identity.name!r} may not know them all"
        raise WireError(ErrorCode.FORBIDDEN, message, field="model")
    # The name is looked up in tables, and never becomes part of a path.
    return read_log(_replicas(context, name, identity)[0].log_path if own is None else own, lines, after, since)


def _log_level(context: AdminContext, params: Params, identity: Identity) -> Result:
    given = _take(params, model=str, level=str)
    if (name := given.get("model")) not in (None, *context.status.own_logs):
        name = _replicas(context, name, identity)[0].model
    return {"levels": context.logs.levels(name, given.get("level"))}


def _keys(context: AdminContext, params: Params, identity: Identity) -> Result:
    given = _take(params, after=str, limit=int)
    return context.keys.listed(given.get("after", ""), _whole(given, "limit", 100, 1, MOST_KEYS), identity)


_VERBS: dict[str, tuple[Callable[[AdminContext, Params, Identity], Result], bool]] = {
    "models": (_models, False),
    "status": (_status, False),
    "requests": (_requests, False),
    "ended_requests": (_ended_requests, False),
    "story": (_story, False),
    "events": (_events, False),
    "start": (_start, True),
    "stop": (_stop, True),
    "unload": (_unload, True),
    "sleep": (_sleep, True),
    "wake": (_wake, True),
    "restart": (_restart, True),
    "reload": (_reload, True),
    "config": (_config, False),
    "settings": (_settings, False),
    "shutdown": (_shutdown, True),
    "metrics": (_metrics, False),
    "cancel_request": (_cancel_request, True),
    "logs": (_logs, False),
    "log_level": (_log_level, True),
    "keys": (_keys, False),
}


_TYPE_NAMES = {str: "a string", bool: "true or false", int: "an integer", float: "a number"}


def _take(params: Params, **known: type) -> Params:
    """Return the parameters. Raises RequestError for an unknown name, or a value of another type."""
    for key, value in params.items():
        if key not in known:
            hint = f"known are {', '.join(known)}" if known else "this verb takes none"
            field = key[:64] if isinstance(key, str) else None
            raise RequestError(f"unknown parameter {spelled_name(key)}: {hint}", field=field)
        if type(value) is not known[key] and (type(value), known[key]) != (int, float):
            raise RequestError(f"{key} must be {_TYPE_NAMES[known[key]]}", field=key)
    return params


def _whole(params: Params, name: str, default: int, least: int, most: int) -> int:
    """Return an integer parameter. Raises RequestError for one that is out of range."""
    value: int = params.get(name, default)
    if not least <= value <= most:
        raise RequestError(f"{name} is {value}: must be from {least} to {most}", field=name)
    return value


def _replicas(context: AdminContext, name: str | None, identity: Identity) -> list[Replica]:
    """Return the workers of the model of this name, or the one worker of this name.

    Raises WireError, which names only models that ``identity`` may use.
    """
    if name is None:
        raise RequestError("model is missing: name a model", field="model")
    if replicas := context.fleet.registry.of_model(name):
        return replicas
    if replica := context.fleet.registry.shown(name):
        return [replica]
    raise _unknown(context, name, identity)


def _unknown(context: AdminContext, name: str, identity: Identity) -> WireError:
    """Return the error for a name that no model has, with the models that ``identity`` may use."""
    return context.fleet.registry.config.names.unknown(name, identity.may_use)


def _current(context: AdminContext, name: str | None, identity: Identity) -> list[Replica]:
    """Return the workers of a model that take orders. Raises WireError if there is none.

    During a rollout by surge, the worker that is to leave and the one that takes its place later take no orders.
    """
    replicas = [replica for replica in _replicas(context, name, identity) if replica.current]
    if not replicas:
        message = f"{name!r} is there for as long as a reload takes: order that of its model, or `modelctl stop` it"
        raise WireError(ErrorCode.UNSUPPORTED, message, field="model")
    return replicas
