"""The kinds of messages, and how a class is registered for one. Import both from ``protocol.messages``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag, IntEnum, auto
from typing import ClassVar, Final, TypeVar, dataclass_transform

VERSION: Final = 1
"""Major version of the protocol, first element of every frame."""


class Kind(IntEnum):
    """Second element of every frame."""

    HELLO = 1
    GENERATE = 2
    CANCEL = 3
    CREDIT = 4
    CALL = 5
    PING = 6
    PONG = 7
    WELCOME = 16
    ACCEPTED = 17
    EVENTS = 18
    ERROR = 19
    REPLY = 20
    GOAWAY = 22
    REPORT = 23
    JOB = 32
    CANCEL_JOB = 33
    READY = 34
    SHUTDOWN = 35
    PROGRESS = 36
    STATS = 37
    PREFILL = 38
    ASK = 39
    ANSWER = 40
    PARKED = 41
    COMPILED = 42


KIB: Final = 1 << 10
MIB: Final = 1 << 20


class Way(Flag):
    """From whom to whom a message goes."""

    CLIENT_TO_SUPERVISOR = auto()
    SUPERVISOR_TO_CLIENT = auto()
    SUPERVISOR_TO_WORKER = auto()
    WORKER_TO_SUPERVISOR = auto()


class Message:
    """A message of any kind. A subclass has the elements of the frame behind the kind as its fields, in their order.

    kind     the second element of the frame
    ways     from whom to whom it goes
    largest  bytes that a frame of this kind may have. The receiver refuses a larger one
    """

    __slots__ = ()
    kind: ClassVar[Kind]
    ways: ClassVar[Way]
    largest: ClassVar[int]


MESSAGE_CLASSES: Final[dict[Kind, type[Message]]] = {}
"""The class of each kind. The decorator ``message`` fills it in."""
_M = TypeVar("_M", bound=Message)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def message(kind: Kind, ways: Way, *, largest: int, frozen: bool = True) -> Callable[[type[_M]], type[_M]]:
    """Register a class as the message of a kind, and make it a dataclass. See ``Message`` for the arguments.

    frozen  a frozen instance takes three times as long to make. EVENTS is not frozen: there is one for every token
    """

    def register(cls: type[_M]) -> type[_M]:
        cls.kind, cls.ways, cls.largest = kind, ways, largest
        made = dataclass(frozen=frozen, slots=True)(cls)
        MESSAGE_CLASSES[kind] = made
        return made

    return register
