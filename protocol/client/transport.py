"""One try to reach the supervisor: a DEALER socket, its monitor, and the meaning of the monitor's events.

Nothing here blocks.
"""

import errno
import json
import os
import re
import socket
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import reduce
from pathlib import Path
from typing import Final

import zmq

from protocol.limits import SOCKET_MAX_FRAME
from protocol.process.paths import ENVIRONMENT_VARIABLE, PAUSED, check_private, ipc_path, serve_hint
from protocol.process.sockets import check_listener, monitor_event

# Find out whether ZeroMQ listens at a TCP address, or another program that only takes connections.
#
# The supervisor ends the connection of a client with a wrong key, and CURVE gives no reason. A tunnel, a proxy or a
# port forwarding without a supervisor behind it also ends the connection. libzmq reports both cases in the same words.
# But a libzmq that listens sends a greeting to each new connection before it knows any key. The probe looks for that
# greeting.


PROBE_S: Final = 1.0
"""Seconds that the greeting may take."""
_SIGNATURE: Final = b"\xff"
"""The first byte of every greeting of ZMTP 2 and 3."""


class GreetingProbe:
    """A connection to ``tcp://HOST:PORT`` on which nothing is sent.

    Only the look-up of the host's name can block. libzmq has looked the same name up a moment before.
    """

    def __init__(self, endpoint: str) -> None:
        self._end_at = time.monotonic() + PROBE_S
        self._socket: socket.socket | None = None
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        try:
            family, kind, proto, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[
                0
            ]
            self._socket = socket.socket(family, kind | socket.SOCK_NONBLOCK, proto)
            self._socket.connect(address)
        except BlockingIOError:
            pass  # the connect goes on in the background
        except (OSError, ValueError):
            self.close()

    def greeted(self) -> bool | None:
        """Return whether the listener greets as ZeroMQ does. None while that is not known yet."""
        if self._socket is None:
            return False
        try:
            return self._socket.recv(1) == _SIGNATURE
        except OSError as e:
            waiting = e.errno in (errno.EAGAIN, errno.ENOTCONN) and time.monotonic() < self._end_at
            return None if waiting else False

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


# The key with which a client connects over TCP: a file of mode 0600 that `modelctl keys new` writes.
#
# The file is a JSON object of strings, so that a client in any language can read it. ``name`` is the name of the key.
# ``server_key`` is the supervisor's public key: the supervisor proves that it owns that key. ``public_key`` and
# ``secret_key`` are the client's pair. They are keys of CURVE (32 bytes) in Z85 (ZeroMQ RFC 32): 40 characters each.
# This module does not import zmq.


KEY_NAME: Final = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
FIELDS: Final = ("name", "server_key", "public_key", "secret_key")
MAX_FILE: Final = 4096
"""Most bytes of a key file. A real one has some 300."""


@dataclass(frozen=True, slots=True)
class ClientKey:
    """A client's key pair and the supervisor's public key, in Z85. The ``repr`` of a key holds no secret."""

    name: str
    server_key: str
    public_key: str
    secret_key: str = field(repr=False)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "ClientKey":
        """Return the key in a file. Raises ValueError with the file, what is wrong with it, and the remedy."""
        return parse_client_key(read_private(Path(path)), f"the key file {os.fspath(path)}")

    def to_json(self) -> str:
        """Return the text of a key file. It holds the secret key."""
        return json.dumps({name: getattr(self, name) for name in FIELDS}, indent=2) + "\n"


def is_key(text: object) -> bool:
    """Return whether a text is 32 bytes in Z85. Five digits can exceed four bytes: libzmq refuses such a text."""
    if not isinstance(text, str) or len(text) != 40:
        return False
    places = [_DIGITS.find(digit) for digit in text]
    values = (reduce(lambda value, place: value * 85 + place, places[i : i + 5], 0) for i in range(0, 40, 5))
    return min(places) >= 0 and max(values) < 1 << 32


