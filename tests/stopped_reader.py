"""The reader of a program's standard output and error, which can stop: a terminal, a pipe, or a log collector's
socket."""

import fcntl
import os
import pty
import select
import socket
import termios
import threading
from select import PIPE_BUF
from types import TracebackType
from typing import Any, Self

from tests.serving import wait_until

KINDS = ("terminal", "pipe", "socket")
CTRL_S, CTRL_Q = b"\x13", b"\x11"
FILLER = b"~"
KEPT = 1 << 20


class StoppableReader:
    """Reads what is written to ``descriptor`` until ``stop``, and again from ``go_on`` on. A context manager.

    descriptor  for the program whose output is read; its flags must stay as they are
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._end: socket.socket | int
        if kind == "terminal":
            self._end, self.descriptor = pty.openpty()
        elif kind == "pipe":
            self._end, self.descriptor = os.pipe()
            fcntl.fcntl(self.descriptor, fcntl.F_SETPIPE_SZ, PIPE_BUF)  # soon full
        else:
            self._end, given = socket.socketpair()
            self.descriptor = given.detach()
        self._flags = self._look_at_flags()
        self._text = bytearray()
        self._reads = threading.Event()
        self._reads.set()
        self._idle = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        """Return what was read so far: the last ``KEPT`` bytes."""
        return bytes(self._text).replace(FILLER, b"").decode(errors="replace")

    def stop(self) -> None:
        """Read nothing more, and see to it that a write would wait."""
        self._reads.clear()
        wait_until(self._idle.is_set, what="the reader's pause")
        if self._kind == "terminal":
            assert isinstance(self._end, int)
            os.write(self._end, CTRL_S)
        elif self._kind == "pipe":
            # a descriptor of its own: O_NONBLOCK does not reach the program
            fd = os.open(f"/proc/self/fd/{self.descriptor}", os.O_WRONLY | os.O_NONBLOCK)
            self._fill(lambda: os.write(fd, FILLER))
            os.close(fd)
        else:
            with socket.socket(fileno=os.dup(self.descriptor)) as given:
                self._fill(lambda: given.send(FILLER, socket.MSG_DONTWAIT))
        poll = select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        wait_until(lambda: not poll.poll(0), what="an output without room")

    def go_on(self) -> None:
        """Read again. Do nothing if the reader has not stopped."""
        if not self._reads.is_set():
            if self._kind == "terminal":
                assert isinstance(self._end, int)
                os.write(self._end, CTRL_Q)
            self._idle.clear()
            self._reads.set()

    def leave(self) -> None:
        """Stop reading for good, as ``| head`` does. For a pipe."""
        self._over = True
        self._thread.join()
        assert isinstance(self._end, int)
        os.close(self._end)
        self._end = -1

    def check_flags(self) -> None:
        """Check that the flags and the settings of the terminal are as they were at the beginning."""
        assert self._look_at_flags() == self._flags

    def _look_at_flags(self) -> tuple[Any, ...]:
        settings = termios.tcgetattr(self.descriptor) if self._kind == "terminal" else None
        return fcntl.fcntl(self.descriptor, fcntl.F_GETFL), settings

    @staticmethod
    def _fill(write: Any) -> None:
        try:
            while True:
                write()
        except BlockingIOError:
            pass

    def _read(self) -> None:
        number = self._end if isinstance(self._end, int) else self._end.fileno()
        poll = select.poll()
        poll.register(number, select.POLLIN)
        while not self._over:
            if not self._reads.is_set():
                self._idle.set()
                self._reads.wait(0.01)
            elif poll.poll(10):
                try:
                    self._text += os.read(number, 65536).replace(b"\r", b"")
                    del self._text[:-KEPT]
                except OSError:  # the terminal's other side is closed
                    return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._over = True
        self._reads.set()
        self._thread.join()
        os.close(self.descriptor)
        if isinstance(self._end, socket.socket):
            self._end.close()
        elif self._end >= 0:
            os.close(self._end)
