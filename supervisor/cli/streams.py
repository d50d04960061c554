"""Prepare the standard streams when a command begins, and drop output that cannot be written at its end.

Closed streams are replaced, no text steers a terminal, and errors say which stream they are of.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from protocol.process.terminal_text import harmless


def open_missing() -> None:
    """Open /dev/null in place of standard streams that the caller has closed.

    Otherwise the next socket would get the stream's number, and output would go into that socket. ``sys.stdin`` stays
    None, so that a command that needs standard input can report that it is closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


class Output(io.TextIOWrapper):
    """A standard stream whose errors have its name. Python's own say "No space left on device", and not of what."""

    def __init__(self, stream: TextIO, name: str) -> None:
        """Take the place of a stream, and go on with its buffer."""
        settings: dict[str, Any] = {key: getattr(stream, key) for key in ("line_buffering", "write_through")}
        super().__init__(stream.buffer, encoding=stream.encoding, errors=stream.errors, **settings)
        self._called = name
        self._former = stream  # it closes the buffer at its end

    def write(self, text: str) -> int:
        with self._naming():
            return super().write(text)

    def flush(self) -> None:
        with self._naming():
            super().flush()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            e.filename = self._called
            raise


class TerminalOutput(Output):
    """A standard stream that is a terminal. ``write`` makes each text harmless, and ``steer`` does not.

    painted  whether the text may have modelctl's colours
    raw      whether every text is written as it is
    """

    painted = True
    raw = False

    def write(self, text: str) -> int:
        return super().write(text if self.raw else harmless(text, painted=self.painted))

    def steer(self, sequence: str) -> None:
        """Write what the terminal shall obey."""
        super().write(sequence)


def take_streams() -> None:
    """Let no text that a command prints on a terminal steer it, and let errors of standard output say so.

    ``take_text`` and ``terminal_text.steer`` make exceptions.
    """
    sys.stdout = (TerminalOutput if sys.stdout.isatty() else Output)(sys.stdout, "standard output")
    if sys.stderr.isatty():
        sys.stderr = TerminalOutput(sys.stderr, "standard error")
        sys.stderr.painted = False


def take_text(*, raw: bool) -> None:
    """Let standard output take texts of models or logs from now on. They get no colours, either.

    raw  let them steer the terminal, because the user wants every character
    """
    if isinstance(sys.stdout, TerminalOutput):
        sys.stdout.painted, sys.stdout.raw = False, raw


def drop_unwritten() -> None:
    """Drop output that cannot be written (closed pipe, full disk), so that the interpreter does not complain at
    exit."""
    for number, stream in enumerate((sys.stdout, sys.stderr), start=1):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
