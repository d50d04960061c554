"""The calls on a socket that are made for every token, without the cost of pyzmq's wrappers.

``Socket.send`` of pyzmq looks at arguments that modelctl never gives, and each ``|`` or ``&`` of its flags is a call
into Python's enum. Together they take as long as sending itself. The exception ``Again`` of a receive without a message
takes three times as long as asking first whether a message has come.
"""

import struct
from collections.abc import Callable
from typing import Any, Final

import zmq
import zmq.backend

from protocol.process.compiled import find

DONT_WAIT: Final = int(zmq.NOBLOCK)
_MORE_FOLLOWS: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_RCVMORE: Final = int(zmq.RCVMORE)
_MONITOR_EVENT: Final = struct.Struct("=Hi")

AnySocket = zmq.Socket[bytes]
_send: Callable[[AnySocket, bytes, int], None] = zmq.backend.Socket.send
_option: Callable[[AnySocket, int], Any] = zmq.backend.Socket.get
receive_now: Callable[[AnySocket, int], bytes] = zmq.backend.Socket.recv
"""Receive one part. Takes the socket and DONT_WAIT. Raises zmq.Again if there is none."""


def send_now(socket: AnySocket, frame: bytes) -> None:
    """Send one frame. Raises zmq.Again if it would have to wait."""
    _send(socket, frame, DONT_WAIT)


def send_to(socket: AnySocket, routing_id: bytes, frame: bytes) -> None:
    """Send one frame from a ROUTER to a peer. Raises ZMQError: EHOSTUNREACH if the peer is gone, else zmq.Again."""
    _send(socket, routing_id, _MORE_FOLLOWS)
    _send(socket, frame, DONT_WAIT)


def plain_has_input(socket: AnySocket) -> bool:
    """Return whether a message can be received now."""
    return bool(_option(socket, _EVENTS) & _POLLIN)


_compiled = find("protocol.process.libzmq")
has_input: Callable[[AnySocket], bool] = plain_has_input if _compiled is None else _compiled.has_input


def has_more(socket: AnySocket) -> bool:
    """Return whether more parts follow the one that was received last."""
    return bool(_option(socket, _RCVMORE))


def monitor_event(monitor: AnySocket) -> tuple[int, int]:
    """Return (number, value) of the next event of a socket's monitor. Raises zmq.Again if there is none.

    ``zmq.utils.monitor`` has such a function, but imports asyncio and OpenSSL. That takes 4 MB, and time at each start.
    """
    number, value = _MONITOR_EVENT.unpack(monitor.recv_multipart(DONT_WAIT)[0])
    return number, value
