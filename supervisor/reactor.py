"""The bare loop: call handlers when descriptors and ZeroMQ sockets become readable, and when timers are due.

zmq_poll asks every socket twice, with a system call each time. Even for the few busy sockets, that and what pyzmq adds
take as long as forwarding a token. So the reactor has one epoll of everything. A ZeroMQ socket is in it with its
descriptor, which is edge-triggered: it reports only what came since the socket was last used, for whatever purpose. A
send may take note of input without reporting it. Hence the rule: before a wait, every socket that was used is asked
once more. The reactor asks busy sockets in each turn. It asks the other sockets if anything but a busy socket was
handled.
"""

import ctypes
import errno
import heapq
import itertools
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import zmq

from protocol.process.sockets import AnySocket, has_input

# One heap of pending calls for the whole loop. Times are monotonic seconds, and the caller passes them.


CLEAR_AT = 256
"""Number of pending calls at which cancelled ones are removed for the first time. Later they are removed when the
number has doubled. Otherwise a cancelled call would stay until its time, perhaps for a day. Such calls are frequent,
because each short deadline cancels the call at a longer one."""


class Timer:
    """A pending call. ``cancel`` may be called twice, and also after the call has become due and before it runs."""

    __slots__ = ("at", "callback", "cancelled")

    def __init__(self, at: float, callback: Callable[[], None]) -> None:
        self.at = at
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Timers:
    """The pending calls, each at a given time. Calls with equal times run in the order in which they were set."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._clear_at = CLEAR_AT

    def at(self, when: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(when, callback)
        heapq.heappush(self._heap, (when, next(self._order), timer))
        if len(self._heap) > self._clear_at:
            self._heap = [entry for entry in self._heap if not entry[2].cancelled]
            heapq.heapify(self._heap)
            self._clear_at = max(CLEAR_AT, 2 * len(self._heap))
        return timer

    def due(self, now: float) -> list[Timer]:
        """Take out every timer whose time has come."""
        timers = []
        while self._heap and self._heap[0][0] <= now:
            timers.append(heapq.heappop(self._heap)[2])
        return timers

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until the next call; None if there is none."""
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return max(0.0, self._heap[0][0] - now) if self._heap else None


class EarliestTimer:
    """One pending call, at the earliest of the times that were asked for since its last call."""

    def __init__(self, timers: Timers, callback: Callable[[], None]) -> None:
        self._timers = timers
        self._callback = callback
        self._timer: Timer | None = None

    def set(self, when: float) -> None:
        """Make the call at this time, unless an earlier one is pending."""
        if self._timer is not None:
            if self._timer.at <= when:
                return
            self._timer.cancel()
        self._timer = self._timers.at(when, self._due)

    def _due(self) -> None:
        self._timer = None
        self._callback()


Handler = Callable[[], object]
Condition = Callable[[], bool]

CHECK_S: Final = 0.001
"""Seconds after which other sockets and timers get their turn, while busy sockets have input all the time."""


