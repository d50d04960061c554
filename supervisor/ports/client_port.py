"""A ROUTER that clients connect to, and who is connected. Two exist: ``front`` for requests, ``admin`` for orders.

Routing ids are libzmq's own (one that a client chose is refused), so a new connection is always a new client. Its end
is noticed three ways: the socket monitor (at once, but an event can be missed when a descriptor is reused), a failed
send, and the loop's probe of clients with unfinished requests.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import zmq

from protocol.codec import decode, encode, named, pack_error, unpack_body
from protocol.errors import ErrorCode, FrameError, WireError
from protocol.messages import CLIENT_TO_SUPERVISOR, Error, Hello, Message
from protocol.process.socket_calls import DONT_WAIT, has_input, monitor_event, send_to
from supervisor.malloc_trim import resident, trim
from supervisor.ports.arrivals import ArrivalLimits, Arrivals
from supervisor.ports.connections import Connection, PortCounters, descriptor_of, is_automatic, is_older, next_channel
from supervisor.ports.gathering import Gathering
from supervisor.ports.monitors import open_monitor
from supervisor.ports.socket_file import SocketFile
from supervisor.ports.sockets import Context, bind_private, router, skip_parts
from supervisor.ports.wires import Endings, Wire, process_of, shut_down, socket_behind
from supervisor.requests.refusals import number_of, refusal

MAX_LEFT = 1024
"""Ended connections that are remembered while libzmq has no messages for us: frames of them may be on their way."""
MOST_LEFT = 100_000
"""Ended connections that are remembered while libzmq has messages for us. Of one that is forgotten too early, each
message looks like the first of a new connection."""
DRAIN_LIMIT = 64
"""Messages handled per turn of the loop, so that a busy client cannot keep the loop from the workers."""
FLOOD_S = 2.0
"""How long new connections wait at most during a flood and after it."""
CHECK_S = 0.05
"""Seconds between two calls of ``look``. libzmq can receive 100 MB in that time."""
TAKE_LIMIT = 1024
"""Messages taken from libzmq per turn of the loop: 2 ms of work."""
DROP_LIMIT = 4096
"""Messages taken from libzmq per turn after a flood, when most of them are dropped."""
TAKE_BYTES = 8 << 20
"""Bytes after which no more messages are taken in a turn."""

MONITORED = zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
MONITORED |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@dataclass(slots=True)
class ClientPort:
    """The socket, its monitor and its connections.

    holds  tells whether a connection's request of this number is unfinished, see ``Scheduler.holds``
    """

    endpoint: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    holds: Callable[[int, int], bool]
    counters: PortCounters = field(default_factory=PortCounters)
    listening: bool = True
    file: SocketFile | None = None
    """Over ipc only."""
    _flooded_at: float | None = None
    """When a flood was noticed, or new connections were let in since; None once all messages have been taken in."""
    _skipping: bool = False
    """Parts of a refused message are still to be read."""
    _arrivals: Arrivals[zmq.Frame] = field(default_factory=lambda: Arrivals(ArrivalLimits()))
    """Messages taken in and not handled, of those of several parts the first one."""
    _wires: dict[int, Wire] = field(default_factory=dict)
    """By descriptor."""
    _endings: Endings = field(default_factory=Endings)
    _gathering: Gathering = field(default_factory=Gathering)
    log: logging.Logger = field(default_factory=logging.getLogger)
    _flood_logged_at: float = 0.0
    _by_id: dict[bytes, Connection] = field(default_factory=dict)
    _by_channel: dict[int, Connection] = field(default_factory=dict)
    _by_fd: dict[int, Connection] = field(default_factory=dict)
    _unheard: set[int] = field(default_factory=set)
    """Descriptors of those that ended before a word of theirs was read, until somebody else has the descriptor."""
    _gone: list[int] = field(default_factory=list)
    _left: dict[bytes, None] = field(default_factory=dict)
    """Routing ids of the last that ended, oldest first."""

    @staticmethod
    def bind(
        context: Context, endpoint: str, backlog: int, holds: Callable[[int, int], bool], log: logging.Logger
    ) -> "ClientPort":
        """Bind a private ipc ROUTER. The runtime directory's lock must be held.

        backlog  connections that the kernel may have ready for us
        """
        socket = client_router(context, backlog)
        # A frozen client (SIGSTOP) is cut off after both.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2500)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2500)
        monitor = open_monitor(context, socket, MONITORED)
        return ClientPort(endpoint, socket, monitor, holds, log=log, file=bind_private(socket, endpoint))

    def pause(self) -> None:
        """Take no new connections. Connections that exist go on."""
        if self.listening and self.file is not None:
            self.file.hide()
            self.listening = False

    def resume(self) -> None:
        """Take connections again."""
        if not self.listening and self.file is not None:
            self.file.show()
            self.listening = True

    def lets_newcomers_in(self, now: float) -> bool:
        """Return whether handshakes may be finished now.

        After a flood new connections wait until everything that was sent has been taken in. All that wait are let in
        every FLOOD_S, because libzmq gives a handshake 3 s.
        """
        if self._flooded_at is None:
            return True
        if now - self._flooded_at < FLOOD_S:
            return False
        self._flooded_at = now
        return True

    def is_waiting(self) -> bool:
        """Whether messages were taken in that ``receive`` has still to return."""
        return bool(self._arrivals)

    def receive(self) -> Iterator[tuple[Connection, Message]]:
        """Yield at most DRAIN_LIMIT valid messages, of each connection in turn. Count and answer malformed ones.

        End connections that send faster than the supervisor handles their messages.
        """
        self._take_in()
        for channel, messages, size in self._arrivals.excessive(grown=self._has_grown()):
            text = f"it sent faster than its messages are handled ({messages} of them, {size} bytes, were taken in)"
            self._end_flood(self._by_channel[channel], text)
        for _ in range(DRAIN_LIMIT):
            if (arrival := self._arrivals.next()) is None:
                return
            channel, part = arrival
            connection = self._by_channel[channel]
            try:
                if part.more:
                    kind, number = named(part.buffer)
                    text = "a message is one frame, not several"
                    raise FrameError(ErrorCode.BAD_FRAME, text, kind=kind, number=number)
                message = decode(part.buffer, CLIENT_TO_SUPERVISOR)  # not a copy: it may have 16 MiB
                if not connection.greeted or isinstance(message, Hello):
                    _check_greeting(connection, message)
            except FrameError as e:
                self._refuse(connection, e)
                continue
            yield connection, message

    def _take_in(self) -> None:
        """Take up to TAKE_LIMIT received messages from libzmq, and queue them."""
        if self._skipping:
            self._skipping = not skip_parts(self.socket)
        socket, receive, known = self.socket, self.socket.recv, self._by_id.get  # a flood is read as fast as may be
        taken = frames = 0
        limit = TAKE_LIMIT if self._flooded_at is None else DROP_LIMIT
        while frames < limit and taken < TAKE_BYTES and not self._skipping and has_input(socket):
            frames += 1
            routing_id = receive(DONT_WAIT)
            part = receive(DONT_WAIT, False)
            taken += (size := len(part))
            connection = known(routing_id) or self._meet(routing_id, part)
            more = part.more
            if connection is not None:
                connection.heard = True
                self._arrivals.add(connection.channel, part, size)
            else:
                self._endings.count(routing_id)
            if more:
                self._skipping = not skip_parts(socket)
                if self._skipping and connection is not None:
                    self._end_flood(connection, "a message of it had thousands of frames")

    def _has_grown(self) -> bool:
        """Return whether the process has grown by too much while libzmq has messages for us."""
        if self._skipping or has_input(self.socket):
            if not self._arrivals.has_grown(resident()):
                return False
            if self._flooded_at is None:
                self._flooded_at = time.monotonic()
            return True
        self._arrivals.all_taken()
        while len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]
        if self._flooded_at is not None:
            self._flooded_at = None
            trim()
        return False

    def _meet(self, routing_id: bytes, part: zmq.Frame) -> Connection | None:
        """Return the connection whose first message this is; None if the connection has ended or is refused."""
        if routing_id in self._left or self._ended_unheard(routing_id, part):
            return None  # sent before it left, read after
        if not is_automatic(routing_id):
            self._refuse_chosen_id(routing_id, part)
            return None
        connection = self._enter(routing_id, part)
        return connection if self._admit(connection, part) else None

    def send(self, channel: int, frame: bytes) -> bool:
        """Put a frame on its way. False if the client is gone (or so far behind that it is treated as gone)."""
        connection = self._by_channel.get(channel)
        if connection is None:
            return False
        try:
            send_to(self.socket, connection.routing_id, frame)
        except zmq.ZMQError as e:  # EHOSTUNREACH: gone. EAGAIN: 100,000 frames behind.
            if e.errno == zmq.EAGAIN:
                self.end(connection)
            else:
                self._leave(connection)
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
                self._wires[value] = Wire(socket_behind(value))
                self._accepted(value)
            elif kind == zmq.EVENT_LISTENING:
                self._listens(value)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._shook_hands()
            elif kind == zmq.EVENT_DISCONNECTED:
                self.counters.disconnected += 1
                self._wires.pop(value, None)
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
        if not self._gone:  # asked for after every token
            return self._gone
        gone, self._gone = self._gone, []
        return gone

    @property
    def accepted(self) -> int:
        """Connections that libzmq has accepted and that have not ended, as far as its monitor has been read."""
        return len(self._wires)

    @property
    def connections_by_channel(self) -> dict[int, Connection]:
        """Those of this port, as they come and go. Not to be changed."""
        return self._by_channel

    def cut(self, connection: Connection, error: WireError, *, hears: bool = True) -> None:
        """Tell a client why, and end its connection shortly after. What it still sends is dropped.

        hears  False if not even libzmq is to read more of it
        """
        if self.send(connection.channel, encode(Error(0, pack_error(error)))):
            self.counters.cut_off += 1
            self._end_soon(connection.routing_id, connection.fd, hears=hears)
            self._leave(connection)

    def _end_flood(self, connection: Connection, why: str) -> None:
        """End a connection that sends more than the supervisor can take. Tell its client and the log why."""
        now = time.monotonic()
        if now > self._flood_logged_at + 1:  # of many that flood at once, one line says enough
            self._flood_logged_at = now
            whose = connection.identity.name or f"process {process_of(connection.fd)}"
            self.log.warning("a connection of %s to %s is ended: %s", whose, self.endpoint, why)
        message = f"this connection was ended: {why}; wait for answers before you send more"
        self.cut(connection, WireError(ErrorCode.RATE_LIMITED, message, retry_after_ms=1000), hears=False)

    def end(self, connection: Connection) -> None:
        """End a connection now, of a client that cannot be told why."""
        self.counters.cut_off += 1
        if (wire := self._wires.get(connection.fd)) is not None:
            shut_down(connection.fd, wire)
        self._leave(connection)

    def end_wire(self, fd: int, wire: Wire) -> None:
        """End the connection of this descriptor now, whether a message of it was read or not."""
        if (connection := self._by_fd.get(fd)) is not None:
            self.end(connection)
        else:
            self.counters.cut_off += 1
            shut_down(fd, wire)

    def enforce_limits(self, now: float) -> None:
        """End the connections whose clients have had time to read why, and those that fill libzmq's memory.

        The loop calls this every CHECK_S.
        """
        self._endings.end_overdue(now)
        for fd in self._gathering.find_abusers(resident(), self._wires, self._take_heard):
            self.end_wire(fd, self._wires[fd])

    def _take_heard(self) -> set[int]:
        """Return the descriptors of connections that brought a message since the last call."""
        heard = {fd for fd, connection in self._by_fd.items() if connection.heard}
        for fd in heard:
            self._by_fd[fd].heard = False
        return heard

    def close(self) -> None:
        """Give the last frames half a second to leave, once the context is terminated."""
        self.monitor.close(linger=0)  # and not disabled, see ``open_monitor``
        self.socket.close(linger=500)

    # what only a port over TCP wants to know, see ``tcp_port``

    def _listens(self, fd: int) -> None:
        pass

    def _accepted(self, fd: int) -> None:
        pass

    def _disconnected(self, fd: int) -> None:
        pass

    def _shook_hands(self) -> None:
        pass

    def _admit(self, connection: Connection, part: zmq.Frame) -> bool:
        """Whether it may stay. Its user was asked for in the handshake."""
        return True

    def _ended_unheard(self, routing_id: bytes, part: zmq.Frame) -> bool:
        """Whether these first words are of one whose end has been told: no other event would ever end it."""
        self.watch()  # a DISCONNECTED of this descriptor's former owner may be waiting
        if descriptor_of(part) not in self._unheard:
            return False
        self._forget(routing_id)
        return True

    def _enter(self, routing_id: bytes, part: zmq.Frame) -> Connection:
        fd = descriptor_of(part)
        if (former := self._by_fd.get(fd)) is not None:
            if is_older(routing_id, former.routing_id):
                fd = -1  # already gone, only its words are read late: the descriptor is its successor's
            else:
                self._leave(former)  # its event was missed: the descriptor has a new owner
        connection = Connection(routing_id, next_channel(), fd)
        self._by_id[routing_id] = connection
        self._by_channel[connection.channel] = connection
        if fd >= 0:
            self._by_fd[fd] = connection
        return connection

    def _end_soon(self, routing_id: bytes, fd: int, *, hears: bool) -> None:
        """Have ``look`` end a connection whose client was told why. See ``cut`` for ``hears``."""
        if (wire := self._wires.get(fd)) is not None:
            now = time.monotonic()
            self._endings.add(routing_id, fd, wire, now, hears=hears)
            if not hears:
                self._flooded_at = now

    def _leave(self, connection: Connection) -> None:
        """The connection is no client's any more. What it sent and still sends is dropped."""
        if self._by_channel.pop(connection.channel, None) is None:
            return
        self._by_id.pop(connection.routing_id, None)
        self._arrivals.drop(connection.channel)
        self._forget(connection.routing_id)
        if self._by_fd.get(connection.fd) is connection:
            del self._by_fd[connection.fd]
        self._gone.append(connection.channel)

    def _forget(self, routing_id: bytes) -> None:
        """Whatever it has still sent is not read."""
        self._left[routing_id] = None
        if len(self._left) > MOST_LEFT:
            del self._left[next(iter(self._left))]

    def _refuse(self, connection: Connection, error: FrameError) -> None:
        """Count a frame that cannot be taken, and tell its sender why.

        Every such frame is answered: a client would wait for ever for the answer to a request that was passed over.
        """
        self.counters.bad_frames += 1
        runs = self.holds(connection.channel, error.number)
        self.send(connection.channel, encode(refusal(error, error.kind, error.number, runs=runs)))

    def _refuse_chosen_id(self, routing_id: bytes, part: zmq.Frame) -> None:
        """Say why, and end the connection, which would never be told of anything else."""
        self.counters.bad_frames += 1
        self.counters.cut_off += 1
        error = FrameError(ErrorCode.UNSUPPORTED, "a client may not choose its routing id: leave ZMQ_ROUTING_ID unset")
        with suppress(zmq.ZMQError):  # it has left
            send_to(self.socket, routing_id, encode(Error(0, pack_error(error))))
        self._end_soon(routing_id, descriptor_of(part), hears=True)  # no flood: the error must arrive first
        self._forget(routing_id)


