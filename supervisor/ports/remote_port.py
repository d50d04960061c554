"""The port for workers on other machines, and for their agents: TCP with CURVE, for the keys of processes that run.

Each process gets a key pair of its own when it is started. The key is taken off the list when the process has ended, so
an older process that comes back from a cut network is refused. Frames of a connection that it still has are dropped,
because no living worker has its routing id any more.
"""

from collections.abc import Callable

import zmq

from protocol.process.silent_links import end_when_silent
from supervisor.ports.client_port import ClientPort
from supervisor.ports.sockets import Context
from supervisor.ports.worker_port import WorkerPort, worker_router
from supervisor.ports.zap import REMOTE_DOMAIN
from supervisor.requests.worker_slots import WorkerSlot


def remote_port(
    context: Context,
    endpoint: str,
    secret_key: bytes,
    clients: ClientPort,
    slot_of: Callable[[bytes], WorkerSlot | None],
    lease_s: float,
) -> WorkerPort:
    """Return the port, which is not bound yet.

    endpoint    tcp://IP:PORT, an address of this machine that the other machines can reach
    secret_key  the port's secret key for CURVE, as Z85 text
    clients, slot_of  as for ``WorkerPort``
    lease_s     seconds after which a machine counts as lost. Connections to it end shortly after
    """
    socket = worker_router(context)
    socket.curve_server = True
    socket.curve_secretkey = secret_key
    socket.setsockopt(zmq.ZAP_DOMAIN, REMOTE_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 3000)
    end_when_silent(socket, lease_s)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    return WorkerPort(socket, clients, slot_of)
