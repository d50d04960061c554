"""One client connection: a DEALER, its monitor, and the session they feed. The two clients only wait differently.

Nothing here blocks except ``close`` (bounded by LINGER_MS). One thread only, with one exception: ``abandon`` may be
called from anywhere, because finalizers run wherever the garbage collector happens to.
"""

import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import zmq

import protocol
from protocol.answers import StreamState, Touched
from protocol.errors import ErrorCode, WireError
from protocol.limits import SOCKET_MAX_FRAME
from protocol.runtime_paths import admin_endpoint, check_endpoint, default_runtime_dir, front_endpoint, ipc_path
from protocol.session import ClientSession

LINGER_MS: Final = 200
"""How long ``close`` waits for the last frames (a CANCEL, mostly) to leave."""

_MONITOR_EVENT: Final = struct.Struct("=Hi")
_WATCHED: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
)


class Connection:
    """Connects in the constructor, without waiting.

    endpoint     where the supervisor listens; unset is found in the runtime directory
    runtime_dir  the supervisor's directory; unset is ``default_runtime_dir()``
    admin        connect to the operators' socket
    on_change    told after every pump which requests and calls changed; the connection itself may have, too

    Raises ValueError for a socket path that is too long.
    """

    def __init__(
        self,
        endpoint: str | None,
        *,
        runtime_dir: str | os.PathLike[str] | None = None,
        admin: bool = False,
        on_change: Callable[[list[Touched]], None] | None = None,
    ) -> None:
        if endpoint is None:
            find = admin_endpoint if admin else front_endpoint
            endpoint = find(default_runtime_dir() if runtime_dir is None else runtime_dir)
        self.endpoint = check_endpoint(endpoint)
        self.admin = admin
        self.session = ClientSession(f"modelctl-python/{protocol.__version__}")
        self.closed = False
        self._on_change = on_change
        self._pid = os.getpid()
        self._thread = threading.current_thread()
        self._abandoned: deque[StreamState] = deque()
        self._busy = False
        self._handshaken = False
        # a context of its own: nothing is shared with other users of zmq in this process
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        _configure(self.socket, self.endpoint)
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(_WATCHED)
        try:
            self.socket.connect(self.endpoint)
        except zmq.ZMQError as e:
            self.close()
            raise ValueError(f"{self.endpoint!r} is not an endpoint: {e}") from None

    def check_usable(self) -> None:
        """Raises RuntimeError as ``check_thread`` does, or if this connection was closed."""
        self.check_thread()
        if self.closed:
            raise RuntimeError("this client was closed: make a new one")

    def check_thread(self) -> None:
        """Raises RuntimeError if this is the wrong process or thread for this connection, naming both."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this client belongs to process {self._pid} and was used in {os.getpid()}, after a fork: "
                "make a client in each process"
            )
        if (here := threading.current_thread()) is not self._thread:
            raise RuntimeError(
                f"this client belongs to thread {self._thread.name!r} and was used in {here.name!r}: "
                "make a client in each thread"
            )

    def pump(self) -> None:
        """Takes in what arrived, sends what is due, and notices the end of the connection."""
        touched: list[Touched] = []
        self._busy = True
        try:
            # The monitor is read before the socket: when it tells of the end, all that came before the end is still
            # readable, and a terminal event among it must not turn into a lost connection.
            end = self._read_monitor()
            while True:
                self._receive_all(touched)
                self._send_all()
                # Sending can consume the edge of the socket's file descriptor that tells of new input, so whoever waits
                # on the descriptor next would never wake up: look again.
                if not int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
                    break
            if end is not None:
                touched += self.session.lose(end)
                self._leave_endpoint()
        except BaseException:
            # An interrupt (Ctrl-C) between taking a frame and applying it loses the frame, perhaps someone's last one.
            self.session.lose("interrupted while reading from the supervisor; make a new client")
            raise
        finally:
            self._busy = False
            if self._abandoned:
                self._cancel_abandoned()
        if self._on_change is not None:
            self._on_change(touched)

    @property
    def waits_to_send(self) -> bool:
        return bool(self.session.outbox)

    def abandon(self, state: StreamState) -> None:
        """Nobody reads this stream any more: cancels it. For finalizers: safe in any thread, and while ``pump`` runs.

        From another thread, or while ``pump`` runs, it is only noted, and done by the next ``pump``.
        """
        if state.abandoned or self.closed:
            return
        self._abandoned.append(state)
        if not self._busy and threading.current_thread() is self._thread and os.getpid() == self._pid:
            self._cancel_abandoned()

    def close(self) -> None:
        """Ends the connection; the supervisor cancels what is unfinished. Takes LINGER_MS at most. May be repeated."""
        if self.closed or os.getpid() != self._pid:
            return
        self._cancel_abandoned()
        self.closed = True
        touched = self.session.lose("this client was closed")
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()
        self._context.term()
        if self._on_change is not None:
            self._on_change(touched)
            self._on_change = None

    def describe_failure(self, what: str) -> str:
        return f"{what} ({self.endpoint}); start it with `modelctl serve`"

    def _leave_endpoint(self) -> None:
        """Whoever listens there next, nothing of this session reaches it."""
        self.socket.setsockopt(zmq.LINGER, 0)
        try:
            self.socket.disconnect(self.endpoint)
        except zmq.ZMQError:  # libzmq has left by itself, after a handshake that failed
            pass

    def _cancel_abandoned(self) -> None:
        self._busy = True
        try:
            while self._abandoned:
                self.session.abandon(self._abandoned.popleft())
            self._send_all()
        finally:
            self._busy = False

    def _receive_all(self, touched: list[Touched]) -> None:
        receive, take_in = self.socket.recv, self.session.receive
        while True:
            try:
                frame = receive(zmq.NOBLOCK)
            except zmq.Again:
                return
            touched += take_in(frame)

    def _send_all(self) -> None:
        outbox = self.session.outbox
        while outbox:
            try:
                self.socket.send(outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                # not connected yet, or the supervisor is behind in reading: the next pump goes on here
                return
            outbox.popleft()

    def _read_monitor(self) -> str | None:
        """Why the connection ended, None while it has not."""
        end = None
        while True:
            try:
                # drained always, ended or not: libzmq's I/O thread blocks on a full monitor
                number, _ = _MONITOR_EVENT.unpack(self.monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return end
            if number == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshaken = True
            else:
                end = end or self._explain(number)

    def _explain(self, event: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"the supervisor refused this connection ({self.endpoint}): it admits its own user only"
        if self._handshaken:
            if self.session.goaway is not None:
                return self.describe_failure(f"the supervisor has shut down: {self.session.goaway}")
            return self.describe_failure("the connection to the supervisor ended")
        path = ipc_path(self.endpoint)
        if path is not None and Path(path).exists() and not os.access(path, os.W_OK):
            return f"no permission to connect to the supervisor ({self.endpoint}): it belongs to another user"
        return self.describe_failure("no supervisor is running here")


def _configure(socket: zmq.Socket[bytes], endpoint: str) -> None:
    ipc = endpoint.startswith("ipc://")
    # A new connection is a new session, so libzmq must not reconnect. But told so outright (RECONNECT_IVL=-1), or with
    # IMMEDIATE=1, it discards at the end of the connection what had arrived and was not read yet, perhaps whole
    # answers. So it is told to wait eleven days, and ``pump`` disconnects once it has read everything.
    socket.setsockopt(zmq.RECONNECT_IVL, 1_000_000_000)
    socket.setsockopt(zmq.MAXMSGSIZE, SOCKET_MAX_FRAME)
    # Without a high-water mark on receiving: at the mark libzmq stops reading, heartbeats with it, and takes a client
    # that is slow to call us for dead. What can arrive unread is bounded by the credit of each stream.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 3000)
    # the timeout must exceed the transfer of the largest frame, or heartbeats kill it
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000 if ipc else 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4000 if ipc else 10_000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, 6000 if ipc else 12_000)


def check_welcomed(connection: Connection) -> bool:
    """Whether WELCOME came. Raises the reason if it cannot come any more."""
    session = connection.session
    if session.welcome is None and session.broken is not None:
        raise session.broken
    return session.welcome is not None


def check_can_generate(connection: Connection) -> None:
    """Raises UNSUPPORTED on the operators' socket, which takes calls only."""
    if connection.admin:
        raise WireError(
            ErrorCode.UNSUPPORTED, "requests go to the front socket: open another client, without admin=True"
        )
