"""A connection that the threads of a process share.

There is one lock, and no thread of its own: of the threads that wait, one waits on the descriptors for all of them,
without the lock, and takes in what comes. It tells the others what is theirs; when it leaves, another takes its place.
"""

import math
import os
import select
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from protocol.client.answers import StreamState, Touched
from protocol.client.connection import ClientConnection, check_welcomed
from protocol.client.transport import Transport

_LONGEST_WAIT_S = 1.0
"""After which a waiting thread looks for itself, whatever it was told."""


class SharedConnection(ClientConnection):
    """Everything that takes the lock may be called from any thread; ``pump`` by whoever holds the lock."""

    lock: "threading.RLock"

    def __init__(self, endpoint: str | None, **more: Any) -> None:
        super().__init__(endpoint, **more)
        self.lock = threading.RLock()
        self._waiters: dict[int, threading.Condition] = {}
        self._polling: threading.Condition | None = None
        self._poller = select.poll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._nudged = False

    def wait_welcome(self) -> None:
        """Connects. Raises ConnectionLost, or what the supervisor refused this client with."""
        self.wait((), lambda: check_welcomed(self), None)

    def wait(self, states: Collection[Touched], done: Callable[[], bool], timeout: float | None) -> bool:
        """Until ``done``, which these requests and calls decide; False if ``timeout`` seconds passed first.

        Sees the end of the connection, too. Raises RuntimeError if another thread waits for one of them.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            with self.lock:
                waiter = self._enter(states)
                try:
                    while True:
                        self.pump()
                        if done():
                            return True
                        due = self.due()
                        pause = _LONGEST_WAIT_S if due is None else min(due, _LONGEST_WAIT_S)
                        if deadline is not None:
                            left = deadline - time.monotonic()
                            if left <= 0:
                                return False
                            pause = min(pause, left)
                        if self._polling is None:
                            self._poll(waiter, pause)
                        else:
                            waiter.wait(pause)
                finally:
                    self._exit(states)
        finally:
            self._settle()

    def check(self) -> None:
        super().check()
        # The lock could be taken again, in the midst of what it guards.
        if _is_held_here(self.lock):
            raise RuntimeError(
                "this client was used by a signal handler, or a finalizer, that interrupted its own work: "
                "there a stream may be cancelled, and nothing else be done"
            )

    def cancel(self, state: StreamState) -> None:
        self.check_process()
        # never blocks: a signal handler may be what calls it, and the lock be held by what it interrupted
        self._noted.append((self.session.cancel, state))
        self._settle()

    def close(self) -> None:
        if self.closed or os.getpid() != self._pid:
            return
        self.check()
        super().close()
        with self.lock:
            if self._wakeup >= 0:
                os.close(self._wakeup)
                self._wakeup = -1

    def __del__(self) -> None:
        if getattr(self, "_wakeup", -1) >= 0:  # nobody closed the client
            os.close(self._wakeup)

    def _enter(self, states: Collection[Touched]) -> threading.Condition:
        if any(state.id in self._waiters for state in states):
            raise RuntimeError("another thread is reading this stream: one thread at a time")
        waiter = threading.Condition(self.lock)
        for state in states:
            self._waiters[state.id] = waiter
        return waiter

    def _exit(self, states: Collection[Touched]) -> None:
        for state in states:
            del self._waiters[state.id]
        if self._polling is None and self._waiters:
            next(iter(self._waiters.values())).notify()

    def _poll(self, waiter: threading.Condition, seconds: float) -> None:
        """Waits on the descriptors, and lets go of the lock meanwhile."""
        if self._nudged:
            # Here, not when the poll is over: by then another thread may be polling, and this its nudge.
            self._nudged = False
            try:
                os.eventfd_read(self._wakeup)
            except BlockingIOError:  # an interrupt came between
                pass
        poller = self._poller
        self._polling = waiter
        try:
            # An interrupt may come right after any call. Within this block it leaves the lock as it has to be; and
            # nobody may wait for a poll that is over, so that is said before the lock is taken again.
            self.lock.release()
            # who dropped a stream while we held the lock could not cancel it, and counts on us
            if not self._noted:
                # rounded up: a poll of 0 ms for the last fraction would spin
                poller.poll(math.ceil(seconds * 1000))
        finally:
            self._polling = None
            self.lock.acquire()

    def _nudge(self) -> None:
        """Ends the poll, if there is one."""
        if self._polling is not None:
            self._nudged = True
            os.eventfd_write(self._wakeup, 1)

    def _watch(self, transport: Transport) -> None:
        # A new one: a thread may be waiting with the old one.
        self._poller = select.poll()
        for descriptor in (*transport.descriptors, self._wakeup):
            self._poller.register(descriptor, select.POLLIN)

    def _unwatch(self) -> None:
        self._poller = select.poll()
        self._poller.register(self._wakeup, select.POLLIN)

    def _changed(self, touched: list[Touched]) -> None:
        for state in touched:
            waiter = self._waiters.get(state.id)
            if waiter is None:
                continue
            if waiter is self._polling:
                self._nudge()
            else:
                waiter.notify()

    def _settle(self) -> None:
        # Whoever holds the lock comes here after letting go of it (or looks in ``_poll``), so what was noted just
        # before is seen. A lock that is taken may be our own: a finalizer runs in the midst of anything.
        while self._noted and self._is_free() and self.lock.acquire(blocking=False):
            try:
                if not self.closed:
                    self._send_noted()
                    self._nudge_for_input()
            finally:
                self.lock.release()

    def _is_free(self) -> bool:
        return not (self.closed or _is_held_here(self.lock)) and os.getpid() == self._pid

    def _nudge_for_input(self) -> None:
        """Sending may have consumed the edge that would have told the polling thread of input."""
        if (
            self._polling is not None
            and self.transport is not None
            and not self.transport.left
            and self.transport.has_input
        ):
            self._nudge()


def _is_held_here(lock: "threading.RLock") -> bool:
    """Whether this very thread holds it. threading.Condition asks the same way."""
    held: bool = lock._is_owned()  # type: ignore[attr-defined]
    return held
