"""Notice how far the launcher is with what comes before a load, such as copying the model's directories."""

from collections.abc import Iterable, Iterator
from typing import Any

from supervisor.fleet.replica import Replica


class Preparations:
    """The progress of each worker whose start is prepared (``Launched.progress``). Workers themselves send PROGRESS."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, Any]] = {}
        """The last progress of each such worker, by its name."""

    def news(self, replicas: Iterable[Replica]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (model, progress) of each worker whose preparation is further than at the last call."""
        told, self._told = self._told, {}
        for replica in replicas:
            progress = replica.process.progress if replica.process is not None else None
            if progress is not None:
                self._told[replica.name] = progress
                if progress != told.get(replica.name):
                    yield replica.model, progress
