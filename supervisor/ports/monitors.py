"""Open the monitor of a listening socket so that libzmq cannot get far ahead of the supervisor.

libzmq's own thread takes connections as they come, whether the supervisor's thread runs or not. libzmq aborts the
process if it finds no descriptor for a connection over ipc. But libzmq's thread waits while the events of its monitor
are not read. libzmq's end of the monitor's pipe holds 1,000 events, and the supervisor's end as many as its mark
allows. So libzmq never takes more connections than that before the supervisor has read their events.
"""

from itertools import count

import zmq

from supervisor.ports.sockets import Context

UNSEEN = 1000 + 1
"""The most connections that libzmq takes before their events are read: its default mark plus ``_OUR_MARK``."""
_OUR_MARK = 1
_numbers = count(1)
"""Numbers for addresses. An address becomes free only some time after its socket was closed, so none is used twice."""


def open_monitor(context: Context, socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Return the socket from which the events of ``socket`` can be read.

    events  the events to report, as bits

    Close the returned socket, and do not call ``disable_monitor``: it waits for libzmq's thread, which may be waiting
    for the supervisor to read events. The context's ``term`` wakes that thread and removes the rest of the monitor.
    """
    endpoint = f"inproc://monitor-{next(_numbers)}"
    socket.monitor(endpoint, events)
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, _OUR_MARK)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(endpoint)
    return monitor
