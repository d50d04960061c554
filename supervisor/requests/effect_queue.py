"""The queue between the classes that decide and the loop that acts. Pure.

The scheduler, the life cycle, rollouts and the keys' rights decide what has to be done, and add it here as effects.
Nothing happens at that moment. When the handler of a message, an exit or a timer has returned, the loop takes all
effects out. It carries them out in the order in which they were decided (``supervisor.effect_runner``).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from protocol.errors import WireError
from supervisor.requests.in_flight import Effect


@dataclass(frozen=True, slots=True)
class EndConnection:
    """Effect: tell a client why its connection ends, and end it. Effects that came before reach the client first."""

    channel: int
    error: WireError


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """Effect: the state of a worker has changed, so a rollout may be able to go on."""


QueuedEffect = Effect | EndConnection | WorkerChanged


class EffectQueue:
    """The effects that have yet to be carried out, in the order in which they were decided."""

    def __init__(self) -> None:
        self._effects: list[QueuedEffect] = []

    def add(self, effects: Iterable[QueuedEffect]) -> None:
        """Put effects at the end of the queue."""
        self._effects += effects

    def take(self) -> list[QueuedEffect]:
        """Take all effects out of the queue, in their order. Only the loop's EffectRunner calls this."""
        taken = self._effects
        if taken:  # this is asked at least twice for every token
            self._effects = []
        return taken
