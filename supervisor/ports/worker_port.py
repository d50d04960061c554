"""The ROUTERs that workers connect to: one over ipc, and those over TCP that the launcher adds.

Each worker has the routing id that it was started with. The loop drops frames from any other routing id.

No other process may connect. The reason: these sockets have a receive mark, because workers must wait for a supervisor
that is slower than they are. At such a mark a peer can make libzmq 4.3.5 abort the process: the peer sends a PING of
ZMTP, and its connection ends (see ``sockets.client_router``). Workers send no PING.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import zmq

from protocol.process.compiled import find
from protocol.process.sockets import DONT_WAIT, has_input, has_more, receive_now, send_to
from supervisor.ports.client_port import ClientPort
from supervisor.ports.sockets import Context, bind_private, router, skip_parts
from supervisor.ports.zap import WORKER_DOMAIN
from supervisor.requests.queue import WorkerSlot
from supervisor.runtime import SocketFile

if TYPE_CHECKING:
    from supervisor.ports.relay import Relay

RELAY = "supervisor.ports.relay"
"""The compiled module that passes on the frames that take the fast path."""
DRAIN_LIMIT = 256
"""The most frames that are taken in one turn of the loop."""
ASKED_FIRST = 4
"""Frames of a turn, after the first one, for which the port asks libzmq whether a frame is there before it takes the
frame. The exception for "nothing there" costs more than these questions. If that many frames have come, more will
follow, so the port takes them without asking."""
SEND_MARK = 10_000
"""Frames that may be on the way to one worker."""
RECEIVE_MARK = 1000
"""Frames of one worker that libzmq may have read and the supervisor has not. They hold at most 7 MB of events, since
the worker's link limits the size of a frame. This many frames wait here whenever a worker is faster than the
supervisor, for example while the supervisor waits for a processor. All other events wait in the worker. A mark of
10,000 was no faster, and a mark of 256 was slower by a tenth."""


class WorkerPort:
    """A socket for workers.

    socket   a bound ROUTER, of ``worker_router``
    clients  the port to which compiled code, if there is any, passes ordinary frames on
    slot_of  returns the worker slot of the worker that has a routing id; None if Python handles all its frames
    more     whether more frames may be waiting after the last ``receive``
    """

    def __init__(
        self, socket: zmq.Socket[bytes], clients: ClientPort, slot_of: Callable[[bytes], WorkerSlot | None]
    ) -> None:
        self.socket = socket
        self.more = False
        self._skipping = False
        """Whether the rest of a message of several parts must still be read and dropped."""
        self._relay: Relay | None = None
        if compiled := find(RELAY):
            self._relay = compiled.Relay(self.socket, clients.socket, clients.connections_by_channel, slot_of)

    def receive(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Take at most DRAIN_LIMIT frames. Yield those that do not take the fast path: (sender's routing id, frame).

        The frame is None for a message of several parts, which no worker sends: its parts are dropped. The caller
        handles each frame before it asks for the next one.
        """
        return self._receive() if self._relay is None else self._receive_from_relay(self._relay)

    def _receive_from_relay(self, relay: "Relay") -> Iterator[tuple[bytes, bytes | None]]:
        self.more, left = True, DRAIN_LIMIT
        while left:
            if self._skipping:
                self._skipping = not skip_parts(self.socket)
                if self._skipping:
                    return
            taken, routing_id, frame, self._skipping = relay.take(left)
            left -= taken
            if routing_id is not None:
                yield routing_id, frame
            elif left:
                self.more = False
                return

    def _receive(self) -> Iterator[tuple[bytes, bytes | None]]:
        socket, self.more = self.socket, True
        for taken in range(DRAIN_LIMIT):
            if self._skipping:
                self._skipping = not skip_parts(socket)
                if self._skipping:
                    return
            if 0 < taken < ASKED_FIRST and not has_input(socket):
                break
            try:
                routing_id = receive_now(socket, DONT_WAIT)
            except zmq.Again:
                break
            frame = receive_now(socket, DONT_WAIT)
            if has_more(socket):  # an unread part would be taken for the next routing id
                self._skipping = True
                yield routing_id, None
            else:
                yield routing_id, frame
        else:
            return
        self.more = False

    @property
    def relays(self) -> bool:
        """Whether compiled code passes on the frames that take the fast path."""
        return self._relay is not None

    def send(self, routing_id: bytes, frame: bytes) -> bool:
        """Send a frame. Return False if the worker is not connected any more, or is SEND_MARK frames behind."""
        try:
            send_to(self.socket, routing_id, frame)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self.socket.close(linger=0)


def worker_router(context: Context) -> zmq.Socket[bytes]:
    """Return a ROUTER for workers, which is not bound yet."""
    socket = router(context)
    socket.setsockopt(zmq.SNDHWM, SEND_MARK)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_MARK)
    return socket


def open_local_port(
    context: Context, endpoint: str, clients: ClientPort, slot_of: Callable[[bytes], WorkerSlot | None]
) -> tuple[WorkerPort, SocketFile]:
    """Bind a private ipc ROUTER for the workers of this machine, and return the port and its file. The runtime
    directory's lock must be held. Arguments as for ``WorkerPort``."""
    socket = worker_router(context)
    return WorkerPort(socket, clients, slot_of), bind_private(socket, endpoint, WORKER_DOMAIN)
