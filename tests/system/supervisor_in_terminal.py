"""``modelctl`` in a terminal of its own, which is closed at SIGUSR1."""

import os
import pty
import signal
import sys

from supervisor.cli.root import run


def main() -> int:
    child, terminal = pty.fork()
    if child == 0:
        return run()
    signal.signal(signal.SIGUSR1, lambda *_: os.close(terminal))
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:
        pass  # closed, or the child has gone
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":  # workers import this file again as their __mp_main__
    sys.exit(main())
