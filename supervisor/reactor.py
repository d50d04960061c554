"""The bare loop: descriptors and ZeroMQ sockets that become readable, and timers. Decides nothing.

zmq_poll asks every socket it is given, twice, by a system call each: even with the few that are busy, that and what
pyzmq adds take as long as to forward a token. So here is one epoll of everything, in which a ZeroMQ socket stands with
its descriptor. That is edge-triggered: it tells of what came since the socket was last used, for whatever purpose (a
send may take in, unseen, that something has come). Hence the rule: before a wait, every socket that was used is asked
once more. The busy ones are asked in each turn; the others if something else than busy sockets was handled.
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
"""While busy sockets have input all the time: how often the others, and the timers, get their turn."""


class Reactor:
    """Calls handlers, one after the other, on one thread. An exception of a handler is not caught."""

    def __init__(self) -> None:
        self.timers = Timers()
        self._epoll = select.epoll()
        self._busy: list[tuple[AnySocket, Handler, Condition]] = []
        self._others: list[tuple[AnySocket, Handler, Condition]] = []
        self._descriptors: dict[int, Handler] = {}
        """Of what is called when its descriptor tells of something: busy sockets, and what is none of ZeroMQ's."""
        self._busy_descriptors: set[int] = set()
        self._poll_all = True
        self._look_at = 0.0

    def watch(self, source: Any, handler: Handler, *, busy: bool = False, waiting: Condition = lambda: False) -> None:
        """Call ``handler`` whenever a socket, or anything with a descriptor, is readable (level-triggered).

        busy  (ZeroMQ's only) asked in each turn; its handler may be called when there is nothing. Of sockets that are
              not, whoever uses one elsewhere than in a handler of its own or a timer calls ``look`` afterwards
        waiting  (ZeroMQ's only) whether the handler still has something to do, though the socket may have no input
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
        """Ask all sockets before the next wait: one that is not busy was used, and may have something to read."""
        self._poll_all = True

    def every(self, interval_s: float, callback: Callable[[], None]) -> None:
        """Call again and again, ``interval_s`` after the last call has returned."""

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
        for descriptor, _ in self._epoll.poll(wait):
            # Of a busy socket not asked first: a token that comes alone is on its way the sooner.
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
        for socket, handler, waiting in sockets:
            if has_input(socket) or waiting():
                handler()
                after()
                handled = True
        return handled
