"""The ROUTER that workers connect to. Each has the routing id that it was started with; what another sends is dropped
by whoever knows them."""

from collections.abc import Iterator

import zmq

from protocol.socket_calls import DONT_WAIT, has_input, has_more, receive_now, send_to
from supervisor.ports.sockets import Context, bind_private, router, skip_parts

DRAIN_LIMIT = 256
"""Frames taken per turn of the loop."""
ASKED_FIRST = 4
"""Frames of a turn, behind the first, before each of which it is asked whether there is one: the exception for "nothing
there" costs more than to ask as often. Where more have come, there will be yet more."""
MARK = 10_000
"""Frames on the way to, or from, one worker."""


class WorkerPort:
    """The socket, and where the reading of it is. ``more``: whether there may be yet more to read in this turn."""

    def __init__(self, context: Context, endpoint: str) -> None:
        """Bind a private ipc ROUTER. The runtime directory's lock must be held."""
        self.socket = router(context)
        self.socket.setsockopt(zmq.SNDHWM, MARK)
        self.socket.setsockopt(zmq.RCVHWM, MARK)
        bind_private(self.socket, endpoint)
        self.more = False
        self._skipping = False
        """Parts of a message of several are still to be read."""

    def receive(self) -> Iterator[tuple[bytes, bytes | None]]:
        """What waits, at most DRAIN_LIMIT: the sender's routing id, and the frame; None for one of several parts, which
        no worker sends: they are read and dropped."""
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

    def send(self, routing_id: bytes, frame: bytes) -> bool:
        """Put a frame on its way. False if the worker is not connected any more, or MARK frames behind."""
        try:
            send_to(self.socket, routing_id, frame)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self.socket.close(linger=0)
