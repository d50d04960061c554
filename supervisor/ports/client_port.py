"""A ROUTER that clients connect to, and who is connected. Two exist: ``front`` for requests, ``admin`` for orders.

Routing ids are libzmq's own (one that a client chose is refused), so a new connection is always a new client. Its end
is noticed three ways: the socket monitor (at once, but an event can be missed when a descriptor is reused), a failed
send, and the loop's probe of clients with unfinished requests.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import zmq

from protocol.codec import decode, encode, named, pack_error, unpack_body
from protocol.errors import ErrorCode, FrameError
from protocol.messages import CLIENT_TO_SUPERVISOR, Error, Hello, Message
from protocol.socket_calls import has_input, monitor_event, send_to
from supervisor.keys.rights import OWNER, Identity
from supervisor.ports.monitors import open_monitor
from supervisor.ports.sockets import Context, bind_private, path_of, router, skip_parts
from supervisor.requests.refusals import number_of, refusal

RECEIVE_MARK = 16
"""Frames of a client that wait to be read, before libzmq reads no more of it. If such a client is killed, and a
heartbeat is due before we have read half of them, libzmq 4.3.5 aborts the process (an assertion on _io_error): the
fewer, the sooner they are read. Over TCP there is no mark, see ``tcp_port``."""
MAX_LEFT = 1024
"""Ended connections that are remembered, because frames they sent may still be read."""
PAUSED = ".paused"
"""What a socket's file is called while no connections are taken."""
DRAIN_LIMIT = 64
"""Frames taken per turn of the loop, so that one busy client cannot keep it from the others."""

MONITORED = zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
MONITORED |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_channels = count(1)


@dataclass(slots=True)
class Connection:
    """One client connection. ``fd`` is its descriptor in this process, -1 if libzmq did not tell; ``identity`` whose it
    is; ``heard`` whether a message came since somebody looked (over TCP, see ``tcp_port``)."""

    routing_id: bytes
    channel: int
    fd: int
    greeted: bool = False
    identity: Identity = OWNER
    heard: bool = False


@dataclass(slots=True)
class PortCounters:
    """Since the start. ``disconnected`` includes connections that libzmq cut for a frame beyond 16 MiB."""

    accepted: int = 0
    disconnected: int = 0
    handshakes_failed: int = 0
    bad_frames: int = 0


