"""Turn signals into bytes on a socket, so that the loop decides what they mean, and not a handler."""

import errno
import os
import signal
import socket


class Signals:
    """The receiver of SIGINT, SIGTERM and SIGHUP in this process. Make one object only, on the main thread."""

    def __init__(self) -> None:
        self.receiver, self._sender = socket.socketpair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)
        self._had_terminal = _has_terminal()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            ignored = signal.getsignal(number) is signal.SIG_IGN
            if not (number == signal.SIGHUP and ignored):  # nohup: the supervisor must outlive its terminal
                signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

    def arrived(self) -> list[signal.Signals]:
        """Return the signals that have come since the last call."""
        return [signal.Signals(number) for number in self.receiver.recv(64)]

    def terminal_is_gone(self) -> bool:
        """Return whether the terminal has gone. Its end sends SIGHUP, as does an operator who wants models.yaml read
        again."""
        return self._had_terminal and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as e:
        return e.errno in (errno.EMFILE, errno.ENFILE)  # unknown, so the terminal counts as being there
    return True
