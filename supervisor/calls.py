"""Answer the verbs of CALL, which ``protocol.verbs`` lists. A method of ``Calls`` answers the verb of its name."""

import json
import logging
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from protocol import limits
from protocol.codec import check_size, encode, pack_body, pack_reply
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.messages import Ask, Call
from protocol.process.helper_process import HelperProcess
from protocol.process.shown import masked_values
from protocol.values import Allowed, Flaw, Unfit, read
from protocol.verbs import SEES_ALL, VERBS, Right, Verb
from supervisor.config.file import Config
from supervisor.config.report import describe_config, describe_settings
from supervisor.config.rules import ModelNames
from supervisor.config.spelling import spelled_name
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.replicas import Replica
from supervisor.fleet.turnovers import Change, How, OnDemandLoader, Reloads
from supervisor.helper import HelperWatch, writer_environment
from supervisor.keys.change import CHANGE_S
from supervisor.keys.records import KeysProblem, check_name
from supervisor.keys.rights import OWNER, Identity
from supervisor.keys.ring import KeyRing
from supervisor.keys.rules import FIELDS, as_refusal, check_models, read_fields
from supervisor.logs.events import EventHistory, EventKind, noted
from supervisor.logs.reading import read_log
from supervisor.ports.authorizer import RequestAuthorizer
from supervisor.reactor import Reactor, Timer, Timers
from supervisor.requests.figures import HISTOGRAMS
from supervisor.requests.request import Asker, EffectQueue, PendingQueries, ToWorker
from supervisor.requests.scheduler import Scheduler
from supervisor.service import SupervisorShutdown
from supervisor.status import NAME_NO_MODEL, LogControl, SupervisorDescription
from supervisor.usage.keeper import UsageKeeper
from supervisor.workers.life import AT_REST, Desired, WorkerState

# Orders of CALL that change the list of keys. Each is carried out by a process of its own (``keys.change``).
#
# The loop neither waits for the disk, nor for a command that holds the lock of the list. It loads no OpenSSL for the
# hash of a token, either. The supervisor sees the changed list as it sees the changes of `modelctl keys`.


_CHANGING: Final = (sys.executable, "-P", "-m", "supervisor.keys.change")
DONE: Final = {"new_key": "made", "set_key": "changed", "revoke_key": "revoked"}
"""The verbs that change the list → the word for it in the log."""
MOST: Final = 8
"""Most changes that may be under way."""


@dataclass(slots=True)
class _Order:
    verb: str
    name: str
    caller: Identity
    asker: Asker
    notes: list[str]
    result: dict[str, Any] | None = None
    answered: bool = False
    timer: Timer | None = field(default=None, repr=False)


