"""The bare loop: call handlers when descriptors and ZeroMQ sockets become readable, and when timers are due.

zmq_poll asks every socket twice, with a system call each time. Even for the few busy sockets, that and what pyzmq adds
take as long as forwarding a token. So the reactor has one epoll of everything. A ZeroMQ socket is in it with its
descriptor, which is edge-triggered: it reports only what came since the socket was last used, for whatever purpose. A
send may take note of input without reporting it. Hence the rule: before a wait, every socket that was used is asked
once more. The reactor asks busy sockets in each turn. It asks the other sockets if anything but a busy socket was
handled.
"""

import select
import time
from collections.abc import Callable
from typing import Any, Final

import zmq

from protocol.process.socket_calls import AnySocket, has_input
from supervisor.timers import Timers

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