@dataclass(slots=True)
class ClientPort:
    """The socket, its monitor and its connections. ``beyond``: another one whose clients are reached, and seen to have
    gone, through this one."""

    endpoint: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    counters: PortCounters = field(default_factory=PortCounters)
    listening: bool = True
    beyond: "ClientPort | None" = None
    holds: Callable[[int, int], bool] = lambda channel, request: False
    """Whether a connection's request of this number is unfinished: set by the loop, see ``Scheduler.holds``."""
    _skipping: bool = False
    """Parts of a refused message are still to be read."""
    _by_id: dict[bytes, Connection] = field(default_factory=dict)
    _by_channel: dict[int, Connection] = field(default_factory=dict)
    _by_fd: dict[int, Connection] = field(default_factory=dict)
    _unheard: set[int] = field(default_factory=set)
    """Descriptors of those that ended before a word of theirs was read, until somebody else has the descriptor."""
    _gone: list[int] = field(default_factory=list)
    _left: dict[bytes, None] = field(default_factory=dict)
    """Routing ids of the last that ended, oldest first."""

    @staticmethod
    def bind(context: Context, endpoint: str, backlog: int) -> "ClientPort":
        """Bind a private ipc ROUTER. The runtime directory's lock must be held.

        backlog  connections that the kernel may have ready for us
        """
        socket = client_router(context, backlog)
        # A frozen client (SIGSTOP) is cut off after both. Heartbeats are rare, see RECEIVE_MARK.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2500)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2500)
        monitor = open_monitor(context, socket, MONITORED)
        bind_private(socket, endpoint)
        return ClientPort(endpoint, socket, monitor)

    def pause(self) -> None:
        """Take no new connections; those there are go on.

        The socket's file is moved away. Unbinding would not do: libzmq ends what a listener has accepted with it.
        """
        if self.listening:
            os.rename(path_of(self.endpoint), path_of(self.endpoint) + PAUSED)
            self.listening = False

    def resume(self) -> None:
        """Take connections again."""
        if not self.listening:
            os.rename(path_of(self.endpoint) + PAUSED, path_of(self.endpoint))
            self.listening = True

    def receive(self) -> Iterator[tuple[Connection, Message]]:
        """Valid messages that are waiting, at most DRAIN_LIMIT. Malformed ones are counted and answered here."""
        for _ in range(DRAIN_LIMIT):
            if self._skipping:
                self._skipping = not skip_parts(self.socket)
                if self._skipping:
                    return
            if not has_input(self.socket):
                return
            routing_id = self.socket.recv(zmq.NOBLOCK)
            connection = self._by_id.get(routing_id)
            part = self.socket.recv(zmq.NOBLOCK, copy=False)
            if connection is None and (routing_id in self._left or self._ended_unheard(routing_id, part)):
                self._skip_rest(part)  # sent before it left, read after
                continue
            if not _is_automatic(routing_id):
                self._skip_rest(part)
                self._refuse_chosen_id(routing_id)
                continue
            if connection is None:
                connection = self._enter(routing_id, part)
                if not self._admit(connection, part):
                    self._skip_rest(part)
                    continue
            if part.more:
                self._skip_rest(part)
                kind, number = named(part.buffer)
                told = "a message is one frame, not several"
                self._refuse(connection, FrameError(ErrorCode.BAD_FRAME, told, kind=kind, number=number))
                continue
            try:
                message = decode(part.buffer, CLIENT_TO_SUPERVISOR)  # not a copy: it may have 16 MiB
                if not connection.greeted or isinstance(message, Hello):
                    _check_greeting(connection, message)
            except FrameError as e:
                self._refuse(connection, e)
                continue
            yield connection, message

    def _skip_rest(self, part: zmq.Frame) -> None:
        self._skipping = bool(part.more)

    def send(self, channel: int, frame: bytes) -> bool:
        """Put a frame on its way. False if the client is gone (or so far behind that it is treated as gone)."""
        connection = self._by_channel.get(channel)
        if connection is None:
            return self.beyond is not None and self.beyond.send(channel, frame)
        try:
            send_to(self.socket, connection.routing_id, frame)
        except zmq.ZMQError as e:  # EHOSTUNREACH: gone. EAGAIN: 100,000 frames behind.
            self._leave(connection, ended=e.errno != zmq.EAGAIN)
            return False
        return True

    def watch(self, limit: int | None = None) -> bool:
        """Take in the monitor's events, ``limit`` of them or all; whether there may be more.

        Called before frames are read, so that a reused descriptor is seen as free.
        """
        for _ in range(limit) if limit is not None else count():
            if not has_input(self.monitor):
                return False
            kind, value = monitor_event(self.monitor)
            if kind == zmq.EVENT_ACCEPTED:
                self.counters.accepted += 1
                self._unheard.discard(value)
                self._accepted(value)
            elif kind == zmq.EVENT_LISTENING:
                self._listens(value)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._shook_hands()
            elif kind == zmq.EVENT_DISCONNECTED:
                self.counters.disconnected += 1
                self._disconnected(value)
                connection = self._by_fd.get(value)
                if connection is not None:
                    self._leave(connection)
                else:
                    self._unheard.add(value)
            else:
                self.counters.handshakes_failed += 1
        return True

    def take_gone(self) -> list[int]:
        """Channels that ended since the last call."""
        if not self._gone and self.beyond is None:  # asked for after every token
            return self._gone
        gone, self._gone = self._gone, []
        return gone if self.beyond is None else gone + self.beyond.take_gone()

    def channels(self) -> list[int]:
        return [*self._by_channel, *(() if self.beyond is None else self.beyond.channels())]

    @property
    def connections_by_channel(self) -> dict[int, Connection]:
        """Those of this port, as they come and go. Not to be changed."""
        return self._by_channel

    def owns(self, channel: int) -> bool:
        return channel in self._by_channel

    def close(self) -> None:
        """Give the last frames half a second to leave, once the context is terminated."""
        self.monitor.close(linger=0)  # and not disabled, see ``open_monitor``
        self.socket.close(linger=500)

    # what only a port over TCP wants to know, see ``tcp_port``

    def _listens(self, fd: int) -> None:
        pass

    def _accepted(self, fd: int) -> None:
        pass

    def _shook_hands(self) -> None:
        pass

    def _disconnected(self, fd: int) -> None:
        pass

    def _admit(self, connection: Connection, part: zmq.Frame) -> bool:
        """Whether it may stay. Its user was asked for in the handshake."""
        return True

    def _ended_unheard(self, routing_id: bytes, part: zmq.Frame) -> bool:
        """Whether these first words are of one whose end has been told: no other event would ever end it."""
        self.watch()  # a DISCONNECTED of this descriptor's former owner may be waiting
        if _descriptor(part) not in self._unheard:
            return False
        self._forget(routing_id)
        return True

    def _enter(self, routing_id: bytes, part: zmq.Frame) -> Connection:
        fd = _descriptor(part)
        if (former := self._by_fd.get(fd)) is not None:
            if _is_older(routing_id, former.routing_id):
                fd = -1  # already gone, only its words are read late: the descriptor is its successor's
            else:
                self._leave(former)  # its event was missed: the descriptor has a new owner
        connection = Connection(routing_id, next(_channels), fd)
        self._by_id[routing_id] = connection
        self._by_channel[connection.channel] = connection
        if fd >= 0:
            self._by_fd[fd] = connection
        return connection

    def _leave(self, connection: Connection, *, ended: bool = True) -> None:
        """``ended``: nothing more can come but what it sent before, which nobody wants any more."""
        if self._by_channel.pop(connection.channel, None) is None:
            return
        self._by_id.pop(connection.routing_id, None)
        if ended:
            self._forget(connection.routing_id)
        if self._by_fd.get(connection.fd) is connection:
            del self._by_fd[connection.fd]
        self._gone.append(connection.channel)

    def _forget(self, routing_id: bytes) -> None:
        """Whatever it has still sent is not read."""
        self._left[routing_id] = None
        if len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]

    def _refuse(self, connection: Connection, error: FrameError) -> None:
        """Count a frame that cannot be taken, and tell its sender why.

        Every such frame is answered: a client would wait for ever for the answer to a request that was passed over.
        """
        self.counters.bad_frames += 1
        runs = self.holds(connection.channel, error.number)
        self.send(connection.channel, encode(refusal(error, error.kind, error.number, runs=runs)))

    def _refuse_chosen_id(self, routing_id: bytes) -> None:
        self.counters.bad_frames += 1
        error = FrameError(ErrorCode.UNSUPPORTED, "a client may not choose its routing id: leave ZMQ_ROUTING_ID unset")
        try:
            send_to(self.socket, routing_id, encode(Error(0, pack_error(error))))
        except zmq.ZMQError:
            pass  # gone, or not reading: it was told often enough


