"""A ROUTER that clients connect to, and the clients that are connected.

A supervisor has the port ``front`` for requests and the port ``admin`` for orders, both over ipc. It may have one port
over TCP for both. Ports over ipc and over TCP differ only in their ``Listener``. Routing ids are libzmq's own (a chosen
one is refused), so a new connection is always a new client. The supervisor notices a client's end in three ways: by the
socket's monitor (at once, but an event can be missed when a descriptor is used again), by a send that fails, and by the
loop's probe of clients with unfinished requests.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count

import zmq

from protocol.codec import decode, encode, named, pack_error
from protocol.errors import ErrorCode, FrameError, WireError
from protocol.messages import CLIENT_TO_SUPERVISOR, Error, Hello, Message
from protocol.process.sockets import DONT_WAIT, has_input, monitor_event, send_to
from supervisor.ports.connections import (
    AcceptedDescriptors,
    ClientConnection,
    ConnectionTable,
    ForgedRoutingId,
    Listener,
    PortCounters,
    descriptor_of,
    is_automatic,
    is_older,
    process_of,
)
from supervisor.ports.floods import ArrivalLimits, Arrivals, Flood, check_greeting
from supervisor.ports.sockets import skip_parts
from supervisor.reactor import resident, trim
from supervisor.requests.request import refusal

DRAIN_LIMIT = 64
"""Messages handled per turn of the loop, so that a busy client cannot keep the loop from the workers."""
TAKE_LIMIT = 1024
"""Messages taken from libzmq per turn of the loop: 2 ms of work."""
DROP_LIMIT = 4096
"""Messages taken from libzmq per turn after a flood, when most of them are dropped."""
TAKE_BYTES = 8 << 20
"""Bytes after which no more messages are taken in a turn."""

MONITORED = zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
MONITORED |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class ClientPort:
    """One port: its socket, the monitor of this socket, and the connections.

    holds  (channel, number) → whether that request is unfinished, see ``Scheduler.holds``
    """

    def __init__(
        self,
        endpoint: str,
        socket: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        listener: Listener,
        holds: Callable[[int, int], bool],
        log: logging.Logger,
    ) -> None:
        self.endpoint = endpoint
        self.socket = socket
        self.monitor = monitor
        self.listener = listener
        self.listening = True
        self.counters = PortCounters()
        self._holds = holds
        self._log = log
        self._flood = Flood()
        self._flood_logged_at = 0.0
        self._skipping = False
        """Whether parts of a refused message must still be read and dropped."""
        self._arrivals: Arrivals[zmq.Frame] = Arrivals(ArrivalLimits())
        """Messages taken in and not handled. A message of several parts is represented by its first part."""
        self._table = ConnectionTable()
        self.connections_by_channel = self._table.by_channel
        """The connections that have brought a message, as they come and go. Only this port changes it."""
        self.gone = self._table.gone
        """Channels that have ended since the last ``take_gone``. Only this port changes it."""
        self._accepted = AcceptedDescriptors()

    def close(self) -> None:
        """Give the last frames half a second to leave, once the context is terminated."""
        self.monitor.close(linger=0)  # not ``disable_monitor``, see ``open_monitor``
        self.socket.close(linger=500)

    # --- new connections ------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Take no new connections. Connections that exist go on."""
        if self.listening:
            self.listener.pause()
            self.listening = False

    def resume(self) -> None:
        """Take connections again."""
        if not self.listening:
            self.listener.resume()
            self.listening = True

    def lets_newcomers_in(self, now: float) -> bool:
        """Return whether handshakes may be finished now, see ``Flood.lets_newcomers_in``."""
        return self._flood.lets_newcomers_in(now)

    @property
    def accepted(self) -> int:
        """The number of accepted connections that have not ended, as far as libzmq's monitor has been read."""
        return len(self._accepted.wires)

    def read_monitor(self, limit: int | None = None) -> bool:
        """Read the monitor's events, ``limit`` of them or all. Return whether there may be more.

        Call this before messages are read, so that the port knows which descriptors have become free.
        """
        for _ in range(limit) if limit is not None else count():
            if not has_input(self.monitor):
                return False
            kind, fd = monitor_event(self.monitor)
            if kind == zmq.EVENT_ACCEPTED:
                self.counters.accepted += 1
                if (stranger := self._accepted.accept(fd, self.listener.most_strangers)) is not None:
                    self._end_descriptor(stranger)
            elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.counters.handshakes += 1
            elif kind == zmq.EVENT_DISCONNECTED:
                self.counters.disconnected += 1
                connection = self._table.by_fd.get(fd)
                self._accepted.note_end(fd, heard=connection is not None)
                if connection is not None:
                    self._leave(connection)
            else:
                self.counters.handshakes_failed += 1
        return True

    # --- messages -------------------------------------------------------------------------------------------------

    def is_waiting(self) -> bool:
        """Return whether messages wait that ``receive`` has taken in and not yielded yet."""
        return bool(self._arrivals)

    def receive(self) -> Iterator[tuple[ClientConnection, Message]]:
        """Yield at most DRAIN_LIMIT valid messages, of each connection in turn. Count and answer malformed ones.

        End connections that send faster than the supervisor handles their messages.
        """
        self._take_in()
        for channel, messages, size in self._arrivals.excessive(grown=self._has_grown()):
            text = f"it sent faster than its messages are handled ({messages} of them, {size} bytes, were taken in)"
            self._end_flood(self.connections_by_channel[channel], text)
        for _ in range(DRAIN_LIMIT):
            if (arrival := self._arrivals.next()) is None:
                return
            channel, part = arrival
            connection = self.connections_by_channel[channel]
            try:
                if part.more:
                    kind, number = named(part.buffer)
                    text = "a message is one frame, not several"
                    raise FrameError(ErrorCode.BAD_FRAME, text, kind=kind, number=number)
                message = decode(part.buffer, CLIENT_TO_SUPERVISOR)  # no copy: a frame may have 16 MiB
                if not connection.greeted or isinstance(message, Hello):
                    check_greeting(message, greeted=connection.greeted)
            except FrameError as e:
                self._refuse(connection, e)
                continue
            yield connection, message

    def _take_in(self) -> None:
        """Take up to TAKE_LIMIT received messages from libzmq, and queue them."""
        if self._skipping:
            self._skipping = not skip_parts(self.socket)
        # bound to local names, since a flood is read as fast as possible
        socket, receive, known = self.socket, self.socket.recv, self._table.by_id.get
        taken = frames = 0
        limit = DROP_LIMIT if self._flood else TAKE_LIMIT
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
                self._accepted.count_dropped(routing_id)
            if more:
                self._skipping = not skip_parts(socket)
                if self._skipping and connection is not None:
                    self._end_flood(connection, "a message of it had thousands of frames")

    def _has_grown(self) -> bool:
        """Return whether the process has grown by too much while libzmq has messages for us."""
        if self._skipping or has_input(self.socket):
            if not self._arrivals.has_grown(resident()):
                return False
            self._flood.begin(time.monotonic())
            return True
        self._arrivals.all_taken()
        self._table.shorten_ignored()
        if self._flood:
            self._flood.end()
            trim()
        return False

    def _meet(self, routing_id: bytes, part: zmq.Frame) -> ClientConnection | None:
        """Return the connection whose first message this is; None if the connection has ended or is refused."""
        if self._table.is_ignored(routing_id) or self._ended_unheard(routing_id, part):
            return None  # the client sent this before it left
        if not is_automatic(routing_id):
            self._refuse_chosen_id(routing_id, part)
            return None
        connection = self._enter(routing_id, part)
        self._accepted.note_message(connection.fd)
        try:
            everybody = self.connections_by_channel.values()
            self.listener.admit(connection, part, everybody, self.counters.handshakes)
        except ForgedRoutingId:
            self.counters.bad_frames += 1
            self._end_now(connection)
            return None
        except WireError as e:
            self.cut(connection, e)
            return None
        return connection

    def _ended_unheard(self, routing_id: bytes, part: zmq.Frame) -> bool:
        """Return whether a first message comes from a connection that has ended, according to the monitor.

        Such a connection must not enter the table: no other event would ever remove it.
        """
        self.read_monitor()  # a DISCONNECTED of the former owner of this descriptor may be waiting
        if not self._accepted.ended_unheard(descriptor_of(part)):
            return False
        self._table.ignore(routing_id)
        return True

    def _enter(self, routing_id: bytes, part: zmq.Frame) -> ClientConnection:
        """Add a connection to the table, and remove the former owner of its descriptor."""
        fd = descriptor_of(part)
        if (former := self._table.by_fd.get(fd)) is not None:
            if is_older(routing_id, former.routing_id):
                fd = -1  # this connection is gone and its message is read late: ``former`` has the descriptor now
            else:
                self._leave(former)  # the event of its end was missed: the descriptor has a new owner
        return self._table.add(routing_id, fd)

    def send(self, channel: int, frame: bytes) -> bool:
        """Send a frame to a client. Return False if this port has no such client, or has lost it.

        A client that is 100,000 frames behind is lost as well: its connection is ended.
        """
        connection = self.connections_by_channel.get(channel)
        if connection is None:
            return False
        try:
            send_to(self.socket, connection.routing_id, frame)
        except zmq.ZMQError as e:  # EHOSTUNREACH: gone. EAGAIN: 100,000 frames behind.
            if e.errno == zmq.EAGAIN:
                self._end_now(connection)
            else:
                self._leave(connection)
            return False
        connection.given += len(frame)
        return True

    def _refuse(self, connection: ClientConnection, error: FrameError) -> None:
        """Count a frame that is not valid, and tell its sender why.

        Every such frame is answered. Without an answer, a client would wait for ever for the end of its request.
        """
        self.counters.bad_frames += 1
        runs = self._holds(connection.channel, error.number)
        self.send(connection.channel, encode(refusal(error, error.kind, error.number, runs=runs)))

    def _refuse_chosen_id(self, routing_id: bytes, part: zmq.Frame) -> None:
        """Tell a client that it may not choose its routing id, and end its connection. Give it no other answer."""
        self.counters.bad_frames += 1
        self.counters.cut_off += 1
        error = FrameError(ErrorCode.UNSUPPORTED, "a client may not choose its routing id: leave ZMQ_ROUTING_ID unset")
        with suppress(zmq.ZMQError):  # it has left
            send_to(self.socket, routing_id, encode(Error(0, pack_error(error))))
        self._end_soon(routing_id, descriptor_of(part), hears=True)  # this is no flood, and the error must arrive
        self._table.ignore(routing_id)

    # --- the ends of connections ----------------------------------------------------------------------------------

    def take_gone(self) -> list[int]:
        """Return the channels that have ended since the last call."""
        return self._table.take_gone()

    def cut(self, connection: ClientConnection, error: WireError, *, hears: bool = True) -> None:
        """Tell a client why its connection ends, and end it shortly after. Drop what the client still sends.

        hears  False if libzmq, too, is to read no more of the connection
        """
        if self.send(connection.channel, encode(Error(0, pack_error(error)))):
            self.counters.cut_off += 1
            self._end_soon(connection.routing_id, connection.fd, hears=hears)
            self._leave(connection)

    def enforce_limits(self) -> None:
        """End the connections whose clients have had time to read why, and those that exceed the listener's limits.

        The loop calls this every ``Listener.check_s`` seconds.
        """
        self._accepted.end_overdue(time.monotonic())
        for fd in self.listener.find_abusers(self._accepted.wires, self._table.by_fd):
            self._end_descriptor(fd)

    def _end_flood(self, connection: ClientConnection, why: str) -> None:
        """End a connection that sends more than the supervisor can take. Tell its client and the log why."""
        now = time.monotonic()
        if now > self._flood_logged_at + 1:  # one line is enough for many connections that flood at once
            self._flood_logged_at = now
            whose = connection.identity.name or f"process {process_of(connection.fd)}"
            self._log.warning("a connection of %s to %s is ended: %s", whose, self.endpoint, why)
        message = f"this connection was ended: {why}; wait for answers before you send more"
        self.cut(connection, WireError(ErrorCode.RATE_LIMITED, message, retry_after_ms=1000), hears=False)

    def _end_now(self, connection: ClientConnection) -> None:
        """End the connection of a client that cannot be told why."""
        self.counters.cut_off += 1
        self._accepted.end(connection.fd)
        self._leave(connection)

    def _end_descriptor(self, fd: int) -> None:
        """End the connection of this descriptor now, even if it has brought no message."""
        if (connection := self._table.by_fd.get(fd)) is not None:
            self._end_now(connection)
        else:
            self.counters.cut_off += 1
            self._accepted.end(fd)

    def _end_soon(self, routing_id: bytes, fd: int, *, hears: bool) -> None:
        """Have ``enforce_limits`` end a connection whose client was told why. See ``cut`` for ``hears``."""
        now = time.monotonic()
        if self._accepted.end_soon(routing_id, fd, now, hears=hears) and not hears:
            self._flood.go_on(now)

    def _leave(self, connection: ClientConnection) -> None:
        """Remove a connection from the table. Drop what its client has sent and still sends."""
        if self._table.remove(connection):
            self._arrivals.drop(connection.channel)


