"""One client connection: a line to the supervisor and the session that it feeds. The two clients only wait differently.

Nothing here blocks except ``close`` (bounded by LINGER_MS). The two kinds of it are ``shared_connection`` (any threads,
a lock) and ``loop_connection`` (one event loop); they say how one waits, and what finalizers may do, which run wherever
the garbage collector happens to.
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
from protocol.client.client_key import ClientKey
from protocol.client.liveness import DEFAULT_SILENCE_S, Liveness, PeerState
from protocol.client.session import ClientSession
from protocol.client.transport import LINGER_MS, Sockets, Transport
from protocol.errors import ErrorCode, WireError
from protocol.process.private_paths import check_runtime_dir
from protocol.process.runtime_paths import admin_endpoint, check_endpoint, default_runtime_dir, front_endpoint, ipc_path

FIRST_PAUSE_S: Final = 0.05
PROBE_LOOK_S: Final = 0.01
"""Seconds between two looks at the probe of a listener with which the handshake failed."""
LONGEST_PAUSE_S: Final = 2.0
"""Pauses between tries to connect double from the first to the longest, less a random half."""


class Connection:
    """Made without connecting: the first ``pump`` does.

    endpoint     where the supervisor listens; unset is found in the runtime directory
    runtime_dir  the supervisor's directory; unset is ``default_runtime_dir()``
    admin        connect to the operators' socket
    key          for an endpoint over TCP: the key, or the file that holds it
    patience     seconds until WELCOME must have come
    redial       whether to try again, until ``patience`` is over, if nobody listens; if False, the first failure is
                 final. A handshake for which the supervisor was too busy is tried again in any case. Only HELLO is
                 sent before WELCOME, so no request is ever sent twice
    silence      seconds, see ``protocol.client.liveness``

    Raises ValueError for a socket path that is too long, a runtime directory of another user's, a key file that cannot
    be used, and a key without an endpoint over TCP; ``pump`` for what is no endpoint.
    """

    lock: AbstractContextManager[Any] = nullcontext()
    """Held by whoever uses the session or the socket."""

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
        # Over TCP one socket takes requests and orders: what a key may do is a matter of its rights.
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
        self._patience, self._redial = patience, redial
        self._give_up_at = now + patience
        self._dial_at = now
        self._dials = 0
        self._failure: str | None = None
        self._rejected = False
        self._liveness = Liveness(silence, now)
        self._check_at = now
        # a context of its own: nothing is shared with other users of zmq in this process
        self._sockets = Sockets()
        weakref.finalize(self, self._sockets.close).atexit = False

    # ---- what the clients do with it; each takes the lock

    def begin(self, requests: Sequence[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[StreamState]:
        """Sends requests (model, body, route) together: all, or what ``ClientSession.generate`` raises."""
        try:
            with self.lock:
                states: list[StreamState] = []
                try:
                    for model, body, route in requests:
                        states.append(self.session.generate(model, body, route))
                except BaseException:
                    for state in states:
                        self.session.abandon(state)
                    raise
                self.pump()
                return states
        finally:
            self._settle()

    def ask(self, verb: str, params: dict[str, Any]) -> CallState:
        """Sends a CALL. Raises what ``ClientSession.call`` does."""
        try:
            with self.lock:
                state = self.session.call(verb, params)
                self.pump()
                return state
        finally:
            self._settle()

    def forget(self, state: CallState) -> None:
        """Nobody waits for this call's REPLY any more."""
        with self.lock:
            self.session.forget_call(state)

    def take(self, state: StreamState) -> Delta | None:
        """The next delta; None if there is none yet, or (``ended``) will be none. Raises how the request ended."""
        try:
            with self.lock:
                delta = self.session.take(state)
                # Only with a delta in hand: a pump after None could end the stream with an error that nobody takes.
                if delta is not None and self.waits_to_send:
                    self.pump()
                return delta
        finally:
            if self._noted:
                self._settle()

    def cancel(self, state: StreamState) -> None:
        """Asks for the end of a request, which is then read as usual."""
        self.check()
        try:
            with self.lock:
                self.session.cancel(state)
                if self.waits_to_send:
                    self.pump()
        finally:
            self._settle()

    def drop(self, state: StreamState) -> None:
        """Cancels a request and drops what was not read. Not for finalizers, which may run while the lock is held."""
        if self.closed:
            return
        try:
            with self.lock:
                self._noted.append((self.session.abandon, state))
                self.pump()
        finally:
            self._settle()

    def is_lost(self) -> bool:
        """Whether this connection is of no more use, as far as is known now."""
        try:
            with self.lock:
                # notices an end since the last look, and answers what came, before anything new is sent
                self.pump()
                return self.session.broken is not None
        finally:
            self._settle()

    def abandon(self, state: StreamState) -> None:
        """``drop`` for finalizers: safe in any thread and in the midst of anything.

        Where it cannot be done at once it is noted, and done by whoever holds the lock, once that is done.
        """
        if state.abandoned or self._sockets.closed:
            return
        self._noted.append((self.session.abandon, state))
        self._settle()

    def close(self) -> None:
        """Ends the connection; the supervisor cancels what is unfinished. Takes LINGER_MS at most. May be repeated."""
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
        """Raises RuntimeError after a fork."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this client belongs to process {self._pid} and was used in {os.getpid()}, after a fork: "
                "make a client in each process"
            )

    def check(self) -> None:
        """Raises RuntimeError where this connection may not be used."""
        self.check_process()

    # ---- the work; whoever calls holds the lock

    def pump(self) -> None:
        """Takes in what arrived, sends what is due, and notices the end of the connection, or connects."""
        if self.closed:
            return
        touched: list[Touched] = []
        try:
            now = time.monotonic()
            if self.transport is None and now >= self._dial_at and self.session.broken is None:
                self._dial(now, touched)
            while True:
                self._do_noted()
                if self.transport is not None and not self.transport.left:
                    self._exchange(self.transport, now, touched)
                if not self._noted:  # a finalizer, while we were at it
                    break
            if now >= self._check_at or self.session.welcome is None or self.session.broken is not None:
                self._check_deadlines(now, touched)
        except BaseException:
            # An interrupt (Ctrl-C) between taking a frame and applying it loses the frame, perhaps someone's last one.
            touched += self.session.lose("interrupted while reading from the supervisor")
            self._leave_endpoint()
            self._changed(touched)
            raise
        self._changed(touched)

    def due(self) -> float | None:
        """Seconds after which ``pump`` has to be called though nothing arrived; None while nothing is awaited."""
        if self.closed or self.session.broken is not None:
            return None
        now = time.monotonic()
        if self.session.welcome is None:
            at = self._give_up_at if self.transport is not None else min(self._give_up_at, self._dial_at)
            if self.transport is not None and self.transport.asks_who_listens:
                at = min(at, now + PROBE_LOOK_S)
        elif self.session.unfinished:
            at = self._check_at
        else:
            return None
        return max(0.0, at - now)

    @property
    def waits_to_send(self) -> bool:
        return bool(self.session.outbox) and self.session.welcome is not None

    # ---- what the two kinds of connection do each in its way

    def _watch(self, transport: Transport) -> None:
        """There are new descriptors to wait on."""

    def _unwatch(self) -> None:
        """They are about to be closed."""

    def _changed(self, touched: list[Touched]) -> None:
        """These requests and calls changed; the connection itself may have, too."""

    def _settle(self) -> None:
        """Does what was noted, if this is the moment."""
        raise NotImplementedError

    # ---- steps

    def _dial(self, now: float, touched: list[Touched]) -> None:
        self._dials += 1
        try:
            self.transport = self._sockets.transport = Transport(
                self._sockets.context, self.endpoint, self.session.hello, self._key
            )
        except zmq.ZMQError as e:  # no descriptors are left, mostly
            self._failed(f"cannot make a socket for {self.endpoint}: {e}", now, touched)
        else:
            self._watch(self.transport)

    def _failed(self, reason: str, now: float, touched: list[Touched]) -> None:
        """The connection ended, or could not be made: it is tried again, or lost."""
        transport, session = self.transport, self.session
        refused, rejected = transport is not None and transport.refused, transport is not None and transport.rejected
        again = self._redial or (transport is not None and transport.overdue)
        if not again or refused or session.welcome is not None or session.broken is not None:
            touched += session.reject(reason) if rejected else session.lose(reason)
            return
        if transport is not None:
            self._unwatch()
            transport.hang_up(0)
        self.transport = self._sockets.transport = None
        self._failure, self._rejected = reason, rejected
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._dials - 1))
        self._dial_at = now + pause * random.uniform(0.5, 1)

    def _exchange(self, transport: Transport, now: float, touched: list[Touched]) -> None:
        # The monitor is read before the socket: when it tells of the end, all that came before the end is still
        # readable, and a terminal event among it must not turn into a lost connection.
        end = transport.read_monitor(self.session.goaway)
        while True:
            # Frames of another user's listener are not even read: its WELCOME would release the waiting requests.
            if transport.trusted:
                if self._receive_all(transport, touched):
                    self._liveness.heard(now)
                self._send_all(transport)
            # Sending can consume the edge of the socket's file descriptor that tells of new input, so whoever waits
            # on the descriptor next would never wake up: look again. The socket is asked before the listener is
            # trusted, too: the descriptor of a socket that is not asked stays readable, and the waiting would spin.
            if not transport.has_input or not transport.trusted:
                break
        if end is not None:
            self._failed(end, now, touched)

    def _check_deadlines(self, now: float, touched: list[Touched]) -> None:
        """What is due though nothing happened."""
        session, liveness = self.session, self._liveness
        self._check_at = now + liveness.step
        if session.broken is None and session.welcome is None and now >= self._give_up_at:
            # The last try may have begun just now: unless somebody took the call, the one before it tells more.
            taken = self.transport is not None and self.transport.connected
            silent = f"the supervisor at {self.endpoint} did not answer within {self._patience:.3g} s"
            if not taken and ipc_path(self.endpoint) is None:
                silent = (
                    f"nobody took the connection to {self.endpoint} within {self._patience:.3g} s: the address or its "
                    "name is wrong, or a firewall is between"
                )
            why = silent if taken or self._failure is None else self._failure
            touched += session.reject(why) if self._rejected and why is self._failure else session.lose(why)
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
        """How many frames there were."""
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
                # the supervisor is behind in reading: the next pump goes on here
                return
            outbox.popleft()


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
