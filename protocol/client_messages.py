"""The messages between clients and the supervisor, except EVENTS. Import them from ``protocol.messages``.

Bodies hold prompts and answers, which no log may show: so ``repr`` of a message leaves out its body.
"""

from dataclasses import field
from typing import Any

from protocol.kinds import KIB, MIB, Kind, Message, Way, message


@message(Kind.HELLO, Way.CLIENT_TO_SUPERVISOR | Way.WORKER_TO_SUPERVISOR, largest=16 * KIB)
class Hello(Message):
    """Begin the session. It is the first message of a connection and is sent once.

    GENERATE and CALL may follow without waiting for WELCOME. The supervisor refuses a second HELLO, and every other
    message that comes before a HELLO that it has taken. Over TCP, HELLO must come within 5 seconds.
    """

    body: bytes = field(repr=False)


@message(Kind.GENERATE, Way.CLIENT_TO_SUPERVISOR, largest=3 * MIB)
class Generate(Message):
    """Ask a model for an answer.

    The supervisor answers with ACCEPTED, or refuses the request with an ERROR of the same number. After ACCEPTED come
    events, of which exactly one, the last, is terminal. The supervisor reads all elements but the body. The worker
    reads the body. So an error event after ACCEPTED reports what is wrong in the body.
    """

    request: int
    """The client's number for the request: 1 to 2^64 - 1. Use each number once per connection."""
    model: str
    """The name of a model, an alias, or a variant (`qwen:precise`), at most 256 characters. An empty string stands for
    `default_model` of models.yaml."""
    route: dict[str, Any]
    """Options that the supervisor reads. Every key is optional, so the map may be empty. The map itself is required."""
    body: bytes = field(repr=False)
    """The prompt and the options."""


@message(Kind.CANCEL, Way.CLIENT_TO_SUPERVISOR, largest=64)
class Cancel(Message):
    """End a request. Its terminal event still comes: FINISHED with the finish_reason `cancelled`, or another end that
    was faster.

    Events that the supervisor held for lack of credit come before the terminal event. They need no credit any more. The
    supervisor ignores a CANCEL with an unknown number or of a request that has ended. So a second CANCEL does nothing.
    """

    request: int


@message(Kind.CREDIT, Way.CLIENT_TO_SUPERVISOR, largest=64)
class Credit(Message):
    """Allow the supervisor to send more events of one request. A CREDIT with an unknown number is ignored."""

    request: int
    events: int
    """The number of further events. More than `window` of WELCOME counts as `window`."""


@message(Kind.CALL, Way.CLIENT_TO_SUPERVISOR, largest=3 * MIB)  # a text to tokenize
class Call(Message):
    """Send the supervisor a query or an order. It answers with exactly one REPLY of the same number.

    Every verb also takes the parameter ``on_behalf_of``: the id of the HTTP key for which a gateway asks. It means the
    same as in the route of GENERATE. The rights and models of that key then decide, and not those of the connection.
    """

    call: int
    """The client's number for the call: 1 to 2^64 - 1. The supervisor copies the number into REPLY. Replies may come in
    another order than the calls."""
    verb: str
    """One of the verbs below, at most 256 characters."""
    body: bytes = field(repr=False)
    """The parameters, by name. Unknown names are refused."""


@message(Kind.PING, Way.CLIENT_TO_SUPERVISOR | Way.SUPERVISOR_TO_CLIENT, largest=64)
class Ping(Message):
    """Ask the other side for a PONG. Either side may send it, at any time after HELLO."""

    nonce: int
    """Any number. PONG repeats it."""


@message(Kind.PONG, Way.CLIENT_TO_SUPERVISOR | Way.SUPERVISOR_TO_CLIENT, largest=64)
class Pong(Message):
    """Answer PING. The supervisor answers messages of one connection in order, so everything that it sent before PONG
    has arrived before PONG."""

    nonce: int
    """The number in PING."""


@message(Kind.WELCOME, Way.SUPERVISOR_TO_CLIENT, largest=MIB)
class Welcome(Message):
    """Answer HELLO: the session has begun."""

    body: bytes = field(repr=False)


@message(Kind.ACCEPTED, Way.SUPERVISOR_TO_CLIENT, largest=64 * KIB)
class Accepted(Message):
    """Answer GENERATE: the request will get exactly one terminal event. ACCEPTED comes before every event and REPORT of
    the request."""

    request: int
    body: bytes = field(repr=False)


@message(Kind.ERROR, Way.SUPERVISOR_TO_CLIENT, largest=64 * KIB)
class Error(Message):
    """Refuse a frame, or say why the connection ends.

    ERROR with a number refuses the GENERATE of that number. It never names a request that was accepted and has not
    ended. ERROR of request 0 ends no stream by itself. With ``refused`` it answers a frame that is neither a CALL nor a
    GENERATE with a free number. Without ``refused`` it is about the connection, which then ends.
    """

    request: int
    """The number of the refused GENERATE, or 0."""
    body: bytes = field(repr=False)


@message(Kind.REPLY, Way.SUPERVISOR_TO_CLIENT, largest=3 * MIB)
class Reply(Message):
    """Answer CALL."""

    call: int
    body: bytes = field(repr=False)


@message(Kind.GOAWAY, Way.SUPERVISOR_TO_CLIENT, largest=64 * KIB)
class GoAway(Message):
    """Say that the supervisor is shutting down. Requests that it has accepted are still finished, as long as its drain
    lasts; new ones are refused with `draining`. Then the connection ends."""

    body: bytes = field(repr=False)


@message(Kind.REPORT, Way.SUPERVISOR_TO_CLIENT, largest=64 * KIB)
class Report(Message):
    """Report the progress of a request until its first token, if the request asked for reports with ``progress``.

    REPORT has no number in the sequence of events, and needs no credit. The supervisor may leave out a REPORT that the
    next one supersedes.
    """

    request: int
    body: bytes = field(repr=False)