class KeyOrders:
    """The list of keys for verbs of CALL, and the changes that are under way. Use it on the loop's thread only."""

    def __init__(
        self, ring: KeyRing, timers: Timers, effects: EffectQueue, log: logging.Logger, watch: HelperWatch
    ) -> None:
        self._ring = ring
        self._timers = timers
        self._effects = effects
        self._log = log
        self._watch = watch
        self._running = 0
        """Processes that have not ended."""

    def listed(self, after: str, limit: int, caller: Identity) -> dict[str, Any]:
        """Return the keys whose names come after ``after``: the result of the verb ``keys``. Raises WireError."""
        try:
            keys, more = self._ring.listed(after, limit, caller)
        except KeysProblem as e:
            raise as_refusal(e) from None
        return {"keys": keys, "more": more}

    def begin(
        self, verb: str, name: str, given: Mapping[str, Any], caller: Identity, asker: Asker, config: Config
    ) -> None:
        """Begin an order. The asker hears of its end. Raises WireError if it cannot be carried out as it is.

        name   the name of the key
        given  the further parameters of the verb
        """
        fields = _fields(verb, name, given)
        notes: list[str] = []
        try:
            directory = self._ring.store.directory
            if fields.get("models") is not None:
                notes = check_models(fields["models"], config.models, config.names, config.file)
        except KeysProblem as e:
            raise as_refusal(e) from None
        if self._running >= MOST:
            message = f"{MOST} changes of the list of keys are under way: try later"
            raise WireError(ErrorCode.OVERLOADED, message, retry_after_ms=1000)
        order = {
            "directory": str(directory),
            "verb": verb,
            "caller": None if caller is OWNER else caller.key_id,
            "name": name,
            "fields": {key: sorted(value) if key == "rights" else value for key, value in fields.items()},
        }
        try:
            process = HelperProcess(_CHANGING, writer_environment())
        except OSError as e:
            raise WireError(ErrorCode.HELPER_FAILED, f"no process can be started: {e.strerror}; try later") from None
        process.send(json.dumps(order).encode())
        found = _Order(verb, name, caller, asker, notes)
        self._running += 1

        def take(_: HelperProcess, record: bytes) -> None:
            found.result = json.loads(record)

        self._watch.add(process, take, lambda _: self._ended(found))

        def too_late() -> None:
            process.kill()  # it may hang in the kernel, at its disk, so its end is not awaited
            self._answer(found)

        found.timer = self._timers.at(time.monotonic() + CHANGE_S + 1, too_late)

    def _ended(self, order: _Order) -> None:
        self._running -= 1
        self._answer(order)

    def _answer(self, order: _Order) -> None:
        """Answer an order once, with what its process has said."""
        if order.timer is not None:
            order.timer.cancel()
        if order.answered:
            return
        order.answered = True
        if (result := order.result) is None:
            message = f"the list of keys was not changed within {CHANGE_S} s: its disk or another command was too slow"
            result = {"error": WireError(ErrorCode.HELPER_FAILED, f"{message}; list the keys, and try again").to_wire()}
        if "error" not in result:
            by = "" if order.caller.name is None else f" by key {order.caller.name!r}"
            self._log.info("key %r is %s%s", order.name, DONE[order.verb], by, extra=noted(EventKind.KEYS))
            more = {} if order.verb == "revoke_key" else self._described(order)
            result = {"result": {**result, **more}}
        self._effects.append(order.asker.reply(pack_reply(result)))

    def _described(self, order: _Order) -> dict[str, Any]:
        """Return the key after a change; ``key`` is None if it was revoked meanwhile."""
        return {"key": self._ring.listed_as(order.name, order.caller), "notes": order.notes}


