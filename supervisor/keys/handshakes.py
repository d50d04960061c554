"""How often each key may connect over TCP. Pure: times are handed in.

Every connection that shakes hands is given libzmq's next routing number, and a peer that guesses a number ahead of its
turn makes libzmq abort the process (see ``supervisor.ports.tcp_port``). So handshakes are limited, and each key has a
budget of its own: a key that connects again and again keeps nobody else out.
"""

from typing import Final

AT_ONCE: Final = 256
"""Handshakes of one key that may come together: as many as it may have connections."""
PER_S: Final = 20.0
"""How many more each second."""


class Handshakes:
    """What each key has left, by public key. ``refused`` counts handshakes that were too many."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}
        """(handshakes, at this time)"""
        self.refused = 0

    def admit(self, public_key: str, now: float) -> bool:
        """Whether this key may connect now. If so, that is one handshake of its budget."""
        left, at = self._left.get(public_key, (float(AT_ONCE), now))
        left = min(float(AT_ONCE), left + (now - at) * PER_S)
        enough = left >= 1
        self._left[public_key] = left - enough, now
        self.refused += not enough
        return enough

    def forget(self, public_key: str) -> None:
        """The key is on the list no more."""
        self._left.pop(public_key, None)
