"""Note when clients send faster than the supervisor takes messages in. New connections wait during that time. Pure."""

FLOOD_S = 2.0
"""The most seconds that new connections wait during a flood and after it."""


class Flood:
    """The state of a flood at one port. It is true while a flood goes on."""

    def __init__(self) -> None:
        self._at: float | None = None
        """Monotonic time at which the flood began or went on, or newcomers were last let in. None without a flood."""

    def __bool__(self) -> bool:
        return self._at is not None

    def begin(self, now: float) -> None:
        """Note that the process has grown by too much while messages wait in libzmq."""
        if self._at is None:
            self._at = now

    def go_on(self, now: float) -> None:
        """Note that a connection is ended for a flood. The supervisor has still to drop what the client has sent."""
        self._at = now

    def end(self) -> None:
        """Note that everything that was sent has been taken in."""
        self._at = None

    def lets_newcomers_in(self, now: float) -> bool:
        """Return whether handshakes may be finished now.

        After a flood new connections wait until the supervisor has taken in everything that was sent. But every
        FLOOD_S all waiting connections are let in, because libzmq gives a handshake 3 s.
        """
        if self._at is None:
            return True
        if now - self._at < FLOOD_S:
            return False
        self._at = now
        return True
