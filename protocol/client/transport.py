"""One try to reach the supervisor: a DEALER socket, its monitor, and the meaning of the monitor's events.

Nothing here blocks.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import zmq

from protocol.client.client_key import ClientKey
from protocol.client.greeting_probe import GreetingProbe
from protocol.limits import SOCKET_MAX_FRAME
from protocol.process.peer_user import check_listener
from protocol.process.runtime_paths import ENVIRONMENT_VARIABLE, PAUSED, ipc_path, serve_hint
from protocol.process.socket_calls import monitor_event

LINGER_MS: Final = 200
"""Milliseconds that closing waits until the last frames, mostly CANCEL, are sent."""
IPC_HEARTBEAT_MS = (1000, 4000, 6000)
"""Milliseconds between heartbeats, until the client gives up a peer that does not answer, and until that peer gives up
the client. The second must be longer than the transfer of the largest frame. Else heartbeats end the connection in the
middle of a frame."""
TCP_HEARTBEAT_MS = (2000, 10_000, 12_000)
"""The times of IPC_HEARTBEAT_MS for connections to other machines, in the same order."""

SLOW_HANDSHAKE_S: Final = 2.5
"""Seconds. A supervisor ends a handshake that takes longer than 3 s, even if the supervisor itself is slow. An end that
comes sooner than SLOW_HANDSHAKE_S has another reason."""

_NEEDS_A_KEY: Final = "a supervisor admits clients over TCP with a key only: give key=, or --key-file"
_MECHANISM_MISMATCH: Final = 0x11000002
"""Value of EVENT_HANDSHAKE_FAILED_PROTOCOL: one side uses keys, the other does not."""
_TOO_OFTEN: Final = 500
"""Value of EVENT_HANDSHAKE_FAILED_AUTH: this key may connect, but not so often."""
_WATCHED: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
)
RECONNECT_MS = 1_000_000_000
"""Milliseconds until libzmq connects again: in effect never, since a new connection is a new session."""


class Transport:
    """A connection that is being made, or was made. The constructor begins to connect, without waiting.

    hello  the first frame of the connection
    key    the key for an endpoint over TCP

    Raises ValueError if ``endpoint`` is not an endpoint, ZMQError if no socket can be made.

    connected  whether a listener took the connection
    trusted    whether frames may be sent and read. Over ipc: whether the listener is a process of the client's own
               user. Over TCP the handshake with the key ensures that, before libzmq sends any frame
    refused    whether the listener will not admit this client, or belongs to another user. Another try cannot help
    rejected   whether the connection ended because the client does not have the right key
    overdue    whether the handshake ended so late that the supervisor may have been too busy for it
    left       whether ``leave`` was called
    listener   over ipc: the pid of the listener, as ``check_listener`` returns it; else 0
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, hello: bytes, key: ClientKey | None = None
    ) -> None:
        self._endpoint = endpoint
        self._hello = hello
        self._key = key
        self.rejected = False
        self.overdue = False
        self._dialled = time.monotonic()
        self._handshaken = False
        self.connected = False
        self.trusted = False
        self.refused = False
        self.left = False
        self.listener = 0
        self._probe: GreetingProbe | None = None
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        try:
            _configure(self.socket, endpoint)
            if key is not None:
                self.socket.curve_serverkey = key.server_key.encode()
                self.socket.curve_publickey = key.public_key.encode()
                self.socket.curve_secretkey = key.secret_key.encode()
            self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(_WATCHED)
        except BaseException:
            self.socket.close(linger=0)
            raise
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as e:
            self.hang_up(0)
            raise ValueError(f"{endpoint!r} is not an endpoint: {e}") from None

    @property
    def descriptors(self) -> tuple[int, int]:
        """The descriptors that become readable when there is something to do. They report several events only once."""
        return int(self.socket.get(zmq.FD)), int(self.monitor.get(zmq.FD))

    @property
    def has_input(self) -> bool:
        """True if a frame can be read."""
        return bool(int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def leave(self) -> None:
        """End the connection and drop unsent frames. The supervisor then cancels the unfinished requests."""
        self.left = True
        self.socket.setsockopt(zmq.LINGER, 0)
        try:
            self.socket.disconnect(self._endpoint)
        except zmq.ZMQError:  # libzmq has left by itself, after a handshake that failed
            pass

    @property
    def asks_who_listens(self) -> bool:
        """True if the handshake has failed and the reason is not known yet. Then call ``read_monitor`` again soon."""
        return self._probe is not None

    def hang_up(self, linger_ms: int) -> None:
        """Close the sockets. Wait up to ``linger_ms`` milliseconds until the last frames are sent."""
        if self._probe is not None:
            self._probe.close()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0 if self.left else linger_ms)

    def read_monitor(self, goaway: str | None) -> str | None:
        """Read libzmq's reports on the connection. Send ``hello`` once the listener is trusted.

        goaway  the reason in the supervisor's GOAWAY, if it sent one

        Returns the reason why the connection ended. None while it has not ended.
        """
        end = None
        while True:
            try:
                # Read all events, even after the end: libzmq's I/O thread blocks on a full monitor.
                number, value = monitor_event(self.monitor)
            except zmq.Again:
                return end or self._judge_probe()
            if number == zmq.EVENT_CONNECTED:
                self.connected = True
                end = end or self._meet(value)
            elif number == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshaken = True
            elif self._probe is None:
                end = end or self._explain(number, value, goaway)

    def _meet(self, descriptor: int) -> str | None:
        """Send ``hello`` if the listener is trusted; if not, return why the connection must end.

        Until then nothing waits in the socket, so another user who listens there receives no frame at all.
        """
        if self._endpoint.startswith("ipc://"):
            try:
                self.listener = check_listener(descriptor)
            except PermissionError as e:
                self.refused = True
                return (
                    f"{e} ({self._endpoint}): nothing was sent; look who has put a socket, a directory or a link "
                    f"there, or give another --runtime-dir (${ENVIRONMENT_VARIABLE})"
                )
            except OSError:
                return None  # the connection has ended already; the next event says why
        self.trusted = True
        with suppress(zmq.Again):  # the handshake has failed already, and the next event says so
            self.socket.send(self._hello, zmq.NOBLOCK)
        return None

    def _explain(self, event: int, value: int, goaway: str | None) -> str | None:
        """Return why the connection ended; None if a probe has to find that out."""
        late = time.monotonic() - self._dialled > SLOW_HANDSHAKE_S
        self.overdue = late and self.connected and not self._handshaken
        if not self._handshaken and self.connected and ipc_path(self._endpoint) is None:
            return self._explain_handshake(event, value)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refused = True
            return f"the supervisor refused this connection ({self._endpoint}): it admits its own user only"
        if self.overdue:
            return self._too_busy()
        if self._handshaken:
            if goaway is not None:
                return self._with_remedy(f"the supervisor has shut down: {goaway}")
            return self._with_remedy("the connection to the supervisor ended")
        path = ipc_path(self._endpoint)
        if path is not None and Path(path).exists() and not os.access(path, os.W_OK):
            self.refused = True
            return f"no permission to connect to the supervisor ({self._endpoint}): it belongs to another user"
        if self.connected:
            return f"the supervisor is there and did not answer ({self._endpoint}): it may be overloaded; try again"
        if path is not None and Path(path + PAUSED).exists():
            message = "the supervisor takes no new connections now: almost all of its descriptors are in use"
            return (
                f"{message} ({self._endpoint}); try again, close other clients, or start it with a higher `ulimit -n`"
            )
        return self._with_remedy("no supervisor is running here")

    def _explain_handshake(self, event: int, value: int) -> str | None:
        """Return why the handshake over TCP failed; None if a probe has to find that out."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and value == _TOO_OFTEN and self._key is not None:
            message = f"key {self._key.name!r} has connected too often in a short time ({self._endpoint})"
            return f"{message}: keep a connection open for many requests, or try again in a second"
        mismatch = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH
        not_admitted = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        if not (mismatch or not_admitted):
            if self.overdue:
                return self._too_busy()
            # The side that finds the mismatch first ends the connection, and the other side sees only that end. CURVE
            # gives no reason to a peer with a wrong key.
            self._probe = GreetingProbe(self._endpoint)
            return None
        self.refused = True
        if mismatch and self._key is not None:
            return self._bar("the listener here uses no keys, so it is no supervisor's port; nothing was sent")
        if not_admitted and self._key is not None:
            return self._bar(
                f"the supervisor does not admit key {self._key.name!r} (public key {self._key.public_key}): it is not "
                "on its list, or was revoked; `modelctl keys list` shows who is"
            )
        return self._bar(_NEEDS_A_KEY)

    def _judge_probe(self) -> str | None:
        """Return why a handshake failed for which libzmq gave no reason. Return None while no such handshake has
        failed, or while the probe has no result yet."""
        if self._probe is None or (greeted := self._probe.greeted()) is None:
            return None
        self._probe.close()
        self._probe = None
        if not greeted:
            return (
                f"no supervisor listens at {self._endpoint}: the connection was taken, but nothing that speaks ZeroMQ "
                "answers; the address is wrong, or a tunnel, proxy or port forwarding has no supervisor behind it"
            )
        if self._key is None:
            return self._bar(_NEEDS_A_KEY)
        return self._bar(
            f"the connection was ended in the handshake: the server_key in the file of key {self._key.name!r} is not "
            "this supervisor's, or its secret_key is not the one of its public_key, or no supervisor listens here; get "
            "a new file with `modelctl keys new`"
        )

    def _bar(self, why: str) -> str:
        self.rejected, self.overdue = True, False
        return f"{why} ({self._endpoint})"

    def _too_busy(self) -> str:
        return f"the supervisor was too busy to complete the handshake ({self._endpoint}): try again"

    def _with_remedy(self, what: str) -> str:
        return f"{what} ({self._endpoint}); {serve_hint(self._endpoint)}"


class Sockets:
    """The open sockets of a connection. A finalizer closes them if a program drops the connection without closing it.

    The garbage collector may finalize the parts of a cycle in any order. A context that is destroyed before its sockets
    are closed waits for them for ever. So ``weakref.finalize(connection, sockets.close)`` holds this object.
    """

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.transport: Transport | None = None
        self.closed = False
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the sockets, within LINGER_MS. Does nothing the second time, and nothing in a fork."""
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        if self.transport is not None:
            self.transport.hang_up(LINGER_MS)
        self.context.term()