def parse_client_key(text: str, shown: str) -> ClientKey:
    """Return the key in a text. Raises ValueError, and never quotes the text, because it may be a secret."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{shown} is not JSON; get a new one with `modelctl keys new`") from None
    if not isinstance(given, dict) or not all(isinstance(given.get(name), str) for name in FIELDS):
        message = f"{shown} must be an object with the strings {', '.join(FIELDS)}; get one with `modelctl keys new`"
        raise ValueError(message)
    if not KEY_NAME.fullmatch(given["name"]):  # it is shown on terminals
        raise ValueError(f"{shown}: name is no name of a key; get one with `modelctl keys new`")
    for name in FIELDS[1:]:
        if not is_key(given[name]):
            raise ValueError(f"{shown}: {name} is no key: 40 characters of Z85; get one with `modelctl keys new`")
    return ClientKey(**{name: given[name] for name in FIELDS})


def read_private(path: Path, *, limit: int = MAX_FILE) -> str:
    """Return the text of a file that only the user (or root) can read or write. Raises ValueError with the remedy."""
    try:
        # Check the open file and not its name, which may mean another file by now.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} is no regular file; give a key file")
            check_private(path, status)
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(limit + 1)
        finally:
            os.close(descriptor)
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from None
    if len(content) > limit:
        raise ValueError(f"{path} is longer than {limit} bytes; it is no key file")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; it is no key file") from None


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


# Decide when a client tries again to connect, and when it gives a silent supervisor up. Pure: ``now`` is an argument.
#
# libzmq's heartbeats notice a supervisor that is stopped (SIGSTOP) or whose machine is gone. A thread of libzmq
# answers them. So heartbeats do not notice a supervisor whose loop hangs. Only PING does, because the loop answers it.


DEFAULT_SILENCE_S: Final = 15.0
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0
"""Each pause between tries to connect is twice the pause before, up to this one. A random part, at most half, is taken
off each pause."""


class PeerState(Enum):
    ALIVE = "alive"
    ASK = "ask"
    """The client has heard nothing for long: send PING."""
    LOST = "lost"
    """The supervisor did not answer PING in time."""


class Liveness:
    """The rule for a silent supervisor: send PING after a third of ``silence``, and give up after all of ``silence``.

    silence  seconds
    step     seconds. Call ``check`` this often while the client waits for something
    """

    def __init__(self, silence: float, now: float) -> None:
        self.silence = silence
        self.step = min(1.0, silence / 10)
        self._heard = self._looked = now
        self._asked: float | None = None

    def heard(self, now: float) -> None:
        """Note that a message came, of any kind."""
        self._heard, self._asked = now, None

    def check(self, now: float, *, waiting: bool) -> PeerState:
        """Return the state of the supervisor.

        waiting  True if the client waits for a message. Otherwise silence means nothing
        """
        away, self._looked = now - self._looked > 3 * self.step, now
        if away or not waiting:
            # The client did not look for a while: the program did something else, or was stopped itself. Messages that
            # came meanwhile may not have been read yet. So the time begins anew.
            self.heard(now)
            return PeerState.ALIVE
        if self._asked is None:
            if now - self._heard < self.silence / 3:
                return PeerState.ALIVE
            self._asked = now
            return PeerState.ASK
        return PeerState.LOST if now - self._asked >= self.silence * 2 / 3 else PeerState.ALIVE


class Redial:
    """The tries to connect.

    patience    seconds until WELCOME must have come
    always      whether to try again after every failure, until the patience is over
    at          when the next try is due
    give_up_at  when the patience is over
    failure     why the last try failed
    rejected    whether the supervisor, or the kernel, refused that try
    """

    def __init__(self, patience: float, always: bool, now: float) -> None:
        self.patience, self.always = patience, always
        self.at = now
        self.give_up_at = now + patience
        self.failure: str | None = None
        self.rejected = False
        self._tries = 0

    def begin(self) -> None:
        """Note that a try begins."""
        self._tries += 1

    def again(self, failure: str, rejected: bool, now: float, jitter: float) -> None:
        """Plan the next try after one that failed. ``jitter`` is a factor of the pause, 0.5 to 1."""
        self.failure, self.rejected = failure, rejected
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._tries - 1))
        self.at = now + pause * jitter

    def why_given_up(self, endpoint: str, *, local: bool, taken: bool) -> tuple[str, bool]:
        """Return (the reason why no connection was made, whether a refusal is that reason).

        local  whether the endpoint is on this machine (ipc)
        taken  whether somebody took the connection of the last try
        """
        # The last try may have begun just now. Unless somebody took that connection, the try before tells more.
        if self.failure is not None and not taken:
            return self.failure, self.rejected
        if taken or local:
            return f"the supervisor at {endpoint} did not answer within {self.patience:.3g} s", False
        nobody = f"nobody took the connection to {endpoint} within {self.patience:.3g} s"
        return f"{nobody}: the address or its name is wrong, or a firewall is between", False
