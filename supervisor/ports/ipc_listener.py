"""A port over ipc, with a private socket file. The handshake (ZAP) admits only processes of the supervisor's user."""

import logging
from collections.abc import Callable, Collection, Mapping

import zmq

from supervisor.keys.rights import OWNER
from supervisor.malloc_trim import resident
from supervisor.ports.client_port import MONITORED, ClientPort
from supervisor.ports.connections import ClientConnection
from supervisor.ports.gathering import Gathering
from supervisor.ports.monitors import open_monitor
from supervisor.ports.socket_file import SocketFile
from supervisor.ports.sockets import Context, bind_private, client_router
from supervisor.ports.wires import Wire


class IpcListener:
    """The way into a port over ipc, see ``Listener``."""

    check_s = 0.05
    """Seconds between two calls of ``find_abusers``. libzmq can receive 100 MB in that time."""
    most_strangers: int | None = None

    def __init__(self, file: SocketFile) -> None:
        self.file = file
        self._gathering = Gathering()
        self.problem: str | None = None

    def listen(self, now: float) -> None:
        """Do nothing: the port is open."""

    def pause(self) -> None:
        """Hide the socket's file."""
        self.file.hide()

    def resume(self) -> None:
        """Show the socket's file."""
        self.file.show()

    def admit(
        self,
        connection: ClientConnection,
        part: zmq.Frame,
        all_connections: Collection[ClientConnection],
        handshakes: int,
    ) -> None:
        """Give the connection the rights of the supervisor's own user. The handshake has checked the user."""
        connection.identity = OWNER

    def find_abusers(self, wires: Mapping[int, Wire], connections: Mapping[int, ClientConnection]) -> Collection[int]:
        """Return the descriptors of the connections that fill libzmq's memory."""
        return self._gathering.find_abusers(resident(), wires, lambda: _take_heard(connections))


def open_ipc_port(
    context: Context, endpoint: str, backlog: int, holds: Callable[[int, int], bool], log: logging.Logger
) -> tuple[ClientPort, SocketFile]:
    """Bind a private ipc ROUTER, and return the port and its file. The runtime directory's lock must be held.

    backlog  connections that the kernel may have ready for us
    holds    see ``ClientPort``
    """
    socket = client_router(context, backlog)
    # The connection of a frozen client (SIGSTOP) ends after the sum of both times.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2500)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2500)
    monitor = open_monitor(context, socket, MONITORED)
    file = bind_private(socket, endpoint)
    return ClientPort(endpoint, socket, monitor, IpcListener(file), holds, log), file


def _take_heard(connections: Mapping[int, ClientConnection]) -> set[int]:
    """Return the descriptors of connections that brought a message since the last call."""
    heard = {fd for fd, connection in connections.items() if connection.heard}
    for fd in heard:
        connections[fd].heard = False
    return heard