def _configure(socket: zmq.Socket[bytes], endpoint: str) -> None:
    ipc = endpoint.startswith("ipc://")
    # Set IPV6 for numeric addresses only. With it, libzmq tries a name that has both kinds of address as IPv6 only.
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    # A new connection is a new session, so libzmq must not reconnect. With RECONNECT_IVL=-1 or IMMEDIATE=1, libzmq
    # discards at the end of a connection what has arrived and was not read yet, perhaps whole answers. So libzmq shall
    # wait eleven days, and ``pump`` disconnects once it has read everything. When libzmq reconnects by itself, no code
    # asks the kernel who listens. So a client must call ``pump`` within eleven days after it lost its connection.
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, SOCKET_MAX_FRAME)
    # No high-water mark on receiving. At the mark libzmq stops reading, also the heartbeats, and the supervisor takes a
    # program that reads slowly for dead. The credit of each stream bounds what can arrive unread.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    # No time limit of libzmq for the handshake. At that limit the client could only see that the connection ended, as
    # with a wrong key. ``Connection`` has a time limit of its own, and knows that nobody has answered.
    socket.setsockopt(zmq.HANDSHAKE_IVL, 0)
    interval, timeout, ttl = IPC_HEARTBEAT_MS if ipc else TCP_HEARTBEAT_MS
    socket.setsockopt(zmq.HEARTBEAT_IVL, interval)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout)
    socket.setsockopt(zmq.HEARTBEAT_TTL, ttl)
