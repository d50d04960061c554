"""Remember that clients send faster than their messages can be taken in, and let newcomers wait for that time. Pure."""

FLOOD_S = 2.0
"""How long new connections wait at most during a flood and after it."""


class Flood:
    """Whether a flood goes on at one port."""

    def __init__(self) -> None:
        self._at: float | None = None
        """When the flood was noticed last, or newcomers were let in since. None while there is no flood."""

    def __bool__(self) -> bool:
        return self._at is not None

    def begin(self, now: float) -> None:
        """Note that the process has grown by too much while messages wait in libzmq."""
        if self._at is None:
            self._at = now

    def go_on(self, now: float) -> None:
        """Note that a connection is ended for a flood, so the rest of what it has sent is still to be dropped."""
        self._at = now

    def end(self) -> None:
        """Note that everything that was sent has been taken in."""
        self._at = None

    def lets_newcomers_in(self, now: float) -> bool:
        """Return whether handshakes may be finished now.

        After a flood new connections wait until everything that was sent has been taken in. All that wait are let in
        every FLOOD_S, because libzmq gives a handshake 3 s.
        """
        if self._at is None:
            return True
        if now - self._at < FLOOD_S:
            return False
        self._at = now
        return True
