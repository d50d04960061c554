"""The bare loop: descriptors and ZeroMQ sockets that become readable, and timers. Decides nothing."""

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

    def watch(self, source: Any, handler: Callable[[], object]) -> None:
        """Call ``handler`` whenever a socket, or anything with a descriptor, is readable (level-triggered)."""
        # zmq.Poller gives sockets back as they are, and everything else as its descriptor
        key = source if isinstance(source, (zmq.Socket, int)) else source.fileno()
        self._handlers[key] = handler
        self._poller.register(source, zmq.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        self._handlers.pop(descriptor, None)
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
        for ready, _ in self._poller.poll(None if wait is None else int(wait * 1000) + 1):
            handler = self._handlers.get(ready)
            if handler is not None:  # an earlier handler of this turn may have ended it
                handler()
        for timer in self.timers.due(time.monotonic()):
            if not timer.cancelled:
                timer.callback()