# All ports that clients connect to. A channel is the number of one connection. No two ports use the same number.


class ClientPorts:
    """The ports, by purpose.

    front  requests and queries, over ipc
    admin  orders and queries, over ipc
    tcp    requests, queries and orders, as far as the client's key has the right; None if nothing listens on TCP
    used   called after a send to the admin port. The reactor does not ask that port in each turn, and a send may take
           note of input without reporting it
    """

    def __init__(
        self, front: ClientPort, admin: ClientPort, tcp: ClientPort | None, used: Callable[[], object]
    ) -> None:
        self.front = front
        self.admin = admin
        self.tcp = tcp
        self.for_requests = (front,) if tcp is None else (front, tcp)
        """The ports whose clients may have requests."""
        self._all = (*self.for_requests, admin)
        self._used = used
        # Looked up once: it is needed for every token that compiled code does not pass on.
        self._gone = [(port, port.gone) for port in self._all]

    @property
    def problem(self) -> str | None:
        """Why the port over TCP is not open, for people; None if it is, or if there is none."""
        return None if self.tcp is None else self.tcp.listener.problem

    def __iter__(self) -> Iterator[ClientPort]:
        return iter(self._all)

    def send(self, channel: int, frame: bytes) -> None:
        """Send a frame to a client. If the client is gone, ``take_gone`` returns its channel."""
        for port in self.for_requests:
            if port.send(channel, frame):
                return
        if self.admin.send(channel, frame):
            self._used()

    def end(self, channel: int, error: WireError) -> None:
        """Tell a client why its connection ends, and end it. Do nothing if the client has left."""
        for port in self._all:
            if (connection := port.connections_by_channel.get(channel)) is not None:
                port.cut(connection, error)

    def take_gone(self) -> list[int]:
        """Return the channels that have ended since the last call."""
        gone: list[int] = []
        for port, channels in self._gone:
            if channels:
                gone += port.take_gone()
        return gone

    def channels_for_requests(self) -> list[int]:
        """Return the channels of the clients that may have requests."""
        return [channel for port in self.for_requests for channel in port.connections_by_channel]

    @property
    def connected(self) -> int:
        """How many clients are connected and have sent a message."""
        return sum(len(port.connections_by_channel) for port in self._all)

    def lets_newcomers_in(self, now: float) -> bool:
        """Return whether handshakes may be finished now, see ``ClientPort.lets_newcomers_in``."""
        return all(port.lets_newcomers_in(now) for port in self._all)
