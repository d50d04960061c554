"""The interface between the launcher of workers on other machines and what starts their agents there."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class AgentEnd:
    """An agent that has ended, or was never started.

    number  the number that it was started with
    why     one line for people; "" if it left by itself
    """

    number: int
    why: str


class AgentStarter(Protocol):
    """Starts agents on the machines of a cluster. No method blocks."""

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when ``ended`` has something to return."""

    def choose(
        self, wanted: str, gpus: int, beside: Mapping[str, int] | None = None, without: Collection[str] = ()
    ) -> str:
        """Return the name of a machine for a worker, see ``choice.choose``. Raises NoMachineError."""

    def start(self, number: int, node: str, gpus: int, engine: str, order: bytes) -> None:
        """Start an agent with a lease of ``gpus`` GPUs, and give it the order. Each start ends in exactly one AgentEnd.
        ``engine`` is the worker's.

        Raises NoMachineError if no agent can be started there now.
        """

    def end(self, number: int) -> None:
        """End an agent, and with it its worker. Do nothing if it has ended."""

    def ended(self) -> list[AgentEnd]:
        """Return the agents that have ended since the last call."""

    def close(self) -> None:
        """End all agents."""
