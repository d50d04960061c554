"""What a socket's monitor tells. pyzmq's own module for this imports asyncio, which takes time at every start."""

from struct import Struct

import zmq

_EVENT = Struct("=Hi")


def recv_monitor_message(monitor: zmq.Socket[bytes], flags: int = 0) -> dict[str, int]:
    """The next event: {"event": number, "value": what belongs to it}. Raises zmq.Again if there is none (NOBLOCK)."""
    number, value = _EVENT.unpack(monitor.recv_multipart(flags)[0])
    return {"event": number, "value": value}
