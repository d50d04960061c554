"""What the supervisor knows of the machines of a cluster: those that Ray lists, and those that it has listed before.
Pure: times are arguments, in monotonic seconds."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from supervisor.cluster.driver_messages import Node

GONE_S: Final = 86_400.0
"""Seconds for which a machine that is gone is remembered."""
MOST_GONE: Final = 100
"""Machines that are gone and remembered. Those that went first make room."""


class Machines:
    """The machines of a cluster.

    nodes  those that Ray lists; empty until it has answered, and while the helper that talks to it is gone
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._listed: dict[str, Node] = {}
        """The machines of Ray's last answer, by name. ``lose`` keeps it: the next answer is compared with it."""
        self._gone: dict[str, tuple[Node, float]] = {}
        self._answered: float | None = None

    def adopt(self, nodes: Sequence[Node], now: float) -> tuple[list[str], list[str]]:
        """Take in the machines that Ray lists now. Return the names of those that came, and of those that are gone."""
        listed = {node.name: node for node in nodes}
        came, went = sorted(listed.keys() - self._listed.keys()), sorted(self._listed.keys() - listed.keys())
        for name in went:
            self._gone[name] = self._listed[name], now
        kept = [(name, gone) for name, gone in self._gone.items() if name not in listed and now - gone[1] < GONE_S]
        self._gone = dict(kept[-MOST_GONE:])
        self.nodes, self._listed, self._answered = list(nodes), listed, now
        return came, went

    def confirm(self, now: float) -> None:
        """Take note that Ray has answered, and lists the same machines as before."""
        self._answered = now

    def lose(self) -> None:
        """Take note that nobody can ask Ray for now."""
        self.nodes = []

    def names(self) -> set[str]:
        """Return the names of all machines, gone ones included."""
        return self._listed.keys() | self._gone.keys()

    def describe(self, heard: dict[str, float], versions: dict[str, str], now: float) -> dict[str, Any]:
        """Return what ``status`` shows of the machines.

        heard     by machine, the seconds since one of its agents was heard
        versions  by machine, the version of modelctl that an agent there has told
        """
        return {
            "answered_s": None if self._answered is None else round(now - self._answered, 1),
            "nodes": [
                {
                    **asdict(node),
                    "version": versions.get(node.name),
                    "heard_s": None if (silent := heard.get(node.name)) is None else round(silent, 1),
                }
                for node in self.nodes
            ],
            "gone": [
                {"name": name, "address": node.address, "gpus": node.gpus, "gone_s": round(now - since, 1)}
                for name, (node, since) in self._gone.items()
                if now - since < GONE_S
            ],
        }
