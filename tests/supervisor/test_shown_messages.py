"""The text of a message object, for example in a traceback, reveals no prompt and no answer."""

from protocol.codec import pack_body
from protocol.messages import MESSAGE_CLASSES, Generate
from supervisor.requests.queue import FairQueue
from supervisor.requests.request import InFlight, SendBuffer, read_route

SECRET = "sesame"


def test_bodies_are_not_shown() -> None:
    assert SECRET not in repr(Generate(1, "a", {}, pack_body({"prompt": SECRET})))
    for message_class in MESSAGE_CLASSES.values():
        fields = message_class.__dataclass_fields__
        assert "body" not in fields or not fields["body"].repr, message_class.__name__
    body, ids, account = SECRET.encode(), bytearray(SECRET.encode()), FairQueue().account(1, "normal")
    request = InFlight(1, 1, "a", read_route({}), body, 1, account, 0.0, 1, SendBuffer())
    request.ids = ids
    assert SECRET not in repr(request)
