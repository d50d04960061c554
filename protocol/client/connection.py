"""One connection of a client: the transport to the supervisor, and the session that handles the frames.

Nothing here blocks except ``close``, which takes LINGER_MS at most. ``SharedConnection`` (any threads, one lock) and
``LoopConnection`` (one event loop) add the waiting. They also handle calls from finalizers, because the garbage
collector runs finalizers in any thread and between any two instructions.
"""

import os
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import zmq

import protocol
from protocol.client.answers import CallState, Delta, StreamState, Touched
from protocol.client.session import ClientSession
from protocol.client.transport import (
    DEFAULT_SILENCE_S,
    LINGER_MS,
    ClientKey,
    Liveness,
    PeerState,
    Redial,
    Sockets,
    Transport,
)
from protocol.errors import ErrorCode, WireError
from protocol.messages import Generate
from protocol.process.paths import (
    admin_endpoint,
    check_endpoint,
    check_runtime_dir,
    default_runtime_dir,
    front_endpoint,
    ipc_path,
)

PROBE_LOOK_S: Final = 0.01
"""Seconds between two looks at the probe of a listener with which the handshake failed."""


CANNOT_CONNECT: Final = (WireError, ValueError)
"""The errors that a client raises if it cannot connect. Their messages say why, so the clients raise them without the
frames below the public method: a program's author learns nothing from those."""