def _check_greeting(connection: Connection, message: Message) -> None:
    """Raise FrameError unless HELLO comes first, once, and with a map."""
    kind, number = message.kind, number_of(message)
    if not isinstance(message, Hello):
        told = "the first message of a connection is HELLO"
        raise FrameError(ErrorCode.BAD_FRAME, told, kind=kind, number=number)
    if connection.greeted:
        told = "HELLO was said before on this connection: say it once"
        raise FrameError(ErrorCode.BAD_FRAME, told, kind=kind)
    try:
        unpack_body(message.body)
    except FrameError as e:
        raise FrameError(e.code, f"HELLO: {e.message}", kind=kind, field=e.field) from None


def _descriptor(part: zmq.Frame) -> int:
    """The one that a frame came through; -1 if libzmq does not say."""
    try:
        return int(part.get(zmq.SRCFD))
    except (zmq.ZMQError, ValueError):
        return -1


def _is_automatic(routing_id: bytes) -> bool:
    """Given by libzmq. One that a client chose may be another's, whose frames it would then receive."""
    return len(routing_id) == 5 and routing_id[0] == 0


def _is_older(routing_id: bytes, other: bytes) -> bool:
    """libzmq's own routing ids are a zero byte and a counter of four, which wraps around."""
    age = int.from_bytes(other[1:], "big") - int.from_bytes(routing_id[1:], "big")
    return 0 < age % (1 << 32) < 1 << 31


def client_router(context: Context, backlog: int) -> zmq.Socket[bytes]:
    """A ROUTER for clients, not bound."""
    socket = router(context)
    # Credit bounds what a stream can have on the way; the marks are only the last fuse.
    socket.setsockopt(zmq.SNDHWM, 100_000)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_MARK)
    socket.setsockopt(zmq.BACKLOG, backlog)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 3000)
    return socket
