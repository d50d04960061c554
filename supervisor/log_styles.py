"""How each process writes its log: the settings of models.yaml, and the levels that operators have set since.

``log_control`` has the processes follow.
"""

import logging
from collections.abc import Iterable

from protocol.process.log_style import LogStyle


class LogStyles:
    """The styles of all logs.

    start  what models.yaml says, for every process whose level nobody has set
    """

    def __init__(self, start: LogStyle) -> None:
        self.start = start
        self._levels: dict[str, str] = {}

    def of(self, name: str) -> LogStyle:
        """Return the style of a model's workers, of the supervisor or of the gateway."""
        return LogStyle(self._levels.get(name, self.start.level), self.start.format)

    def set(self, names: Iterable[str], level: str) -> None:
        """Set the level of these processes."""
        self._levels |= dict.fromkeys(names, level)

    def adopt(self, start: LogStyle) -> None:
        """Take over what models.yaml says now. Another level there replaces all levels that were set."""
        if start.level != self.start.level:
            self._levels.clear()
        self.start = start

    def least(self) -> int:
        """Return the least level of all processes."""
        return min(LogStyle(level).number for level in (self.start.level, *self._levels.values()))


class StyledByModel(logging.Handler):
    """A handler of records about workers, whose level is that of the worker's model."""

    styles = LogStyles(LogStyle())

    def takes(self, record: logging.LogRecord, model: str) -> bool:
        """Return whether the log of this model gets the record."""
        return record.levelno >= self.styles.of(model).number
