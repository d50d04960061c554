"""Messages between processes of this project: dataclasses, which cross a socket as maps.

A message is one msgpack map. Its key ``kind`` is the name of the class, and the other keys are its fields.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from protocol.codec import pack_body, unpack_body
from protocol.errors import ErrorCode, FrameError
from protocol.values import Unfit, read

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


def pack(message: "DataclassInstance") -> bytes:
    """Return a message as bytes."""
    return pack_body({"kind": type(message).__name__, **asdict(message)})


class Kinds(Generic[T]):
    """The messages that one side takes.

    between  the two sides, for errors
    kinds    the classes. Their types say which values a field may have, see ``protocol.values``
    """

    def __init__(self, between: str, *kinds: type[Any]) -> None:
        self._between = between
        self._kinds = {kind.__name__: kind for kind in kinds}

    def read(self, packed: bytes) -> T:
        """Return the message in these bytes. Raises FrameError."""
        fields = unpack_body(packed)
        name = str(fields.pop("kind", None))
        try:
            message: T = read(self._kinds[name], fields)
        except KeyError:
            raise self.wrong("a message of an unknown kind") from None
        except Unfit:  # its words may hold a name of the other side's, which is not for a log
            raise self.wrong(f"a message {name} with wrong values") from None
        return message

    def wrong(self, what: str) -> FrameError:
        """Return the error for something that the other side cannot mean."""
        return FrameError(ErrorCode.BAD_FRAME, f"between {self._between}: {what}")
