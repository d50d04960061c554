"""A connection that belongs to an asyncio event loop."""

import asyncio
import os
import threading
from collections.abc import Collection
from typing import Any

from protocol.client.answers import Touched
from protocol.client.connection import Connection
from protocol.client.transport import Transport

_WELCOME = 0
"""The key under which a task waits for the greeting. The numbers of requests and calls begin at 1."""


class LoopConnection(Connection):
    """A connection for one event loop. Only code of the loop may use it, and code of its thread while no loop runs.

    The thread may call ``close`` in any loop. Any thread may call ``abandon``.
    """

    def __init__(self, endpoint: str | None, **more: Any) -> None:
        super().__init__(endpoint, **more)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._descriptors: tuple[int, ...] = ()
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        """When the timer calls, by the loop's clock. uvloop's handle does not know that if the time is now."""
        self._settling = False

    def check(self) -> None:
        self._check_thread()
        try:
            other = asyncio.get_running_loop() is not self._loop
        except RuntimeError:  # called between two runs of a loop, or after the last
            other = self._loop.is_closed()
        if other:
            # A request of another loop would be sent, and its events would wake nobody.
            raise RuntimeError(
                f"this client belongs to another event loop{', which is closed' if self._loop.is_closed() else ''}: "
                "make an AsyncClient in each event loop (each asyncio.run has its own), or use Client, which needs none"
            )

    def _check_thread(self) -> None:
        self.check_process()
        if (here := threading.current_thread()) is not self._thread:
            raise RuntimeError(
                f"this client belongs to thread {self._thread.name!r} and was used in {here.name!r}: "
                "make an AsyncClient in each event loop, or use Client, which threads may share"
            )

    async def wait_change(self) -> None:
        """Wait until anything happens."""
        await self._wait((_WELCOME,), None)

    async def wait(self, states: Collection[Touched], timeout: float | None) -> None:
        """Wait until something happens to one of these requests or calls.

        Raises TimeoutError after ``timeout`` seconds, and RuntimeError if another task waits for one of them.
        """
        await self._wait([state.id for state in states], timeout)

    def pump(self) -> None:
        super().pump()
        due = self.due()
        if due is None:
            return
        at = self._loop.time() + due
        if self._timer is not None and self._timer_at > at + 0.001:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer, self._timer_at = self._loop.call_at(at, self._on_time), at

    def close(self) -> None:
        if not self.closed:
            self._check_thread()  # any loop of the thread may close the client, because the client's own may have ended
        super().close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self, keys: Collection[int], timeout: float | None) -> None:
        if any(key in self._waiters for key in keys):
            raise RuntimeError("another task is reading this stream: one task at a time")
        future = self._loop.create_future()
        for key in keys:
            self._waiters[key] = future
        try:
            if timeout is None:
                await future
            else:
                async with asyncio.timeout(timeout):
                    await future
        finally:
            for key in keys:
                del self._waiters[key]

    def _on_time(self) -> None:
        self._timer = None
        self.pump()

    def _watch(self, transport: Transport) -> None:
        self._descriptors = transport.descriptors
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self.pump)

    def _unwatch(self) -> None:
        # Before the descriptors are closed: the next socket may get their numbers.
        if not self._loop.is_closed():
            for descriptor in self._descriptors:
                self._loop.remove_reader(descriptor)
        self._descriptors = ()

    def _changed(self, touched: list[Touched]) -> None:
        for key in (_WELCOME, *(state.id for state in touched)):
            future = self._waiters.get(key)
            if future is not None and not future.done():
                future.set_result(None)

    def _settle(self) -> None:
        """Make the loop carry out the noted actions at its next turn. Finalizers call this, in any thread."""
        if self._noted and not (self._settling or self.closed) and os.getpid() == self._pid:
            self._settling = True
            try:
                self._loop.call_soon_threadsafe(self._settle_now)
            except RuntimeError:  # the loop is closed, and the connection is not used any more
                pass

    def _settle_now(self) -> None:
        self._settling = False
        self.pump()
