"""The socket between a process and a helper process beside it, and the main loop of a helper.

The socket is a SEQPACKET pair, and the helper's standard input. Either side sends records: bytes, mostly a msgpack map.
A record may be longer than the socket takes at once, so it travels in pieces. The first byte of a piece says whether
more of the record follows. The helper's end blocks. The other end does not, and keeps what the socket has no room for.
"""

import math
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from protocol.process.birth import die_with, set_title

PIECE: Final = 32 << 10
"""Bytes of a piece. A socket of the kernel's default size has room for some of them."""
MOST: Final = 64 << 20
"""Most bytes of a record that an end takes, unless it says otherwise."""
_MORE, _LAST = b"+", b"."
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals of a terminal and of an operator. Helpers ignore them: the process that started a helper ends it."""


class HelperLink:
    """One end of the socket.

    descriptor  of the socket; -1 when it is closed
    unsent      bytes that wait for room in the socket. A blocking end has none
    most        most bytes of a record that is received
    on_waiting  called when bytes begin to wait for room (True), and when none wait any more (False)
    """

    def __init__(self, descriptor: int, most: int = MOST) -> None:
        self.descriptor = descriptor
        self.unsent = 0
        self.on_waiting: Callable[[bool], object] | None = None
        self._most = most
        self._pieces: deque[bytes] = deque()
        self._received = bytearray()
        self._waiting = self._leaving = False

    def send(self, record: bytes) -> None:
        """Send a record, or what there is room for; ``flush`` sends the rest. Do nothing if the other end is closed."""
        for at in range(0, max(1, len(record)), PIECE):
            self._pieces.append((_MORE if at + PIECE < len(record) else _LAST) + record[at : at + PIECE])
            self.unsent += len(self._pieces[-1])
        if not self._waiting:
            self.flush()

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        while self._pieces:
            try:
                os.write(self.descriptor, self._pieces[0])
            except BlockingIOError:
                break
            except OSError:  # the other end is closed, or this one: ``receive`` tells that
                self._pieces.clear()
                self.unsent = 0
            else:
                self.unsent -= len(self._pieces.popleft())
        if bool(self._pieces) != self._waiting:
            self._waiting = not self._waiting
            if self.on_waiting is not None:
                self.on_waiting(self._waiting)
        if self._leaving and not self._pieces:
            self.close()

    def receive(self, within_s: float | None = 0.0) -> bytes | None:
        """Return the next record. Return None if none comes in time, or if this end is closed.

        within_s  seconds to wait, in which what is unsent is sent, too; None to wait for ever

        Raises EOFError when the other end is closed and everything was read, and ValueError for a record that is too
        long, or no record.
        """
        deadline = math.inf if within_s is None else time.monotonic() + within_s
        while ready := self._poll(select.POLLIN, deadline):
            if ready & select.POLLOUT:
                self.flush()
            if not ready & ~select.POLLOUT:
                continue
            try:
                piece = os.read(self.descriptor, PIECE + 2)
            except BlockingIOError:
                continue
            except ConnectionResetError:  # the other end was closed with a record unread. What it sent can be read
                continue
            if not piece:
                raise EOFError("it has ended")
            if piece[:1] not in (_MORE, _LAST) or len(piece) > PIECE + 1:
                raise ValueError("it is no record")
            self._received += piece[1:]
            if len(self._received) > self._most:
                raise ValueError(f"it is longer than {self._most} bytes")
            if piece[:1] == _LAST:
                record = bytes(self._received)
                self._received.clear()
                return record
        return None

    def leave(self) -> None:
        """Close this end when everything is sent. The other end reads that, and then the end."""
        self._leaving = True
        self.flush()

    def close(self) -> None:
        """Close this end. Closing again does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor, self.unsent, self._waiting = -1, 0, False
            self._pieces.clear()

    def _poll(self, events: int, deadline: float) -> int:
        """Wait for events, and for room if something waits for it. Return what has come; 0 if nothing has in time."""
        if self.descriptor < 0:
            return 0
        poll = select.poll()
        poll.register(self.descriptor, events | (select.POLLOUT if self._pieces else 0))
        wait_s = deadline - time.monotonic()
        ready = poll.poll(None if wait_s == math.inf else max(0, math.ceil(1000 * wait_s)))
        return ready[0][1] if ready else 0


def become_helper(
    role: str, *, ignored: Sequence[signal.Signals] = ENDING, dies: bool = True, most: int = MOST
) -> HelperLink:
    """Make this process a helper of the one that has started it, and return the link to that process.

    role     under which ps shows the helper
    ignored  signals that do nothing
    dies     whether the kernel kills the helper when the thread that has started it ends. A helper that has something
             to finish ends by itself when the link ends
    """
    if dies:
        die_with(os.getppid())  # if the parent has ended before this, the link has ended, too
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    set_title(role)
    return HelperLink(0)


def serve(link: HelperLink, take: Callable[[bytes], object], idle: Callable[[], float] = lambda: math.inf) -> None:
    """Run a helper: hand each record to ``take``, until the process that started the helper closes the link or ends.

    idle  called at once, and again after as many seconds as it has returned
    """
    due = 0.0
    try:
        while True:
            if (now := time.monotonic()) >= due:
                due = now + idle()
            wait_s = None if due == math.inf else max(0.0, due - time.monotonic())
            if (record := link.receive(wait_s)) is not None:
                take(record)
    except EOFError:
        return