class Reactor:
    """Calls handlers, one after the other, on one thread. An exception of a handler is not caught."""

    def __init__(self) -> None:
        self.timers = Timers()
        self._epoll = select.epoll()
        self._busy: list[tuple[AnySocket, Handler, Condition]] = []
        self._others: list[tuple[AnySocket, Handler, Condition]] = []
        self._descriptors: dict[int, Handler] = {}
        """Handlers that are called when their descriptor is readable: those of busy sockets, and of all that is not a
        ZeroMQ socket."""
        self._busy_descriptors: set[int] = set()
        self._poll_all = True
        self._look_at = 0.0
        self.waited_s = 0.0
        """Seconds in which there was nothing to do."""

    def watch(self, source: Any, handler: Handler, *, busy: bool = False, waiting: Condition = lambda: False) -> None:
        """Call ``handler`` whenever a socket, or anything with a descriptor, is readable (level-triggered).

        busy     for a ZeroMQ socket: ask it in each turn. Its handler may be called when there is no input. Code that
                 uses a socket that is not busy calls ``poll_all`` afterwards, unless it runs in that socket's own
                 handler or in a timer
        waiting  for a ZeroMQ socket: tells whether the handler still has something to do without input
        """
        if isinstance(source, zmq.Socket):
            (self._busy if busy else self._others).append((source, handler, waiting))
            descriptor = int(source.get(zmq.FD))
            if busy:
                self._busy_descriptors.add(descriptor)
                self._descriptors[descriptor] = handler
        else:
            descriptor = source if isinstance(source, int) else source.fileno()
            self._descriptors[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN)

    def poll_all(self) -> None:
        """Ask all sockets before the next wait. Call this after using a socket that is not busy: it may have input."""
        self._poll_all = True

    def every(self, interval_s: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` again and again, each time ``interval_s`` seconds after it has returned."""

        def run() -> None:
            callback()
            self.timers.at(time.monotonic() + interval_s, run)

        self.timers.at(time.monotonic() + interval_s, run)

    def turn(self, after: Callable[[], object] = lambda: None) -> None:
        """Do what there is to do; if there is nothing, wait for it.

        after  called whenever a handler, or the callback of a timer, has returned
        """
        handled = self._ask(self._busy, after)
        now = time.monotonic()
        if handled and now < self._look_at and not self._poll_all:
            return
        self._look_at = now + CHECK_S
        if self._poll_all:
            self._poll_all = self._ask(self._others, after)
            handled = handled or self._poll_all
        wait = 0 if handled else self.timers.wait_s(now)
        ready = self._epoll.poll(wait)
        if wait != 0:
            self.waited_s += time.monotonic() - now
        for descriptor, _ in ready:
            # A busy socket's handler is called without asking the socket first: a single token gets on its way sooner.
            if (handler := self._descriptors.get(descriptor)) is not None:
                handler()
                after()
            if descriptor not in self._busy_descriptors:
                self._poll_all = True
        for timer in self.timers.due(time.monotonic()):
            self._poll_all = True
            if not timer.cancelled:
                timer.callback()
                after()

    @staticmethod
    def _ask(sockets: list[tuple[AnySocket, Handler, Condition]], after: Callable[[], object]) -> bool:
        """Call the handlers of sockets that have input or work left. Return whether there were any."""
        handled = False
        for each, handler, waiting in sockets:
            if has_input(each) or waiting():
                handler()
                after()
                handled = True
        return handled


# Turn signals into bytes on a socket, so that the loop decides what they mean, and not a handler.


class Signals:
    """The receiver of SIGINT, SIGTERM and SIGHUP in this process. Make one object only, on the main thread."""

    def __init__(self) -> None:
        self.receiver, self._sender = socket.socketpair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)
        self._had_terminal = _has_terminal()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            ignored = signal.getsignal(number) is signal.SIG_IGN
            if not (number == signal.SIGHUP and ignored):  # nohup: the supervisor must outlive its terminal
                signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

    def arrived(self) -> list[signal.Signals]:
        """Return the signals that have come since the last call."""
        return [signal.Signals(number) for number in self.receiver.recv(64)]

    def terminal_is_gone(self) -> bool:
        """Return whether the terminal has gone. Its end sends SIGHUP, as does an operator who wants models.yaml read
        again."""
        return self._had_terminal and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as e:
        return e.errno in (errno.EMFILE, errno.ENFILE)  # unknown, so the terminal counts as being there
    return True


# Give unused memory back to the system after a peak of load.
#
# The C library keeps freed memory that lies below memory in use. So memory from a moment in which clients did not
# read, or from a flood, would stay resident for ever. Giving it back takes 0.1 ms where there is little, and 1 ms for
# 10 MB.


TRIM_S = 60.0
"""Seconds between two calls."""
_malloc_trim: Callable[[ctypes.c_size_t], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""None if the C library is not GNU's."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATM = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
"""Held open, because it must be readable while the process has no descriptor left."""
_KEEP = ctypes.c_size_t(0)
"""Bytes to keep at the end of the heap."""


def resident() -> int:
    """Return the bytes that this process has in memory (resident set). Takes 10 µs."""
    return int(os.pread(_STATM, 128, 0).split()[1]) * _PAGE


def trim() -> None:
    """Give back whole pages that are unused."""
    if _malloc_trim is not None:
        _malloc_trim(_KEEP)
