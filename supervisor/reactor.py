"""The bare loop: descriptors and ZeroMQ sockets that become readable, and timers. Decides nothing.

zmq_poll asks every socket it is given, twice, by a system call each: with all of the supervisor's that takes longer
than to forward a token. So the few that are busy are asked in each turn, and the others only when one of their
descriptors is readable, or may have missed it. (A socket's descriptor is edge-triggered: it tells of what came since
the socket was last used, for whatever purpose.)
"""

import select
import time
from collections.abc import Callable
from typing import Any

import zmq

from supervisor.timers import Timers


class Reactor:
    """Calls handlers, one after the other, on one thread. An exception of a handler is not caught."""

    def __init__(self) -> None:
        self.timers = Timers()
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], object]] = {}
        self._others = select.epoll()
        self._busy: list[tuple[Any, int]] = [(self._others.fileno(), zmq.POLLIN)]
        self._look = True

    def watch(self, source: Any, handler: Callable[[], object], *, busy: bool = False) -> None:
        """Call ``handler`` whenever a socket, or anything with a descriptor, is readable (level-triggered).

        busy  asked in each turn. Of sockets that are not, whoever uses one elsewhere than in a handler of its own or a
              timer calls ``look`` afterwards
        """
        # zmq.Poller gives sockets back as they are, and everything else as its descriptor
        key = source if isinstance(source, (zmq.Socket, int)) else source.fileno()
        self._handlers[key] = handler
        self._poller.register(source, zmq.POLLIN)
        if busy:
            self._busy.append((source, zmq.POLLIN))
        else:
            self._others.register(int(source.get(zmq.FD)) if isinstance(source, zmq.Socket) else key, select.EPOLLIN)

    def look(self) -> None:
        """Ask all sources in the next turn: one that is not busy was used, and may have something to read."""
        self._look = True

    def unwatch(self, descriptor: int) -> None:
        self._handlers.pop(descriptor, None)
        self._others.unregister(descriptor)
        self._poller.unregister(descriptor)

    def every(self, interval_s: float, callback: Callable[[], None]) -> None:
        """Call again and again, ``interval_s`` after the last call has returned."""

        def run() -> None:
            callback()
            self.timers.at(time.monotonic() + interval_s, run)

        self.timers.at(time.monotonic() + interval_s, run)

    def turn(self) -> None:
        """Wait for the next thing to do, and do all that is due."""
        wait = self.timers.wait_s(time.monotonic())
        for ready, _ in self._ready(-1 if wait is None else int(wait * 1000) + 1):
            handler = self._handlers.get(ready)
            if handler is not None:  # an earlier handler of this turn may have ended it
                handler()
        for timer in self.timers.due(time.monotonic()):
            self._look = True
            if not timer.cancelled:
                timer.callback()

    def _ready(self, wait_ms: int) -> list[tuple[Any, int]]:
        """Sources that can be read; waits for the first."""
        busy = self._busy
        if not self._look:
            ready = zmq.zmq_poll(busy, wait_ms)
            if not any(source == busy[0][0] for source, _ in ready):
                return ready
            wait_ms = 0
        ready = self._poller.poll(wait_ms)
        # their handlers are about to use them
        self._look = not all(any(source is other for other, _ in busy) for source, _ in ready)
        return ready
