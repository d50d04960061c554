"""Sockets: calls that are made for every token, keys and silence of links, and addresses of web hosts.

The calls for every token do without the cost of pyzmq's wrappers.

``Socket.send`` of pyzmq looks at arguments that modelctl never gives, and each ``|`` or ``&`` of its flags is a call
into Python's enum. Together they take as long as sending itself. The exception ``Again`` of a receive without a message
takes three times as long as asking first whether a message has come.
"""

import ipaddress
import os
import re
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import zmq
import zmq.backend

from protocol.process.compiled import find

if TYPE_CHECKING:
    from protocol.process.worker_spec import LinkKeys

DONT_WAIT: Final = int(zmq.NOBLOCK)
_MORE_FOLLOWS: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_RCVMORE: Final = int(zmq.RCVMORE)
_MONITOR_EVENT: Final = struct.Struct("=Hi")

AnySocket = zmq.Socket[bytes]
_send: Callable[[AnySocket, bytes, int], None] = zmq.backend.Socket.send
_option: Callable[[AnySocket, int], Any] = zmq.backend.Socket.get
receive_now: Callable[[AnySocket, int], bytes] = zmq.backend.Socket.recv
"""Receive one part. Takes the socket and DONT_WAIT. Raises zmq.Again if there is none."""


def send_now(socket: AnySocket, frame: bytes) -> None:
    """Send one frame. Raises zmq.Again if it would have to wait."""
    _send(socket, frame, DONT_WAIT)


def send_to(socket: AnySocket, routing_id: bytes, frame: bytes) -> None:
    """Send one frame from a ROUTER to a peer. Raises ZMQError: EHOSTUNREACH if the peer is gone, else zmq.Again."""
    _send(socket, routing_id, _MORE_FOLLOWS)
    _send(socket, frame, DONT_WAIT)


def plain_has_input(socket: AnySocket) -> bool:
    """Return whether a message can be received now."""
    return bool(_option(socket, _EVENTS) & _POLLIN)


_compiled = find("protocol.process.libzmq")
has_input: Callable[[AnySocket], bool] = plain_has_input if _compiled is None else _compiled.has_input


def has_more(socket: AnySocket) -> bool:
    """Return whether more parts follow the one that was received last."""
    return bool(_option(socket, _RCVMORE))


def monitor_event(monitor: AnySocket) -> tuple[int, int]:
    """Return (number, value) of the next event of a socket's monitor. Raises zmq.Again if there is none.

    ``zmq.utils.monitor`` has such a function, but imports asyncio and OpenSSL. That takes 4 MB, and time at each start.
    """
    number, value = _MONITOR_EVENT.unpack(monitor.recv_multipart(DONT_WAIT)[0])
    return number, value


# TCP connections between machines. The kernel ends those to machines that are lost, or behind a network that is cut.
#
# Without that, a connection over which nothing is sent stays for ever when the other machine is gone, and one over
# which something is sent stays for a quarter of an hour. The heartbeats of ZMTP are no remedy here. The supervisor's
# sockets for workers have a receive mark. At such a mark libzmq 4.3.5 aborts the process when a heartbeat is due and
# the peer has left, or when the peer has sent a heartbeat and leaves.


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


def prove_keys(socket: "zmq.Socket[Any]", endpoint: str, keys: "LinkKeys") -> None:
    """Have a socket prove its keys to the endpoint, and demand the endpoint's. Call this before ``connect``."""
    socket.curve_serverkey = keys.server.encode()
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))


# Check who listens at the other end of an ipc connection. The kernel answers, so nobody can forge the answer.
#
# A client checks only after libzmq has connected. The name of a socket proves nothing: another user may put a socket
# of their own in its place between a check of the name and the connect. The connection itself cannot be exchanged.
#
# Only our own user is accepted. Root is refused, too, for two reasons. A supervisor admits its own user only, so other
# users cannot use a supervisor of root. And the kernel records the user that called listen(): systemd, as root, calls
# it for sockets that it then hands to services of other users.


_PEER = struct.Struct("iII")
"""struct ucred: pid, uid, gid."""


def check_listener(descriptor: int) -> int:
    """Return the pid of the process that listens at the other end. Raise PermissionError, with the uid, unless the
    process is one of our own user.

    descriptor  a connected Unix socket

    The pid is that of our own PID namespace, and 0 if the process is not visible there.

    Raises another OSError if the descriptor is no Unix socket: libzmq may have closed it, and its number may be in use
    again. The check may pass if that number is another Unix socket by now. That is harmless: the connection has ended,
    and the caller has told libzmq not to reconnect, so nothing can be sent over it.
    """
    # fromfd duplicates the descriptor: closing the duplicate, whenever that happens, leaves libzmq its own.
    with socket.fromfd(descriptor, socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        family = connection.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
        if family != socket.AF_UNIX:
            raise OSError(f"descriptor {descriptor} is a socket of family {family}")
        pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.getuid():
        raise PermissionError(f"a process of uid {uid}, and not of yours ({os.getuid()}), listens there")
    return int(pid)


# Read hosts and origins as the headers Host and Origin have them, and as models.yaml names them for the gateway. Pure.
#
# Browsers send both in one form: without a user, in ASCII (an international name as xn--...), and with the IP address
# of 127.1 or 0x7f000001. So whatever has another form comes from no browser, and is refused.


_AUTHORITY: Final = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[0-9A-Za-z._~-]+)?)\]|(?P<name>[0-9A-Za-z_](?:[0-9A-Za-z_.-]*[0-9A-Za-z_])?\.?))"
    r"(?::(?P<port>[0-9]{0,5}))?"
)
_PORTS: Final = {"http": 80, "https": 443}


def parse_authority(text: str) -> tuple[str, int | None] | None:
    """Return the host and the port in a Host header; None if it has no allowed form.

    The host is in lower case. An IPv6 address is without brackets, and only a link-local one may have a zone. A name is
    without the dot that may end it.
    """
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        return None
    port = int(found["port"]) if found["port"] else None
    if port is not None and port > 65535:
        return None
    if found["v6"] is None:
        return found["name"].lower().removesuffix("."), port
    try:
        address = ipaddress.IPv6Address(found["v6"])
    except ValueError:
        return None
    if address.scope_id is not None and not address.is_link_local:
        return None
    return found["v6"].lower(), port


def parse_origin(text: str) -> tuple[str, str, int] | None:
    """Return the scheme, the host and the port of an origin; None if it is not the origin of a page of the web."""
    scheme, found, rest = text.partition("://")
    scheme = scheme.lower()
    authority = parse_authority(rest)
    if not found or scheme not in _PORTS or authority is None:
        return None
    host, port = authority
    return scheme, host, _PORTS[scheme] if port is None else port


def is_same_host(origin: str, host: str) -> bool:
    """Return whether an origin has the host and the port of a Host header.

    The scheme is not compared, because a reverse proxy that ends TLS makes it differ. If a port is not named, it is the
    port of the origin's scheme.
    """
    page, own = parse_origin(origin), parse_authority(host)
    if page is None or own is None:
        return False
    scheme, name, port = page
    return (name, port) == (own[0], _PORTS[scheme] if own[1] is None else own[1])


def is_address(host: str) -> bool:
    """Return whether a host is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def written_origin(text: str) -> str | None:
    """Return an origin as browsers write it, without the usual port of its scheme; None if it is no origin."""
    if (found := parse_origin(text)) is None:
        return None
    scheme, host, port = found
    named = f"[{host}]" if ":" in host else host
    return f"{scheme}://{named}" if port == _PORTS[scheme] else f"{scheme}://{named}:{port}"
