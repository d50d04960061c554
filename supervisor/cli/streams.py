"""Handle bad standard streams: replace closed streams when a command begins, and drop unwritable output at its end."""

import os
import sys


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
