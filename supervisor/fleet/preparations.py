"""Notice how far other machines are with what comes before a load, such as copying the model's directories."""

from collections.abc import Iterable, Iterator
from typing import Any

from supervisor.fleet.replica import Replica


class Preparations:
    """The progress of each worker whose machine prepares its start. Workers themselves send PROGRESS."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, Any]] = {}
        """The last progress of each worker whose machine prepares its start, by the worker's name."""

    def news(self, replicas: Iterable[Replica]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (model, progress) of each worker whose machine is further than at the last call."""
        told, self._told = self._told, {}
        for replica in replicas:
            progress = replica.process.progress if replica.process is not None else None
            if progress is not None:
                self._told[replica.name] = progress
                if progress != told.get(replica.name):
                    yield replica.model, progress
