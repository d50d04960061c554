"""Whether the other end still answers, judged by what it says and how it answers PING. Pure: ``now`` is an argument.

libzmq's heartbeats notice a supervisor that is stopped (SIGSTOP) or whose machine is gone. They are answered by a
thread of libzmq's own, so a supervisor whose loop hangs has a perfect pulse: only PING, which the loop answers, tells.
"""

from enum import Enum
from typing import Final

DEFAULT_SILENCE_S: Final = 15.0


class PeerState(Enum):
    ALIVE = "alive"
    ASK = "ask"
    """Nothing was heard for long: send PING."""
    LOST = "lost"
    """PING was not answered in time."""


class Liveness:
    """Asks after a third of ``silence``, gives up after all of it.

    silence  seconds
    step     seconds; ``check`` wants to be called this often while something is awaited
    """

    def __init__(self, silence: float, now: float) -> None:
        self.silence = silence
        self.step = min(1.0, silence / 10)
        self._heard = self._looked = now
        self._asked: float | None = None

    def heard(self, now: float) -> None:
        """Something came, whatever it was."""
        self._heard, self._asked = now, None

    def check(self, now: float, *, waiting: bool) -> PeerState:
        """waiting  whether anything is awaited; if not, silence is no sign of anything."""
        away, self._looked = now - self._looked > 3 * self.step, now
        if away or not waiting:
            # Nobody looked for a while (the program did something else, or was stopped itself), so what came meanwhile
            # may not have reached us yet: the time begins anew.
            self.heard(now)
            return PeerState.ALIVE
        if self._asked is None:
            if now - self._heard < self.silence / 3:
                return PeerState.ALIVE
            self._asked = now
            return PeerState.ASK
        return PeerState.LOST if now - self._asked >= self.silence * 2 / 3 else PeerState.ALIVE
