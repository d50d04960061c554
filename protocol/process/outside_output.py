"""Write to a standard stream that another program reads, and never wait for that program.

A reader may stop: Ctrl-S in the terminal, ``| less`` with a full pipe, a log collector that hangs. A write(2) to its
descriptor then sleeps, and with it the loop of the process. O_NONBLOCK is no remedy, because the shell and other
programs share the descriptor's flags. So a thread writes, and only the thread waits.
"""

import errno
import io
import os
import select
import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

MOST_WAITING: Final = 1000
"""Texts that wait for the reader. Each is a line, or a traceback. Further texts are lost."""
LEAVE_S: Final = 1.0
"""Seconds that a process that ends waits until the reader has taken the last texts."""
_NAMES: Final = {1: "standard output", 2: "standard error"}


class OutsideOutput(io.RawIOBase):
    """A descriptor that belongs to others, too. ``write`` takes a whole text and returns at once.

    Texts that find no room, or cannot be written, are lost and counted. When the reader goes on, a line says how many
    are missing.

    lost_line  returns this line, from the number of lost texts and the reason
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.lost_line: Callable[[int, str], str] = "modelctl: lines lost here: {} ({})".format
        self._descriptor = descriptor
        # SimpleQueue has no lock that a signal handler could find taken by the code that it interrupts.
        self._waiting: SimpleQueue[tuple[bytes, int] | threading.Event] = SimpleQueue()
        self._busy = False
        self._thread: threading.Thread | None = None
        # The caller of ``write`` alone changes _refused, the thread alone changes the others.
        self._refused = self._failed = self._told = 0
        self._failure: OSError | None = None

    @property
    def trouble(self) -> str | None:
        """Return why texts are lost, and how many. None if none are, or if the reader has left: nobody misses them."""
        if not self._lost or (self._failure is not None and self._failure.errno in (errno.EPIPE, errno.EIO)):
            return None
        what = "is not read" if self._failure is None else f"cannot be written: {self._why}"
        return f"{_NAMES[self._descriptor]} {what}; lines lost: {self._lost}"

    @property
    def is_behind(self) -> bool:
        """Return whether the reader has not taken everything yet."""
        return self._busy or not self._waiting.empty()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        text = bytes(data)
        if self._waiting.qsize() >= MOST_WAITING or not self._has_thread():
            self._refused += 1
        else:
            self._waiting.put((text, self._refused))
        return len(text)

    def drain(self) -> None:
        """Wait until the reader has taken everything, but for ``LEAVE_S`` at most."""
        if self.is_behind:
            over = threading.Event()
            self._waiting.put(over)
            over.wait(LEAVE_S)

    @property
    def _lost(self) -> int:
        return self._refused + self._failed - self._told

    @property
    def _why(self) -> str:
        return "nobody reads it" if self._failure is None else self._failure.strerror or str(self._failure)

    def _has_thread(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._work, daemon=True, name=_NAMES[self._descriptor])
            try:
                thread.start()
            except RuntimeError:  # the user has too many processes; the next text tries again
                return False
            self._thread = thread
        return True

    def _work(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the main thread
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._busy = True
            text, refused = item
            self._put(text, refused + self._failed - self._told)
            if self._failure is None and self._waiting.empty() and self._lost:
                self._put(b"", self._lost)
            self._busy = False

    def _put(self, text: bytes, missing: int) -> None:
        """Write a text, behind a line that says how many are missing before it. Wait for the reader."""
        if missing:
            text = f"{self.lost_line(missing, self._why)}\n".encode(errors="backslashreplace") + text
        try:
            while text:
                try:
                    text = text[os.write(self._descriptor, text) :]
                except BlockingIOError:  # another program has set O_NONBLOCK
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLOUT)
                    poll.poll()
        except OSError as e:
            self._failure = e
            self._failed += 1
        else:
            self._failure = None
            self._told += missing