class Connection:
    """A connection of a client. The constructor does not connect: the first ``pump`` does.

    endpoint     the endpoint of the supervisor. Unset: the socket in the runtime directory
    runtime_dir  the supervisor's directory. Unset: ``default_runtime_dir()``
    admin        connect to the admin socket
    key          for an endpoint over TCP: the key, or the file that holds it
    patience     seconds until WELCOME must have come
    redial       whether to try again, until ``patience`` is over, if nobody listens. If False, the first failure is
                 final. If the supervisor was too busy for the handshake, the connection tries again in any case. It
                 sends only HELLO before WELCOME, so it never sends a request twice
    silence      seconds, see ``Liveness``

    Raises ValueError for a socket path that is too long, a runtime directory of another user, a key file that cannot
    be used, and a key without an endpoint over TCP. ``pump`` raises ValueError for a text that is no endpoint.
    """

    lock: AbstractContextManager[Any] = nullcontext()
    """The thread that uses the session or the socket holds this lock."""

    def __init__(
        self,
        endpoint: str | None,
        *,
        runtime_dir: str | os.PathLike[str] | None = None,
        admin: bool = False,
        key: ClientKey | str | os.PathLike[str] | None = None,
        patience: float,
        redial: bool = False,
        silence: float = DEFAULT_SILENCE_S,
    ) -> None:
        if endpoint is None:
            find = admin_endpoint if admin else front_endpoint
            directory = Path(default_runtime_dir() if runtime_dir is None else runtime_dir)
            check_runtime_dir(directory)
            endpoint = find(directory)
        self.endpoint = check_endpoint(endpoint)
        # Over TCP one socket takes requests and orders. The rights of a key decide what it may do there.
        self.admin = admin and ipc_path(self.endpoint) is not None
        if key is not None and not self.endpoint.startswith("tcp://"):
            raise ValueError(
                f"a key is for TCP, and {self.endpoint!r} is not: give endpoint tcp://HOST:PORT, or no key"
            )
        self._key = key if key is None or isinstance(key, ClientKey) else ClientKey.load(key)
        self.session = ClientSession(f"modelctl-python/{protocol.__version__}")
        self.closed = False
        self.transport: Transport | None = None
        now = time.monotonic()
        self._pid = os.getpid()
        self._noted: deque[tuple[Callable[[StreamState], None], StreamState]] = deque()
        self._redial = Redial(patience, redial, now)
        self._liveness = Liveness(silence, now)
        self._check_at = now
        # Each connection has a zmq context of its own, and shares nothing with other users of zmq in this process.
        self._sockets = Sockets()
        weakref.finalize(self, self._sockets.close).atexit = False

    # ---- methods for the clients. Each of them takes the lock.

    def begin(
        self, requests: Sequence[tuple[str, dict[str, Any], dict[str, Any]]], kind: type[Generate] = Generate
    ) -> list[StreamState]:
        """Send requests (model, body, route) together. If one of them cannot be sent, send none.

        Raises the errors of ``ClientSession.generate``.
        """
        try:
            with self.lock:
                states: list[StreamState] = []
                try:
                    for model, body, route in requests:
                        states.append(self.session.generate(model, body, route, kind))
                except BaseException:
                    for state in states:
                        self.session.abandon(state)
                    raise
                self.pump()
                return states
        finally:
            self._settle()

    def ask(self, verb: str, params: dict[str, Any]) -> CallState:
        """Send a CALL. Raises the errors of ``ClientSession.call``."""
        try:
            with self.lock:
                state = self.session.call(verb, params)
                self.pump()
                return state
        finally:
            self._settle()

    def forget(self, state: CallState) -> None:
        """Drop the REPLY to a call when it comes, because nobody waits for it any more."""
        with self.lock:
            self.session.forget_call(state)

    def take(self, state: StreamState) -> Delta | None:
        """Return the next delta. None if none has come yet, or if the request has ended. Raises the request's error."""
        try:
            with self.lock:
                delta = self.session.take(state)
                # Pump only with a delta in hand. After None, it could end the stream with an error that nobody takes.
                if delta is not None and self.waits_to_send:
                    self.pump()
                return delta
        finally:
            if self._noted:
                self._settle()

    def cancel(self, state: StreamState) -> None:
        """Ask the supervisor to end a request. The stream then brings the end as usual."""
        self.check()
        try:
            with self.lock:
                self.session.cancel(state)
                if self.waits_to_send:
                    self.pump()
        finally:
            self._settle()

    def drop(self, state: StreamState) -> None:
        """Cancel a request, and drop what was not read. Not for finalizers, which may run while the lock is held."""
        if self.closed:
            return
        try:
            with self.lock:
                self._noted.append((self.session.abandon, state))
                self.pump()
        finally:
            self._settle()

    def is_lost(self) -> bool:
        """Return whether the connection has ended, as far as the client knows now."""
        try:
            with self.lock:
                # Before anything new is sent, ``pump`` notices an end of the connection and answers what arrived.
                self.pump()
                return self.session.broken is not None
        finally:
            self._settle()

    def abandon(self, state: StreamState) -> None:
        """Cancel a request, and drop what was not read. Finalizers may call this, in any thread and at any time.

        If the lock is taken, the request is noted, and the thread that holds the lock drops the request afterwards.
        """
        if state.abandoned or self._sockets.closed:
            return
        self._noted.append((self.session.abandon, state))
        self._settle()

    def close(self) -> None:
        """End the connection. The supervisor then cancels its unfinished requests. A second call does nothing."""
        if self.closed or os.getpid() != self._pid:
            return
        with self.lock:
            if self.closed:
                return
            self._send_noted()
            self.closed = True
            touched = self.session.lose("this client was closed")
            if self.transport is not None:
                self._unwatch()
                self._sockets.transport = None
                self.transport.hang_up(LINGER_MS)
            self._changed(touched)
        self._sockets.close()

    def check_process(self) -> None:
        """Raise RuntimeError after a fork."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this client belongs to process {self._pid} and was used in {os.getpid()}, after a fork: "
                "make a client in each process"
            )

    def check(self) -> None:
        """Raise RuntimeError if the caller may not use this connection."""
        self.check_process()

    # ---- the work. The caller holds the lock.

    def pump(self) -> None:
        """Connect if that is due. Take in what arrived, send what waits, and notice the end of the connection."""
        if self.closed:
            return
        touched: list[Touched] = []
        try:
            now = time.monotonic()
            if self.transport is None and now >= self._redial.at and self.session.broken is None:
                self._dial(now, touched)
            while True:
                self._do_noted()
                if self.transport is not None and not self.transport.left:
                    self._exchange(self.transport, now, touched)
                if not self._noted:  # a finalizer may have noted something meanwhile
                    break
            if now >= self._check_at or self.session.welcome is None or self.session.broken is not None:
                self._check_deadlines(now, touched)
        except BaseException:
            # An interrupt (Ctrl-C) between taking a frame and applying it loses the frame, which may end a request.
            touched += self.session.lose("interrupted while reading from the supervisor")
            self._leave_endpoint()
            self._changed(touched)
            raise
        self._changed(touched)

    def due(self) -> float | None:
        """Return the seconds after which to call ``pump`` even if nothing arrives. None if nothing is awaited."""
        if self.closed or self.session.broken is not None:
            return None
        now = time.monotonic()
        if self.session.welcome is None:
            at = self._redial.give_up_at
            if self.transport is None:
                at = min(at, self._redial.at)
            elif self.transport.asks_who_listens:
                at = min(at, now + PROBE_LOOK_S)
        elif self.session.unfinished:
            at = self._check_at
        else:
            return None
        return max(0.0, at - now)

    @property
    def waits_to_send(self) -> bool:
        """True if frames wait that may be sent now."""
        return bool(self.session.outbox) and self.session.welcome is not None

    # ---- methods that the two subclasses implement

    def _watch(self, transport: Transport) -> None:
        """Wait on the descriptors of a new transport from now on."""

    def _unwatch(self) -> None:
        """Stop waiting on the transport's descriptors, which are about to be closed."""

    def _changed(self, touched: list[Touched]) -> None:
        """Wake the threads or tasks that wait for these requests and calls. The connection may have changed, too."""

    def _settle(self) -> None:
        """Carry out the noted actions, if the lock is free."""
        raise NotImplementedError

    # ---- steps

    def _dial(self, now: float, touched: list[Touched]) -> None:
        self._redial.begin()
        try:
            self.transport = self._sockets.transport = Transport(
                self._sockets.context, self.endpoint, self.session.hello, self._key
            )
        except zmq.ZMQError as e:  # mostly because no descriptors are left
            self._failed(f"cannot make a socket for {self.endpoint}: {e}", now, touched)
        else:
            self._watch(self.transport)

    def _failed(self, reason: str, now: float, touched: list[Touched]) -> None:
        """Plan another try after the connection ended or could not be made, or give the connection up."""
        transport, session = self.transport, self.session
        refused, rejected = transport is not None and transport.refused, transport is not None and transport.rejected
        again = self._redial.always or (transport is not None and transport.overdue)
        if not again or refused or session.welcome is not None or session.broken is not None:
            touched += session.reject(reason) if rejected else session.lose(reason)
            return
        if transport is not None:
            self._unwatch()
            transport.hang_up(0)
        self.transport = self._sockets.transport = None
        self._redial.again(reason, rejected, now, random.uniform(0.5, 1))

    def _exchange(self, transport: Transport, now: float, touched: list[Touched]) -> None:
        # Read the monitor before the socket. When the monitor reports the end, all that came before the end is still
        # readable, and a terminal event among it must not turn into a lost connection.
        end = transport.read_monitor(self.session.goaway)
        while True:
            # Do not read frames of another user's listener: its WELCOME would release the waiting requests.
            if transport.trusted:
                if self._receive_all(transport, touched):
                    self._liveness.heard(now)
                self._send_all(transport)
            # Sending can consume the edge of the socket's file descriptor that reports new input. A thread that waits
            # on the descriptor next would never wake up. So look again. Ask the socket even before the listener is
            # trusted: the descriptor of a socket that nobody asks stays readable, and the waiting thread would spin.
            if not transport.has_input or not transport.trusted:
                break
        if end is not None:
            self._failed(end, now, touched)

    def _check_deadlines(self, now: float, touched: list[Touched]) -> None:
        """Do what is due even if nothing arrives: give the connection up, send PING, or leave the endpoint."""
        session, liveness = self.session, self._liveness
        self._check_at = now + liveness.step
        if session.broken is None and session.welcome is None and now >= self._redial.give_up_at:
            taken = self.transport is not None and self.transport.connected
            local = ipc_path(self.endpoint) is not None
            why, rejected = self._redial.why_given_up(self.endpoint, local=local, taken=taken)
            touched += session.reject(why) if rejected else session.lose(why)
        elif session.broken is None and session.welcome is not None:
            peer = liveness.check(now, waiting=session.unfinished)
            if peer is PeerState.ASK:
                session.ping()
                if self.transport is not None:
                    self._send_all(self.transport)
            elif peer is PeerState.LOST:
                message = f"the supervisor has not answered for {liveness.silence:.3g} s: it hangs, or is stopped"
                touched += session.lose(f"{message} ({self.endpoint})")
        if session.broken is not None:
            self._leave_endpoint()

    def _leave_endpoint(self) -> None:
        if self.transport is not None and not self.transport.left:
            self._unwatch()
            self.transport.leave()

    def _do_noted(self) -> None:
        while self._noted:
            act, state = self._noted.popleft()
            act(state)

    def _send_noted(self) -> None:
        self._do_noted()
        if self.transport is not None and not self.transport.left:
            self._send_all(self.transport)

    def _receive_all(self, transport: Transport, touched: list[Touched]) -> int:
        """Take in all frames that have arrived, and return their number."""
        receive, take_in, frames = transport.socket.recv, self.session.receive, 0
        while True:
            try:
                frame = receive(zmq.NOBLOCK)
            except zmq.Again:
                return frames
            frames += 1
            touched += take_in(frame)

    def _send_all(self, transport: Transport) -> None:
        outbox = self.session.outbox
        if self.session.welcome is None:
            return
        while outbox:
            try:
                transport.socket.send(outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return  # the supervisor is behind in reading: the next pump goes on here
            outbox.popleft()


def check_welcomed(connection: Connection) -> bool:
    """Return whether WELCOME has come. Raises the reason if it cannot come any more."""
    session = connection.session
    if session.welcome is None and session.broken is not None:
        raise session.broken
    return session.welcome is not None


def check_can_generate(connection: Connection) -> None:
    """Raise WireError (unsupported) on a connection to the admin socket, which takes calls only."""
    if connection.admin:
        raise WireError(
            ErrorCode.UNSUPPORTED, "requests go to the front socket: open another client, without admin=True"
        )
