"""A connection that the threads of a process share.

There is one lock, and the connection has no thread of its own. One of the waiting threads waits on the descriptors for
all of them, without the lock, and reads the frames that arrive. It wakes the threads that the frames are for. When it
leaves, another thread takes its place.
"""

import math
import os
import select
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from protocol.client.answers import StreamState, Touched
from protocol.client.connection import Connection, check_welcomed
from protocol.client.transport import Transport

_LONGEST_WAIT_S = 1.0
"""A waiting thread looks for itself after this time, even if no other thread has woken it."""


class SharedConnection(Connection):
    """A connection for threads. Any thread may call a method that takes the lock. ``pump`` needs the lock."""

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
        """Wait until WELCOME has come. Raises ConnectionLost, or the error with which the supervisor refuses."""
        self.wait((), lambda: check_welcomed(self), None)

    def wait(self, states: Collection[Touched], done: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``done`` returns True. Return False if ``timeout`` seconds pass first.

        states  the requests and calls that ``done`` depends on. The end of the connection changes them, too

        Raises RuntimeError if another thread waits for one of them.
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
        # This thread could take the lock again, in the middle of the work that the lock guards.
        if _is_held_here(self.lock):
            raise RuntimeError(
                "this client was used by a signal handler, or a finalizer, that interrupted its own work: "
                "there a stream may be cancelled, and nothing else be done"
            )

    def cancel(self, state: StreamState) -> None:
        self.check_process()
        # Never block: a signal handler may call this, and the interrupted code may hold the lock.
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
        """Wait on the descriptors, and release the lock meanwhile."""
        if self._nudged:
            # Clear the nudge before the poll. After the poll, another thread may poll, and a nudge may be for that one.
            self._nudged = False
            try:
                os.eventfd_read(self._wakeup)
            except BlockingIOError:  # an interrupt came between
                pass
        poller = self._poller
        self._polling = waiter
        try:
            # An interrupt may come right after any call. Within this block, the lock is taken again in any case. No
            # thread may wait for a poll that is over. So ``_polling`` is reset before the lock is taken again.
            self.lock.release()
            # A thread that dropped a stream while this one held the lock relies on this one to cancel it.
            if not self._noted:
                # Round up: a poll of 0 ms for the last fraction would spin.
                poller.poll(math.ceil(seconds * 1000))
        finally:
            self._polling = None
            self.lock.acquire()

    def _nudge(self) -> None:
        """End the poll of another thread, if there is one."""
        if self._polling is not None:
            self._nudged = True
            os.eventfd_write(self._wakeup, 1)

    def _watch(self, transport: Transport) -> None:
        # Make a new poll object: a thread may be waiting with the old one.
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
        # The thread that holds the lock calls this method after releasing it, or looks at ``_noted`` in ``_poll``. So
        # that thread sees what was noted just before. A finalizer runs at any time, also in a thread that holds the
        # lock.
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
        """Wake the polling thread if there is input. Sending may have consumed the edge that would have woken it."""
        if (
            self._polling is not None
            and self.transport is not None
            and not self.transport.left
            and self.transport.has_input
        ):
            self._nudge()


def _is_held_here(lock: "threading.RLock") -> bool:
    """Return whether this thread holds a lock. threading.Condition uses the same private method."""
    held: bool = lock._is_owned()  # type: ignore[attr-defined]
    return held
