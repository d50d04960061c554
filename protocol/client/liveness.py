"""Decide when a client tries again to connect, and when it gives a silent supervisor up. Pure: ``now`` is an argument.

libzmq's heartbeats notice a supervisor that is stopped (SIGSTOP) or whose machine is gone. A thread of libzmq answers
them. So heartbeats do not notice a supervisor whose loop hangs. Only PING does, because the loop answers it.
"""

from enum import Enum
from typing import Final

DEFAULT_SILENCE_S: Final = 15.0
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0
"""Each pause between tries to connect is twice the pause before, up to this one. A random part, at most half, is taken
off each pause."""


class PeerState(Enum):
    ALIVE = "alive"
    ASK = "ask"
    """The client has heard nothing for long: send PING."""
    LOST = "lost"
    """The supervisor did not answer PING in time."""


class Liveness:
    """The rule for a silent supervisor: send PING after a third of ``silence``, and give up after all of ``silence``.

    silence  seconds
    step     seconds. Call ``check`` this often while the client waits for something
    """

    def __init__(self, silence: float, now: float) -> None:
        self.silence = silence
        self.step = min(1.0, silence / 10)
        self._heard = self._looked = now
        self._asked: float | None = None

    def heard(self, now: float) -> None:
        """Note that a message came, of any kind."""
        self._heard, self._asked = now, None

    def check(self, now: float, *, waiting: bool) -> PeerState:
        """Return the state of the supervisor.

        waiting  True if the client waits for a message. Otherwise silence means nothing
        """
        away, self._looked = now - self._looked > 3 * self.step, now
        if away or not waiting:
            # The client did not look for a while: the program did something else, or was stopped itself. Messages that
            # came meanwhile may not have been read yet. So the time begins anew.
            self.heard(now)
            return PeerState.ALIVE
        if self._asked is None:
            if now - self._heard < self.silence / 3:
                return PeerState.ALIVE
            self._asked = now
            return PeerState.ASK
        return PeerState.LOST if now - self._asked >= self.silence * 2 / 3 else PeerState.ALIVE


class Redial:
    """The tries to connect.

    patience    seconds until WELCOME must have come
    always      whether to try again after every failure, until the patience is over
    at          when the next try is due
    give_up_at  when the patience is over
    failure     why the last try failed
    rejected    whether the supervisor, or the kernel, refused that try
    """

    def __init__(self, patience: float, always: bool, now: float) -> None:
        self.patience, self.always = patience, always
        self.at = now
        self.give_up_at = now + patience
        self.failure: str | None = None
        self.rejected = False
        self._tries = 0

    def begin(self) -> None:
        """Note that a try begins."""
        self._tries += 1

    def again(self, failure: str, rejected: bool, now: float, jitter: float) -> None:
        """Plan the next try after one that failed. ``jitter`` is a factor of the pause, 0.5 to 1."""
        self.failure, self.rejected = failure, rejected
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._tries - 1))
        self.at = now + pause * jitter

    def why_given_up(self, endpoint: str, *, local: bool, taken: bool) -> tuple[str, bool]:
        """Return (the reason why no connection was made, whether a refusal is that reason).

        local  whether the endpoint is on this machine (ipc)
        taken  whether somebody took the connection of the last try
        """
        # The last try may have begun just now. Unless somebody took that connection, the try before tells more.
        if self.failure is not None and not taken:
            return self.failure, self.rejected
        if taken or local:
            return f"the supervisor at {endpoint} did not answer within {self.patience:.3g} s", False
        nobody = f"nobody took the connection to {endpoint} within {self.patience:.3g} s"
        return f"{nobody}: the address or its name is wrong, or a firewall is between", False
