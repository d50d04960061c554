"""Run ``modelctl`` in a terminal of its own. SIGUSR1 closes the terminal."""

import os
import pty
import signal
import sys

from modelctl.cli.root import run


def main() -> int:
    child, terminal = pty.fork()
    if child == 0:
        # The former ones remember that they were files, in which one may seek.
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        return run()
    signal.signal(signal.SIGUSR1, lambda *_: os.close(terminal))
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:
        pass  # the terminal is closed, or the child has ended
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":  # workers import this file again as their __mp_main__
    sys.exit(main())
