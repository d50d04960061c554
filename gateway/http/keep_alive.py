"""Keep silent streams open: proxies and clients end a connection that brings nothing for a while.

Chats may also tell of the load of their model (``LoadLines``), for people whose client shows no comments.
"""

import asyncio
import re
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


OURS: Final = "modelctl: "
"""The beginning of each line that the gateway adds to the reasoning of an answer."""
_LINES: Final = re.compile(rf"(?:{re.escape(OURS)}[^\n]*\n)+")


def without_load_lines(reasoning: str) -> str:
    """Return the reasoning of an earlier answer without the lines of ``LoadLines``. The model has not written them."""
    return reasoning[found.end() :] if (found := _LINES.match(reasoning)) is not None else reasoning


class LoadLines:
    """The lines that tell a person of the load of a model. Pure.

    model  the name that the request has for it

    There is a line for each part of the load, and for each tenth of it that is done.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._told: tuple[str, int] | None = None

    def next(self, progress: Progress | None) -> str:
        """Return the line about a new state; "" if the last line says enough, or if the request waits for no load."""
        if progress is None:
            return ""
        tenth = -1
        if progress.phase == "loading":
            part = "" if progress.part in (None, "loading") else f": {progress.part}"
            text = f"loading {self._model}{part}"
            if progress.total:
                done = 100 * (progress.done or 0) // progress.total
                text, tenth = f"{text}{' ' if part else ': '}{done}%", done // 10
            state = (part or "loading", tenth)
        elif progress.phase == "queued" and progress.waits_for:
            text = f"{self._model} waits for {progress.waits_for}"
            state = (text, tenth)
        else:
            return ""
        if state == self._told:
            return ""
        self._told = state
        return f"{OURS}{text}\n"


@dataclass(eq=False)
class OpenStream:
    """A stream that is not finished.

    events    where to send to
    silent    returns what to send when the stream was silent for too long
    news      returns what to send at once; b"" for nothing. What it has returned, it does not return again. None for a
              stream without news
    """

    events: EventStream
    silent: Callable[[], bytes]
    news: Callable[[], bytes] | None


@dataclass
class KeepAlive:
    """All open streams of this process. One task looks at them once a second, so that a token costs nothing more.

    after_s  seconds of silence after which something is sent; 0 for streams that have nothing but their news
    """

    after_s: float
    streams: set[OpenStream] = field(default_factory=set)
    _sends: set[asyncio.Task[None]] = field(default_factory=set)

    @contextmanager
    def keeping(
        self, events: EventStream, silent: Callable[[], bytes], news: Callable[[], bytes] | None = None
    ) -> Iterator[None]:
        """Keep a stream open while the block runs. ``silent`` and ``news`` are as in OpenStream."""
        stream = OpenStream(events, silent, news)
        self.streams.add(stream)
        try:
            yield
        finally:
            self.streams.discard(stream)

    async def run(self) -> None:
        """Look at the streams until cancelled."""
        while True:
            await asyncio.sleep(min(CHECK_S, self.after_s or CHECK_S))
            for stream in self.streams:
                data = stream.news() if stream.news is not None and stream.events.is_silent(0) else b""
                if not data and self.after_s and stream.events.is_silent(self.after_s):
                    data = stream.silent()
                if data:
                    send = asyncio.create_task(self._send(stream, data, stream.events.sent_at))
                    self._sends.add(send)
                    send.add_done_callback(self._sends.discard)

    async def _send(self, stream: OpenStream, data: bytes, after: float) -> None:
        # The stream may have ended, or sent something, since this task was made.
        if stream in self.streams and stream.events.is_silent(0) and stream.events.sent_at == after:
            await stream.events.send(data)
