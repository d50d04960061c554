"""The ROUTER that workers connect to. Each worker has the routing id that it was started with. The loop drops frames
from any other routing id.

No other process may connect. The reason: this socket has a receive mark, because workers must wait for a supervisor
that is slower than they are. At such a mark a peer can make libzmq 4.3.5 abort the process: it sends a PING of ZMTP,
and its connection ends (see ``client_port``). Workers send no PING.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import zmq

from protocol.process.compiled import find
from protocol.process.socket_calls import DONT_WAIT, has_input, has_more, receive_now, send_to
from supervisor.ports.client_port import ClientPort
from supervisor.ports.sockets import Context, bind_private, router, skip_parts
from supervisor.ports.zap import WORKER_DOMAIN
from supervisor.requests.worker_slots import WorkerSlot

if TYPE_CHECKING:
    from supervisor.ports.relay import Relay

RELAY = "supervisor.ports.relay"
"""What passes on the usual frames, if it is compiled."""
DRAIN_LIMIT = 256
"""Frames taken per turn of the loop."""
ASKED_FIRST = 4
"""Frames of a turn, behind the first, before each of which it is asked whether there is one: the exception for "nothing
there" costs more than to ask as often. Where more have come, there will be yet more."""
SEND_MARK = 10_000
"""Frames on the way to one worker."""
RECEIVE_MARK = 1000
"""Frames of one worker that libzmq has read and we have not: 7 MB of events, as the worker's link bounds a frame. So
many wait here whenever a worker is quicker than we are, as one without step times is while we have to wait for the
processor; what else there is waits in the worker. 10,000 are no faster, 256 slower by a tenth."""


class WorkerPort:
    """The socket, and where the reading of it is. ``more``: whether there may be yet more to read in this turn."""

    def __init__(
        self, context: Context, endpoint: str, clients: ClientPort, slot_of: Callable[[bytes], WorkerSlot | None]
    ) -> None:
        """Bind a private ipc ROUTER. The runtime directory's lock must be held.

        clients  the port to which compiled code, if there is any, passes ordinary frames on
        slot_of  returns the worker slot of the worker that has a routing id; None if Python handles all its frames
        """
        self.socket = router(context)
        self.socket.setsockopt(zmq.SNDHWM, SEND_MARK)
        self.socket.setsockopt(zmq.RCVHWM, RECEIVE_MARK)
        self.file = bind_private(self.socket, endpoint, WORKER_DOMAIN)
        self.more = False
        self._skipping = False
        """Parts of a message of several are still to be read."""
        self._relay: Relay | None = None
        if compiled := find(RELAY):
            self._relay = compiled.Relay(self.socket, clients.socket, clients.connections_by_channel, slot_of)

    def receive(self) -> Iterator[tuple[bytes, bytes | None]]:
        """What waits, at most DRAIN_LIMIT: the sender's routing id, and the frame; None for one of several parts, which
        no worker sends: they are read and dropped. Each is to be handled before the next is asked for."""
        return self._receive() if self._relay is None else self._receive_unusual(self._relay)

    def _receive_unusual(self, relay: "Relay") -> Iterator[tuple[bytes, bytes | None]]:
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
            if has_more(socket):  # left unread, the rest would be taken for the next routing id
                self._skipping = True
                yield routing_id, None
            else:
                yield routing_id, frame
        else:
            return
        self.more = False

    @property
    def relays(self) -> bool:
        """Whether what is usual is passed on without Python."""
        return self._relay is not None

    def send(self, routing_id: bytes, frame: bytes) -> bool:
        """Put a frame on its way. False if the worker is not connected any more, or SEND_MARK frames behind."""
        try:
            send_to(self.socket, routing_id, frame)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self.socket.close(linger=0)
