"""A limit on how often each key may connect over TCP. Pure: times are arguments.

Every connection that completes its handshake gets libzmq's next routing number. A peer that guesses a number before it
is given out makes libzmq abort the process (see ``supervisor.ports.tcp_listener``). So handshakes are limited. Each key
has a budget of its own, so a key that connects again and again does not keep other keys out.
"""

from typing import Final

AT_ONCE: Final = 256
"""Handshakes of one key that may come together: as many as the key may have connections."""
PER_S: Final = 20.0
"""Further handshakes of one key per second."""


class Handshakes:
    """The budget of each public key. ``refused`` counts the handshakes that exceeded a budget."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}
        """(handshakes left, at this time) by public key."""
        self.refused = 0

    def admit(self, public_key: str, now: float) -> bool:
        """Return whether this key may connect now. If so, take one handshake from its budget."""
        left, at = self._left.get(public_key, (float(AT_ONCE), now))
        left = min(float(AT_ONCE), left + (now - at) * PER_S)
        enough = left >= 1
        self._left[public_key] = left - enough, now
        self.refused += not enough
        return enough

    def forget(self, public_key: str) -> None:
        """Forget a key that is no longer on the list."""
        self._left.pop(public_key, None)
