"""Decide when something that has failed is tried again: the start of a process, or to listen on an address. Pure."""

import errno
import os
from typing import Final

RESTART_S, RESTART_MAX_S = 5.0, 300.0
"""Least and greatest pause in seconds between two starts of a process. The pause doubles with each start that follows
closely on the last, for example because the process that asks the GPU driver ends whenever it opens the driver."""
RETRY_S, RETRY_MAX_S = 0.5, 30.0
"""Least and greatest pause between two attempts to listen, in seconds."""
_PASSING: Final = {
    errno.EADDRNOTAVAIL: "bring the address up on this machine, or give another one",
    errno.EADDRINUSE: "end the program that has the port (`ss -ltnp` shows it), or give another port",
    errno.ENETDOWN: "bring the network up",
    errno.EMFILE: "raise the limit of open files",
    errno.ENFILE: "raise the machine's limit of open files",
    errno.ENOBUFS: "free memory of the machine",
    errno.ENOMEM: "free memory of the machine",
}
"""The errors that may pass without a change of models.yaml, each with its remedy."""


class Restarts:
    """Decides when a process that may end again and again is started again. The first start is at once.

    first_s  least seconds between two starts
    most_s   greatest pause in seconds; the pause doubles each time while the process ends again soon
    """

    def __init__(self, first_s: float = RESTART_S, most_s: float = RESTART_MAX_S) -> None:
        self._last: float | None = None
        self._first_s, self._most_s = first_s, most_s
        self._pause_s = first_s

    def next(self, now: float) -> bool:
        """Return whether to start the process now."""
        since = None if self._last is None else now - self._last
        if since is not None and since < self._pause_s:
            return False
        follows = since is not None and since < 2 * self._pause_s
        self._pause_s = min(2 * self._pause_s, self._most_s) if follows else self._first_s
        self._last = now
        return True

    def forget(self) -> None:
        """Have the next start be at once."""
        self._last, self._pause_s = None, self._first_s


class ListenError(Exception):
    """The port can never be opened. The message is one line that says why, and what to do."""


class ListenAttempts:
    """The attempts to listen on one address.

    When a machine starts, an address from DHCP or of a VPN may come minutes after the supervisor. Another program may
    have the port for a while. So ports over TCP, such as ``gateway.listen`` and ``supervisor.listen``, wait for their
    address here.

    address  as people read it
    key      the key of models.yaml that has the address
    problem  why nothing listens there, with the number of attempts; None while it is not known that nothing does
    may_pass  whether the last error may pass without a change of models.yaml
    """

    def __init__(self, address: str, key: str) -> None:
        self.address, self._key = address, key
        self._restarts = Restarts(RETRY_S, RETRY_MAX_S)
        self._reason: str | None = None
        self._remedy = ""
        self._tries = 0
        self.may_pass = True

    def due(self, now: float) -> bool:
        """Return whether to try now. The first attempt is due at once. ``now`` is in monotonic seconds."""
        return self._restarts.next(now)

    def failed(self, error: int) -> str | None:
        """Note that an attempt failed with this errno. Return a line for the log; None if it would say nothing new."""
        self._tries += 1
        before, self._reason = self._reason, os.strerror(error)
        self.may_pass = error in _PASSING
        self._remedy = _PASSING.get(error, "give another port, or an address of this machine")
        if self._reason == before:
            return None
        return f"{self._says()}; it is tried again, at last each {RETRY_MAX_S:.0f} s: {self._remedy}"

    def succeeded(self) -> None:
        """Note that an attempt succeeded."""
        self._reason = None

    @property
    def problem(self) -> str | None:
        if self._reason is None:
            return None
        return f"{self._says()}, tried {self._tries} time{'s' * (self._tries != 1)}; {self._remedy}"

    def _says(self) -> str:
        return f"cannot listen on {self.address} ({self._key}): {self._reason}"
