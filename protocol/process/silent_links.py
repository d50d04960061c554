"""TCP connections between machines. The kernel ends those to machines that are lost, or behind a network that is cut.

Without that, a connection over which nothing is sent stays for ever when the other machine is gone, and one over which
something is sent stays for a quarter of an hour. The heartbeats of ZMTP are no remedy here. The supervisor's sockets
for workers have a receive mark. At such a mark libzmq 4.3.5 aborts the process when a heartbeat is due and the peer has
left, or when the peer has sent a heartbeat and leaves.
"""

from typing import Any, Final

import zmq

from protocol.process.worker_spec import LinkKeys

MARGIN_S: Final = 5.0
"""Seconds beyond a lease. A network that comes back within the lease finds the connections as they were."""
PROBE_S: Final = 2
"""Seconds between two questions of the kernel on a connection that is silent. MARGIN_S must be longer."""


def end_when_silent(socket: "zmq.Socket[Any]", lease_s: float) -> None:
    """Have the kernel end each TCP connection of a socket over which nothing came from the other machine for this many
    seconds and MARGIN_S, or up to PROBE_S longer. Call this before ``bind`` and ``connect``.

    The other machine's kernel answers, so a process there that is busy or stopped does not count as silent. Only if
    bytes wait for such a process to read them, the connection ends after the same time.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, PROBE_S)
    socket.setsockopt(zmq.TCP_MAXRT, round(1000 * (lease_s + MARGIN_S)))  # TCP_USER_TIMEOUT: also with bytes on the way


def prove_keys(socket: "zmq.Socket[Any]", endpoint: str, keys: LinkKeys) -> None:
    """Have a socket prove its keys to the endpoint, and demand the endpoint's. Call this before ``connect``."""
    socket.curve_serverkey = keys.server.encode()
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
