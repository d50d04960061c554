"""Make the message that answers a refused frame. Pure. ``protocol.messages`` (ERROR) states the rule."""

from protocol.codec import pack_error, pack_reply
from protocol.errors import WireError
from protocol.messages import Error, Kind, Message, Reply
from protocol.process.masking import masked_values


def refusal(error: WireError, kind: Kind | None, number: int, *, runs: bool) -> Error | Reply:
    """Return the message that answers a refused frame.

    A client ends the request that an ERROR names. So only a GENERATE is answered by an ERROR with its number, and only
    while no accepted request has that number.

    kind, number  of the refused frame, see ``codec.named``
    runs          whether a request of this connection with that number was accepted and has not ended
    """
    if kind is Kind.CALL and number:
        return Reply(number, pack_reply({"error": masked_values(error.to_wire())}))
    if kind is Kind.GENERATE and number and not runs:
        return Error(number, pack_error(error))
    refused = {} if kind is None else {"kind": int(kind), **({"number": number} if number else {})}
    return Error(0, pack_reply({**masked_values(error.to_wire()), "refused": refused}))


def number_of(message: Message) -> int:
    """Return the number of the request or call that a client's message names, 0 if it names none."""
    number: int = getattr(message, "request", getattr(message, "call", 0))
    return number
