"""Keep silent streams open: proxies and clients end a connection that brings nothing for a while."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from gateway.http.event_stream import EventStream
from protocol.client.answers import Progress

CHECK_S: Final = 1.0
"""Seconds between two checks of all open streams."""


def comment(progress: Progress | None) -> bytes:
    """Return a comment of server-sent events that says what a request waits for. No client takes it for text."""
    if progress is None:
        return b": waiting\n\n"
    if progress.phase == "queued" and progress.waits_for:
        return b": queued: waits for %s\n\n" % progress.waits_for.encode()
    if progress.phase == "queued":
        return b": queued %d\n\n" % (progress.queue_position or 0)
    if progress.total:
        return b": %s %d%%\n\n" % (progress.phase.encode(), 100 * (progress.done or 0) // progress.total)
    return b": %s\n\n" % progress.phase.encode()


@dataclass(eq=False)
class OpenStream:
    """A stream that is not finished.

    events    where to send to
    silent    returns what to send when the stream was silent for too long
    """

    events: EventStream
    silent: Callable[[], bytes]


@dataclass
class KeepAlive:
    """All open streams of this process. One task looks at them once a second, so that a token costs nothing more.

    after_s  seconds of silence after which something is sent; 0 sends nothing
    """

    after_s: float
    streams: set[OpenStream] = field(default_factory=set)
    _sends: set[asyncio.Task[None]] = field(default_factory=set)

    @contextmanager
    def keeping(self, events: EventStream, silent: Callable[[], bytes]) -> Iterator[None]:
        """Keep a stream open while the block runs. ``silent`` is as in OpenStream."""
        stream = OpenStream(events, silent)
        self.streams.add(stream)
        try:
            yield
        finally:
            self.streams.discard(stream)

    async def run(self) -> None:
        """Look at the streams until cancelled."""
        while self.after_s:
            await asyncio.sleep(min(CHECK_S, self.after_s))
            for stream in self.streams:
                if stream.events.is_silent(self.after_s):
                    send = asyncio.create_task(self._send(stream))
                    self._sends.add(send)
                    send.add_done_callback(self._sends.discard)

    async def _send(self, stream: OpenStream) -> None:
        # The stream may have ended, or sent something, since this task was made.
        if stream in self.streams and stream.events.is_silent(self.after_s):
            await stream.events.send(stream.silent())
