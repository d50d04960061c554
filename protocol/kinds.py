"""The kinds of messages, and the decorator that registers a class for a kind.

Other modules import ``Kind`` and ``Message`` from ``protocol.messages``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Flag, IntEnum, auto
from typing import ClassVar, Final, TypeVar, dataclass_transform

VERSION: Final = 1
"""Major version of the protocol, first element of every frame."""


class Kind(IntEnum):
    """The second element of every frame."""

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
    SLEEP = 43
    WAKE = 44
    SLEPT = 45
    WOKE = 46
    LOG_STYLE = 47


KIB: Final = 1 << 10
MIB: Final = 1 << 20


class Way(Flag):
    """The direction of a message."""

    CLIENT_TO_SUPERVISOR = auto()
    SUPERVISOR_TO_CLIENT = auto()
    SUPERVISOR_TO_WORKER = auto()
    WORKER_TO_SUPERVISOR = auto()


class Message:
    """A message of any kind. The fields of a subclass are the elements of the frame after the kind, in the same order.

    kind     the second element of the frame
    ways     the directions in which a message of this kind may go
    largest  most bytes of a frame of this kind. The receiver refuses a larger frame
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
