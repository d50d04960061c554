"""The rule that HELLO comes first on a connection. Pure."""

from protocol.codec import unpack_body
from protocol.errors import ErrorCode, FrameError
from protocol.messages import Hello, Message
from supervisor.requests.refusals import number_of


def check_greeting(message: Message, *, greeted: bool) -> None:
    """Raise FrameError unless HELLO comes first, once, and with a map.

    greeted  whether HELLO has come before on this connection
    """
    kind, number = message.kind, number_of(message)
    if not isinstance(message, Hello):
        text = "the first message of a connection is HELLO"
        raise FrameError(ErrorCode.BAD_FRAME, text, kind=kind, number=number)
    if greeted:
        text = "HELLO was said before on this connection: say it once"
        raise FrameError(ErrorCode.BAD_FRAME, text, kind=kind)
    try:
        unpack_body(message.body)
    except FrameError as e:
        raise FrameError(e.code, f"HELLO: {e.message}", kind=kind, field=e.field) from None