def _check_greeting(connection: Connection, message: Message) -> None:
    """Raise FrameError unless HELLO comes first, once, and with a map."""
    kind, number = message.kind, number_of(message)
    if not isinstance(message, Hello):
        text = "the first message of a connection is HELLO"
        raise FrameError(ErrorCode.BAD_FRAME, text, kind=kind, number=number)
    if connection.greeted:
        text = "HELLO was said before on this connection: say it once"
        raise FrameError(ErrorCode.BAD_FRAME, text, kind=kind)
    try:
        unpack_body(message.body)
    except FrameError as e:
        raise FrameError(e.code, f"HELLO: {e.message}", kind=kind, field=e.field) from None


def client_router(context: Context, backlog: int) -> zmq.Socket[bytes]:
    """A ROUTER for clients, not bound."""
    socket = router(context)
    # Credit bounds what a stream can have on the way; the mark is only the last fuse.
    socket.setsockopt(zmq.SNDHWM, 100_000)
    # No mark: at the mark libzmq 4.3.5 stops reading. If such a client then goes away, and libzmq comes to a PING of
    # ZMTP in what it had buffered, or a heartbeat is due, it aborts the process (an assertion on _io_error). The memory
    # is bounded by ending connections that send too fast, see ``arrivals``.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.BACKLOG, backlog)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 3000)
    return socket
