"""The standard streams at both ends of a command: closed ones replaced, unwritable ones emptied."""

import os
import sys


def open_missing() -> None:
    """Put /dev/null where the caller has closed a standard stream.

    Otherwise the next socket would get its number, and be printed into. ``sys.stdin`` stays None, so that a command
    that would read it can say so.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free: this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def drop_unwritten() -> None:
    """Let go of what cannot be written (a closed pipe, a full disk): the interpreter would complain of it at exit."""
    for number, stream in enumerate((sys.stdout, sys.stderr), start=1):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
