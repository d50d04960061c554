"""Prepare the standard streams when a command begins: replace closed ones, and let no text steer a terminal. At its end
drop output that cannot be written."""

import os
import sys

from protocol.process.terminal_text import TerminalStream


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


def guard_terminals() -> None:
    """Let no text that a command prints on a terminal steer it. ``take_text`` and ``terminal_text.steer`` know more."""
    if sys.stdout.isatty():
        sys.stdout = TerminalStream(sys.stdout)
    if sys.stderr.isatty():
        sys.stderr = TerminalStream(sys.stderr)
        sys.stderr.painted = False


def take_text(*, raw: bool) -> None:
    """Let standard output take texts of models or logs from now on. They get no colours, either.

    raw  let them steer the terminal, because the user wants every character
    """
    if isinstance(sys.stdout, TerminalStream):
        sys.stdout.painted, sys.stdout.raw = False, raw


def name_output(error: BaseException) -> None:
    """Give an error of standard output its name. Python does not: the message would be "No space left on device"."""
    if isinstance(error, OSError) and error.filename is None:
        try:
            sys.stdout.flush()  # fails again, because what could not be written is still in the buffer
        except OSError as e:
            if e.errno == error.errno:
                error.filename = "standard output"


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
