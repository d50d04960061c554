"""Stop or kill processes from outside, for tests."""

import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import psutil


class Meddler:
    """A thread that signals processes as soon as they appear, at most ``most`` of them. A context manager.

    found  returns the processes to signal
    """

    def __init__(self, found: Callable[[], list[psutil.Process]], number: signal.Signals, most: int) -> None:
        self._found, self._number, self._most = found, number, most
        self.met: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._meddle)

    def _meddle(self) -> None:
        while not self._over.wait(0.001):
            for process in self._found():
                if process.pid not in self.met and len(self.met) < self._most:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(self._number)
                        self.met.add(process.pid)

    def __enter__(self) -> "Meddler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
