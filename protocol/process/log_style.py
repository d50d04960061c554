"""How a process writes its log: the level and the format, which change while it runs.

Commands import this module, so it does without the package logging, which takes long to import.
"""

import json
from dataclasses import asdict, dataclass
from typing import Final, Literal

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["human", "json"]
LEVELS: Final[tuple[Level, ...]] = ("debug", "info", "warning", "error")
FORMATS: Final[tuple[Format, ...]] = ("human", "json")


@dataclass(frozen=True)
class LogStyle:
    """How a process writes its log.

    level   the least level of the lines that are written
    format  "human", or "json" for one JSON object in each line
    """

    level: str = "info"
    format: str = "human"

    @property
    def number(self) -> int:
        """The level as the package logging counts it."""
        return 10 * (1 + LEVELS.index(self.level))

    @property
    def is_json(self) -> bool:
        return self.format == "json"

    def to_json(self) -> bytes:
        """Return the style as JSON."""
        return json.dumps(asdict(self)).encode()


DEFAULT_STYLE: Final = LogStyle()
