"""The monitor of a listening socket, opened so that libzmq cannot get far ahead of us in taking connections.

libzmq's own thread takes connections as they come, whether our thread runs or not, and aborts the process when one over
ipc finds no descriptor left. But it waits where its events are not read: its end of a monitor's pipe holds 1,000 of
them, and ours as many more as we allow. So no more connections than that are ever taken behind our back, however fast
they come and however long we are kept from looking.
"""

from itertools import count

import zmq

from supervisor.ports.sockets import Context

UNSEEN = 1000 + 1
"""Connections that are taken before their events are read, at most: libzmq's default mark, and ours below."""
_OURS = 1
_numbers = count(1)
"""An address is free again some time after its socket was closed, when another may be where that one was."""


def open_monitor(context: Context, socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """The socket to read its events from.

    It is closed, and never disabled: ``disable_monitor`` waits for libzmq's thread, which may be waiting for us to read
    on. What is left of it goes with the context's ``term``, which wakes that thread.
    """
    endpoint = f"inproc://monitor-{next(_numbers)}"
    socket.monitor(endpoint, events)
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, _OURS)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(endpoint)
    return monitor
