"""Handle the messages of clients: requests, cancels, calls and credit."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from protocol import __version__, limits
from protocol.codec import encode, pack_body, pack_reply, unpack_body
from protocol.errors import ErrorCode, WireError
from protocol.messages import ON_BEHALF_OF, Call, Cancel, Credit, Generate, Hello, Message, Ping, Pong, Reply, Welcome
from protocol.process.shown import masked_values
from protocol.verbs import QUESTION_VERBS
from supervisor.calls import AdminContext, Calls, CheckedCall, models_of
from supervisor.config.rules import ModelNames
from supervisor.keys.rights import OWNER, Identity
from supervisor.ports.authorizer import RequestAuthorizer
from supervisor.ports.client_port import ClientPort, ClientPorts
from supervisor.ports.connections import ClientConnection
from supervisor.requests.request import EffectQueue, ToClient, number_of, refusal, stay_of
from supervisor.requests.scheduler import Scheduler


@dataclass(eq=False, repr=False)
class ClientMessages:
    """The handler of all client messages. It queues each answer as an effect, like all other results of a message.

    So an answer is sent after the effects that were queued before it, such as the terminal events of requests that an
    order ends.
    """

    _clients: ClientPorts
    _scheduler: Scheduler
    _authorizer: RequestAuthorizer
    _context: AdminContext
    _effects: EffectQueue

    def __post_init__(self) -> None:
        self._calls = Calls(self._context)

    def handle(self, port: ClientPort, connection: ClientConnection, message: Message) -> None:
        """Handle one valid message of a connection of this port."""
        if connection.identity is not OWNER and not self._admits(connection, message):
            return
        channel, now = connection.channel, time.monotonic()
        match message:
            case Credit(request, events):
                self._effects.extend(self._scheduler.credit(channel, request, events, now))
            case Generate():
                self._generate(port, connection, message, now)
            case Call():
                self._call(port, connection, message)
            case Cancel(request):
                self._effects.extend(self._scheduler.cancel(channel, request, now))
            case Ping(nonce):
                self._answer(channel, Pong(nonce))
            case Hello():
                connection.greeted = True
                self._answer(channel, Welcome(pack_body(self._welcome(connection.identity))))
            case Pong(nonce) if nonce:
                self._effects.extend(self._scheduler.pong(channel, nonce, now))
            case _:
                pass  # PONG 0 answers a probe, which served its purpose by being sent

    def _admits(self, connection: ClientConnection, message: Message) -> bool:
        """Return whether the key of a connection over TCP has the right to send this message. If not, say so.

        GENERATE and CALL are checked later, because they may be for another key.
        """
        if isinstance(message, Generate | Call):
            return True
        try:
            self._authorizer.check(connection.identity, message)
        except WireError as e:
            self._refuse(connection.channel, message, e)
            return False
        return True

    def _generate(self, port: ClientPort, connection: ClientConnection, message: Generate, now: float) -> None:
        """Give a request to the scheduler, if its connection may send it for the key that it names."""
        channel, caller, party = connection.channel, connection.identity, None
        try:
            if port is self._clients.admin:
                raise WireError(ErrorCode.UNSUPPORTED, "requests go to the front socket", field="request")
            if ON_BEHALF_OF in message.route:
                caller = self._authorizer.caller(caller, message.route[ON_BEHALF_OF], f"route.{ON_BEHALF_OF}")
            named = self._names.find_or_default(message.model, caller.may_use)
            if named.model != message.model:
                message = replace(message, model=named.model)
            if caller is not OWNER:
                party = self._authorizer.check_request(caller, message, now, self._names.nearest)
            if not self._scheduler.knows(message.model):
                raise self._names.unknown(message.model, caller.may_use)
            if (stay := stay_of(message.route)) is not None:
                self._context.on_demand.check_stay(message.model, *stay)
        except WireError as e:
            self._refuse(channel, message, e)
            return
        self._effects.extend(self._scheduler.submit(channel, message, now, party, caller, named.defaults))
        if stay is not None and self._scheduler.find(channel, message.request) is not None:
            self._context.on_demand.stay(message.model, stay[0])
        if party is not None:
            self._authorizer.note(caller, channel, message, now)

    def _call(self, port: ClientPort, connection: ClientConnection, message: Call) -> None:
        """Answer a call, if no worker and no process answers it later."""
        try:
            params, caller = unpack_body(message.body), connection.identity
            if ON_BEHALF_OF in params:
                caller = self._authorizer.caller(caller, params.pop(ON_BEHALF_OF), ON_BEHALF_OF)
            variables = self._resolve(message.verb, params, caller)
            if caller is not OWNER:
                self._authorizer.check_call(caller, message, params, self._names.nearest)
            asked = CheckedCall(message, caller, connection.channel, params, variables)
            result = self._calls.answer(asked, admin=self._takes_orders(port))
            if result is None:
                return
            reply = {"result": result}
        except WireError as e:
            reply = {"error": masked_values(e.to_wire())}
        self._answer(connection.channel, Reply(message.call, pack_reply(reply)))

    @property
    def _names(self) -> ModelNames:
        return self._context.fleet.registry.config.names

    def _resolve(self, verb: str, params: dict[str, Any], caller: Identity) -> Mapping[str, Any]:
        """Put the model itself in the place of another name of it in the parameters of a call.

        Return the template's variables of the model or variant that was named. Only a question to a worker may leave
        the model to ``default_model``. An order that names no model must not stop one.
        """
        name = params.get("model", "")
        if not isinstance(name, str) or not (name or verb in QUESTION_VERBS):
            return {}
        named = self._names.find_or_default(name, caller.may_use)
        params["model"] = named.model
        return named.template_kwargs

    def _takes_orders(self, port: ClientPort) -> bool:
        """Return whether orders may come to this port. Over TCP the rights of the key have been checked."""
        return port is not self._clients.front

    def _answer(self, channel: int, message: Message) -> None:
        self._effects.append(ToClient(channel, encode(message)))

    def _refuse(self, channel: int, message: Message, error: WireError) -> None:
        number = number_of(message)
        runs = self._scheduler.holds(channel, number)
        self._answer(channel, refusal(error, message.kind, number, runs=runs))

    def _welcome(self, identity: Identity) -> dict[str, Any]:
        return {
            "server": f"modelctl {__version__}",
            "session": self._context.status.session,
            "window": limits.STREAM_WINDOW,
            "max_frame": limits.SOCKET_MAX_FRAME,
            "models": models_of(self._context, identity),
        }