def _fields(verb: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rights and limits of a key as ``Identity`` has them. Raises WireError."""
    given = {key: value for key, value in given.items() if (key, value) != ("rights", None)}
    if verb == "set_key" and not given:
        raise RequestError(f"nothing to change: give one of {', '.join(FIELDS)}")
    if verb == "new_key":
        given.setdefault("rights", ["infer"])
    try:
        check_name(name)
        return read_fields(given, time.time())
    except KeysProblem as e:
        raise as_refusal(e) from None


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
    queries: PendingQueries
    authorizer: RequestAuthorizer


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """One CALL. The rights of its caller to use the verb, and the model that it names, have been checked.

    caller     the owner of the connection, or the key for which it asks
    channel    the number of the connection
    params     the parameters, without ``on_behalf_of``. Another name of a model was replaced by the model's own
    variables  variables of the chat template of the model or variant that was named
    """

    message: Call
    caller: Identity
    channel: int
    params: Params
    variables: Mapping[str, Any]

    def asker(self, party: int) -> Asker:
        """Return the client, as the one that waits for an answer. ``party``: its party, as in ``InFlight``."""
        return Asker(self.channel, self.message.call, party)


class Calls:
    """Answers calls. Each public method but ``answer`` answers the verb that has its name. Its parameters are those of
    ``protocol.verbs``, which ``answer`` has checked. It returns None if a worker or a process answers later."""

    def __init__(self, context: AdminContext) -> None:
        self._parts = context

    def answer(self, asked: CheckedCall, *, admin: bool) -> Result | None:
        """Return the result of a call; None if it comes later. Raises WireError that names the verb or the parameter.

        admin  whether the client may give orders on this socket
        """
        name = asked.message.verb
        if (verb := VERBS.get(name)) is None:
            message = f"unknown verb {name!r}: known are {', '.join(sorted(VERBS))}"
            raise WireError(ErrorCode.UNSUPPORTED, message, field="verb")
        if verb.order and not admin:
            message = f"{name!r} is an order: send it to the admin socket"
            raise WireError(ErrorCode.UNSUPPORTED, message, field="verb")
        try:
            params: Params = {} if verb.by_worker else read(verb.params, asked.params)
        except Unfit as e:
            raise _refusal(verb, e.flaws[0]) from None
        result: Result | None = getattr(self, name)(asked, **params)
        return result

    # --- what there is, and what happens --------------------------------------------------------------------------

    def models(self, asked: CheckedCall) -> Result:
        return {"models": models_of(self._parts, asked.caller), "listen": self._parts.status.listen_problem}

    def status(self, asked: CheckedCall, model: str | None = None, history: bool = False) -> Result:
        parts, caller = self._parts, asked.caller
        replicas = list(parts.fleet.registry.replicas.values()) if model is None else self._replicas(model, caller)
        supervisor = parts.status.describe()
        if caller.models is not None:
            replicas = [replica for replica in replicas if caller.may_use(replica.model)]
            supervisor["troubles"] = {k: words for k, words in supervisor["troubles"].items() if k in NAME_NO_MODEL}
            supervisor["turnovers"] = [*_turnovers_for(caller, supervisor["turnovers"])]
            for keys in filter(None, (supervisor["http_keys"], supervisor["tcp"])):
                keys["keys"] = [key for key in keys["keys"] if key["name"] == caller.name]  # others name their models
        return {
            "rights": [right for right in Right if right in caller.rights],
            "supervisor": supervisor,
            "gpus": parts.fleet.vram.describe_gpus(parts.fleet.registry.config.supervisor.vram_limit),
            "gpus_unknown": parts.fleet.vram.trouble,
            "models": self._without_others(
                caller,
                [
                    self._described(replica) | ({"speeds": list(replica.speeds)} if history else {})
                    for replica in replicas
                ],
            ),
        }

    def requests(self, asked: CheckedCall, limit: int = 100) -> Result:
        workers = self._parts.fleet.registry.replicas

        def shown(worker: str) -> str | None:
            return workers[worker].shown if worker in workers else None

        return self._parts.scheduler.unfinished.describe(asked.caller, limit, shown, time.monotonic())

    def ended_requests(self, asked: CheckedCall, after: int | None = None, limit: int = 100) -> Result:
        unix = time.time() - time.monotonic()
        ended = self._parts.scheduler.ended.since(after, limit, asked.caller, unix)
        return {"session": self._parts.status.session, **self._without_others(asked.caller, ended)}

    def story(self, asked: CheckedCall, id: str) -> Result:
        told = self._parts.scheduler.unfinished.story(id, asked.caller, time.time() - time.monotonic())
        during = self._parts.history.during if asked.caller.rights & SEES_ALL else lambda *_: []
        for story in told:
            story["events"] = during(story["model"], story["accepted"], story["total_ms"])
        return {"requests": self._without_others(asked.caller, told)}

    def events(
        self, asked: CheckedCall, model: str | None = None, after: int | None = None, limit: int = 100
    ) -> Result:
        caller, history = asked.caller, self._parts.history
        # models.yaml may have lost a model since
        if model is not None and model not in self._parts.fleet.registry.config.models and not history.knows(model):
            raise self._unknown(model, caller)

        def visible(about: str | None) -> bool:
            if model is not None and about != model:
                return False
            # an event of no model may name any model
            return caller.models is None or (about is not None and caller.may_use(about))

        found = history.since(after, limit, visible)
        return {"session": self._parts.status.session, **self._without_others(caller, found)}

    def metrics(self, asked: CheckedCall, model: str | None = None) -> Result:
        parts, caller = self._parts, asked.caller
        replicas = parts.fleet.registry.replicas.values() if model is None else self._replicas(model, caller)
        models = {replica.model for replica in replicas if caller.may_use(replica.model)}
        return {
            "session": parts.status.session,
            "cpu_s": time.process_time(),
            "waited_s": parts.reactor.waited_s,
            "bounds": {name: [float(bound) for bound in bounds] for name, bounds in HISTOGRAMS.items()},
            "events": parts.history.counts,
            "models": {name: parts.scheduler.figures(name, time.monotonic()) for name in sorted(models)},
        }

    def usage(self, asked: CheckedCall, **question: str) -> None:
        if (usage := self._parts.usage) is None:
            message = "supervisor.usage.record in models.yaml is false: nothing is counted"
            raise WireError(ErrorCode.UNSUPPORTED, message)
        usage.ask(question, asked.caller, asked.asker(asked.channel))

    def logs(
        self,
        asked: CheckedCall,
        model: str = limits.SUPERVISOR_NAME,
        lines: int = 200,
        after: str | None = None,
        since: float | None = None,
    ) -> Result:
        if after is not None and since is not None:
            raise RequestError("after and since are two places to begin at: give one of them", field="since")
        own = self._parts.status.own_logs.get(model)
        if own is not None and asked.caller.models is not None:
            key = asked.caller.name
            message = f"the log of the {model} names all models, and key {key!r} may not know them all"
            raise WireError(ErrorCode.FORBIDDEN, message, field="model")
        # The name is looked up in tables, and never becomes part of a path.
        path = self._replicas(model, asked.caller)[0].log_path if own is None else own
        return read_log(path, lines, after, since)

    def config(self, asked: CheckedCall, all: bool = False) -> Result:
        return describe_config(self._parts.fleet.registry.config.file, self._parts.reloads, every=all)

    def settings(self, asked: CheckedCall, model: str) -> Result:
        replica = self._replicas(model, asked.caller)[0]
        config = self._parts.fleet.registry.config  # which has no model that a reload is about to remove
        return describe_settings(config.models.get(replica.model, replica.spec), config.file)

    # --- questions for workers ------------------------------------------------------------------------------------

    def _ask_worker(self, asked: CheckedCall) -> None:
        """Hand a question to a worker of its model. Raises WireError if there is none."""
        parts, caller, message = self._parts, asked.caller, asked.message
        replica = self._ready_worker(message.verb, asked.params.get("model"), caller)
        party = asked.channel if caller is OWNER else parts.authorizer.party(caller)
        number = parts.queries.begin(replica.name, asked.asker(party))
        replica.last_active = time.monotonic()
        # The body is passed on as it came. If it were packed again, its floats could take twice as many bytes, and
        # exceed the limit. Only the template's variables of models.yaml have to be added.
        body = message.body
        given = asked.params.get("template_kwargs")
        if asked.variables and asked.params.get("messages") is not None and isinstance(given, dict | None):
            body = pack_body(asked.params | {"template_kwargs": {**asked.variables, **(given or {})}})
        ask = encode(Ask(number, message.verb, body))
        check_size(ask, Ask.kind)
        parts.effects.append(ToWorker(replica.name, replica.generation, ask))

    tokenize = detokenize = chat_template = _ask_worker

    # --- orders ---------------------------------------------------------------------------------------------------

    def start(self, asked: CheckedCall, model: str) -> Result:
        replicas = self._current(model, asked.caller)
        self._parts.shutdown.check_not_begun()
        for replica in replicas:
            self._parts.fleet.start(replica, f"start {_by(asked.caller)}")
        return _ordered(replicas)

    def stop(self, asked: CheckedCall, model: str, now: bool = False) -> Result:
        replicas = self._replicas(model, asked.caller)
        for replica in replicas:
            self._parts.fleet.stop(replica, f"stop {_by(asked.caller)}", now=now)
        return _ordered(replicas)

    def unload(self, asked: CheckedCall, model: str) -> Result:
        replicas = self._replicas(model, asked.caller)
        cause = f"unload {_by(asked.caller)}"
        for replica in replicas:
            if replica.current:
                self._parts.fleet.let_go_of(replica, cause)
            else:  # a reload brings it, or lets it leave: no request shall start it beside the other one
                self._parts.fleet.stop(replica, cause)
        return _ordered(replicas)

    def sleep(self, asked: CheckedCall, model: str) -> Result:
        replicas = self._current(model, asked.caller)
        for replica in replicas:
            self._parts.on_demand.sleep(replica, f"sleep {_by(asked.caller)}")
        return _ordered(replicas)

    def wake(self, asked: CheckedCall, model: str) -> Result:
        replicas = self._current(model, asked.caller)
        self._parts.shutdown.check_not_begun()
        for replica in replicas:
            self._parts.on_demand.wake_up(replica, f"wake {_by(asked.caller)}")
        return _ordered(replicas)

    def restart(self, asked: CheckedCall, model: str) -> Result:
        replicas = self._current(model, asked.caller)
        self._parts.shutdown.check_not_begun()
        wanted = {replica.shown: replica.generation + 1 for replica in replicas}
        turnover, cause = None, f"restart {_by(asked.caller)}"
        up = [replica for replica in replicas if replica.desired is Desired.UP and replica.state not in AT_REST]
        for replica in replicas:
            if len(replicas) == 1 or replica not in up:  # a worker that is down is just started
                self._parts.fleet.restart(replica, cause)
        if up and len(replicas) > 1:
            turnover = self._parts.reloads.restart_in_turns(up, cause)
        workers = {r.shown: {"state": str(r.state), "generation": wanted[r.shown]} for r in replicas}
        return {**workers[replicas[0].shown], "workers": workers, "turnover": turnover}

    def reload(self, asked: CheckedCall, model: str | None = None, how: str = How.AUTO) -> Result:
        self._parts.shutdown.check_not_begun()
        try:
            wanted = How(how)
        except ValueError:
            message = f"how is {how[:64]!r}: must be one of {', '.join(How)}"
            raise RequestError(message, field="how") from None
        caller = asked.caller
        cause = f"reload {_by(caller)}" if model is None else f"reload of {model[:64]} {_by(caller)}"
        try:
            return {"turnover": self._parts.reloads.read_again(cause, wanted, model)}
        except WireError as e:
            if caller.models is None:
                raise
            if e.code is ErrorCode.MODEL_NOT_FOUND:
                raise self._unknown(model or "", caller) from None
            # What is wrong with models.yaml may name any model.
            message = "nothing is changed: models.yaml cannot be used, and the supervisor's log says why"
            raise WireError(e.code, message) from None

    def shutdown(self, asked: CheckedCall, now: bool = False) -> Result:
        self._parts.shutdown.begin(f"shutdown {_by(asked.caller)}", now=now)
        return {}

    def cancel_request(self, asked: CheckedCall, id: str) -> Result:
        scheduler = self._parts.scheduler
        for request in scheduler.unfinished.find(asked.caller, id):
            self._parts.effects.extend(scheduler.cancel(*request.key, time.monotonic()))
        return {}

    def log_level(self, asked: CheckedCall, model: str | None = None, level: str | None = None) -> Result:
        if model is not None and model not in self._parts.status.own_logs:
            model = self._replicas(model, asked.caller)[0].model
        return {"levels": self._parts.logs.levels(model, level)}

    def keys(self, asked: CheckedCall, after: str = "", limit: int = 100) -> Result:
        return self._parts.keys.listed(after, limit, asked.caller)

    def _change_keys(self, asked: CheckedCall, name: str, **fields: Any) -> None:
        config, asker = self._parts.fleet.registry.config, asked.asker(asked.channel)
        self._parts.keys.begin(asked.message.verb, name, fields, asked.caller, asker, config)

    new_key = set_key = revoke_key = _change_keys

    # --- parts of answers -----------------------------------------------------------------------------------------

    def _without_others(self, caller: Identity, value: Any) -> Any:
        """Return a part of an answer whose texts for people name no model that a key may not use.

        Such a text can say which other models hold a GPU's memory, or for which one a model was evicted.
        """
        if caller.models is None:
            return value
        registry = self._parts.fleet.registry
        models = {*registry.config.models, *(replica.model for replica in registry.replicas.values())}
        hidden = sorted((model for model in models if not caller.may_use(model)), key=len, reverse=True)
        if not hidden:
            return value
        names = "|".join(map(re.escape, hidden))
        return _replaced(value, re.compile(rf"(?<![a-z0-9._-])(?:{names})(?::[0-9]+)?(?![a-z0-9_-]|\.[a-z0-9])"))

    def _described(self, replica: Replica) -> Result:
        fleet = self._parts.fleet
        pid = replica.process.local_pid if replica.process else None
        placed = {**replica.memory.describe(), **fleet.vram.describe(replica.name, pid)}
        if replica.process is not None:
            placed |= replica.process.describe()
        names = fleet.registry.config.names.describe(replica.model)
        return {**masked_values(replica.describe(self._parts.scheduler, time.monotonic())), **names, **placed}

    # --- the workers of a name ------------------------------------------------------------------------------------

    def _replicas(self, name: str, caller: Identity) -> list[Replica]:
        """Return the workers of the model of this name, or the one worker of this name.

        Raises WireError, which names only models that ``caller`` may use.
        """
        registry = self._parts.fleet.registry
        if replicas := registry.of_model(name):
            return replicas
        if replica := registry.shown(name):
            return [replica]
        raise self._unknown(name, caller)

    def _unknown(self, name: str, caller: Identity) -> WireError:
        """Return the error for a name that no model has, with the models that ``caller`` may use."""
        return self._parts.fleet.registry.config.names.unknown(name, caller.may_use)

    def _current(self, name: str, caller: Identity) -> list[Replica]:
        """Return the workers of a model that take orders. Raises WireError if there is none.

        During a turnover, the worker that is to leave and its successor beside it take no orders.
        """
        replicas = [replica for replica in self._replicas(name, caller) if replica.current]
        if not replicas:
            message = f"{name!r} is there for as long as a reload takes: order that of its model, or `modelctl stop` it"
            raise WireError(ErrorCode.UNSUPPORTED, message, field="model")
        return replicas

    def _ready_worker(self, verb: str, name: object, caller: Identity) -> Replica:
        """Return a worker that can answer a question about this model. Raises WireError if there is none.

        A worker that sleeps can answer, since it keeps its tokenizer. One that is unloaded is started, so that the
        client may ask again. But a look at its template starts nothing.
        """
        if not isinstance(name, str):
            raise RequestError("model is missing: name a model", field="model")
        replicas = self._replicas(name, caller)
        if ready := [replica for replica in replicas if replica.state in _TOKENIZES]:
            return min(ready, key=lambda replica: self._parts.scheduler.work(replica.name)[0])
        self._parts.shutdown.check_not_begun()
        if any(replica.state is WorkerState.UNLOADED for replica in replicas):
            if verb == "chat_template":
                message = f"model {name!r} is not loaded, so its chat template is not known: a request loads it"
                raise WireError(ErrorCode.MODEL_NOT_RUNNING, message)
            self._parts.on_demand.wake(replicas[0].model)
        if any(replica.state in _COMING for replica in replicas):
            message = f"model {name!r} is being loaded: try later"
            raise WireError(ErrorCode.MODEL_NOT_RUNNING, message, retry_after_ms=1000)
        failed = [replica for replica in replicas if replica.state is WorkerState.FAILED]  # its error says most
        raise (failed or replicas)[0].refusal()


def _refusal(verb: Verb, flaw: Flaw) -> RequestError:
    """Return the error for parameters that do not fit the verb."""
    key, value, problem = flaw.path[-1], flaw.value, flaw.problem
    field = key[:64] if isinstance(key, str) else None
    if problem is None:
        return RequestError(f"{key} is missing: {_REMEDIES[str(key)]}", field=field)
    if not isinstance(problem, Allowed):
        hint = f"known are {', '.join(verb.known)}" if verb.known else "this verb takes none"
        return RequestError(f"unknown parameter {spelled_name(key)}: {hint}", field=field)
    if type(value) is problem.kind:
        return RequestError(f"{key} is {value}: must be {problem.bounds}", field=field)
    return RequestError(f"{key} must be {_TYPE_NAMES[problem.kind]}", field=field)


_TYPE_NAMES: Final = {str: "a string", bool: "true or false", int: "an integer", float: "a number"}
_REMEDIES: Final = {
    "model": "name a model",
    "id": "name a request as `requests` shows it, or by a trace id",
    "name": "name the key",
}
"""What to do if a parameter is missing."""


def models_of(parts: AdminContext, caller: Identity) -> list[Result]:
    """Return the models that a key may use, as clients see them."""
    models: dict[str, list[Replica]] = {}
    for replica in parts.fleet.registry.replicas.values():
        models.setdefault(replica.model, []).append(replica)
    names = parts.fleet.registry.config.names
    return [_as_one(name, replicas, names) for name, replicas in models.items() if caller.may_use(name)]


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
        **({} if best.makes is None else {"makes": best.makes}),
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


def _by(identity: Identity) -> str:
    """Return who gave an order, as the reason of what follows says it."""
    return "ordered" if identity.name is None else f"ordered by key {identity.name}"


def _ordered(replicas: list[Replica]) -> Result:
    """Return the states of a model's workers after an order. The first worker's state also stands at the top level."""
    workers = {r.shown: {"state": str(r.state), "generation": r.generation} for r in replicas}
    return {**workers[replicas[0].shown], "workers": workers}
