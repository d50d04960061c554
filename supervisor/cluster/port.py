"""The port for workers on other machines, and for their agents: TCP with CURVE, for the keys of processes that run.

Each process gets a key pair of its own when it is started. The key is taken off the list when the process has ended, so
an older process that comes back from a cut network is refused. Frames of a connection that it still has are dropped,
because no living worker has its routing id any more.

Every machine that reaches the address can connect. Without a key its connection lasts three seconds, and takes a
descriptor. libzmq aborts the process if it finds no descriptor for a connection over ipc. So at most MAX_STRANGERS
connections may exist that have not proved their key. If there are more, the oldest one is ended.
"""

from collections.abc import Callable, Iterator
from typing import Final

import zmq

from protocol.process.sockets import end_when_silent, has_input, monitor_event
from supervisor.ports.client_port import ClientPort
from supervisor.ports.connections import AcceptedDescriptors
from supervisor.ports.listeners import MAX_STRANGERS, bytes_both_ways
from supervisor.ports.sockets import Context, admit_keys_only, open_monitor
from supervisor.ports.worker_port import WorkerPort, worker_router
from supervisor.ports.zap import REMOTE_DOMAIN
from supervisor.requests.queue import WorkerSlot

PROVEN: Final = 270
"""A peer that has received more bytes than this has proved its key. libzmq sends 234 bytes, and then waits for the
proof. It sends some 70 further bytes if it accepts the key, and some ten if it refuses the key."""


class RemotePort(WorkerPort):
    """The port, which is not bound yet. It also watches its connections.

    monitor   socket with the events of connections, for ``read_monitor``
    accepted  connections that were taken so far
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        secret_key: bytes,
        clients: ClientPort,
        slot_of: Callable[[bytes], WorkerSlot | None],
        takes: Callable[[bytes, bytes | None], bool],
        lease_s: float,
    ) -> None:
        """Make the port.

        endpoint    tcp://IP:PORT, an address of this machine that the other machines can reach
        secret_key  the port's secret key for CURVE, as Z85 text
        clients, slot_of  as for ``WorkerPort``
        takes       handles a frame of an agent. Returns False for a frame of a worker, which ``receive`` yields then
        lease_s     seconds after which a machine counts as lost. Connections to it end shortly after
        """
        socket = worker_router(context)
        admit_keys_only(socket, endpoint, secret_key, REMOTE_DOMAIN)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 3000)
        end_when_silent(socket, lease_s)
        super().__init__(socket, clients, slot_of)
        self._takes = takes
        self.monitor = open_monitor(context, socket, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.accepted = 0
        self._accepted = AcceptedDescriptors()

    def receive(self) -> Iterator[tuple[bytes, bytes | None]]:
        return (sent for sent in super().receive() if not self._takes(*sent))

    def read_monitor(self) -> None:
        """Note new and ended connections, and end the oldest one without a key if there are too many of them."""
        while has_input(self.monitor):
            kind, fd = monitor_event(self.monitor)
            if kind == zmq.EVENT_DISCONNECTED:
                self._accepted.note_end(fd, heard=True)
                continue
            self.accepted += 1
            oldest = self._accepted.accept(fd, MAX_STRANGERS)
            if oldest is not None and bytes_both_ways(oldest)[0] <= PROVEN:
                self._accepted.end(oldest)

    def close(self) -> None:
        self.monitor.close(linger=0)
        super().close()
