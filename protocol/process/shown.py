"""What a process may show, and how: secrets are masked, texts of others cannot steer a terminal, and a log has a style.

Every command imports this module, so it does without the package logging, which takes long to import.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeVar

# Texts that this process must not show, and what it shows in their place.
#
# models.yaml may name variables of the environment, and their values may be secrets. Whoever reads the file learns the
# texts here. Everything that writes a log, or says why something failed, passes its words through ``masked``: a
# message of the operating system has the whole path that could not be opened.


T = TypeVar("T")

_masks: dict[str, str] = {}
_pattern: re.Pattern[str] | None = None


def mask(texts: Mapping[str, str]) -> None:
    """Let this process show other texts in place of some, from now on until it ends.

    texts  text → what is shown in its place
    """
    global _pattern
    new = {text: shown for text, shown in texts.items() if text and text != shown and _masks.get(text) != shown}
    if new:
        _masks.update(new)
        _pattern = pattern_of(_masks)


def masks() -> dict[str, str]:
    """Return what ``mask`` was given, for a process that this one starts."""
    return dict(_masks)


def masked(text: str) -> str:
    """Return a text as it may be shown."""
    # A search for each text takes a tenth of what the pattern takes, and hardly a line of a log has any of them.
    if _pattern is None or not any(known in text for known in _masks):
        return text
    return _pattern.sub(lambda found: _masks[found[0]], text)


def masked_values(value: T) -> T:
    """Return plain data whose texts may all be shown. The keys of maps stay."""
    return value if _pattern is None else _masked_values(value)


def _masked_values(value: Any) -> Any:
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {key: _masked_values(part) for key, part in value.items()}
    return [_masked_values(part) for part in value] if isinstance(value, list) else value


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of some texts. The longest one counts, and none is found in the middle of a longer word."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile(
        "|".join(f"{_edge(text[0], '<')}{re.escape(text)}{_edge(text[-1], '')}" for text in longest_first)
    )


def _edge(character: str, behind: str) -> str:
    """Return what must not stand beside this first or last character of a text. A path may go on behind its end."""
    if behind and character == "/":
        return r"(?<![\w.~/-])"
    return rf"(?{behind}!\w)" if re.match(r"\w", character) else ""


# How a process writes its log: the level and the format, which change while it runs.


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


# Keep text that others made up from steering a terminal: answers of models, logs, names, messages of errors.
#
# A terminal obeys what it shows. One sequence writes the clipboard of the user (OSC 52). Others move the cursor, and
# can forge a line in this way.


_CONTROL: Final = re.compile(r"(\x1b\[(?:[0127]|3[123])m)|\r\n?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Everything that a terminal obeys, but for line ends and tabs. The group is what modelctl itself paints with."""


def harmless(text: str, *, painted: bool = False) -> str:
    """Return the text with U+FFFD in place of each character that a terminal would obey.

    A carriage return becomes a line end: otherwise the next text would overwrite the line.

    painted  keep the sequences of modelctl's own colours
    """

    def instead(match: "re.Match[str]") -> str:
        if match[1] is not None and painted:
            return match[1]
        return "\n" if match[0][0] == "\r" else "\N{REPLACEMENT CHARACTER}" + match[0][1:]

    return _CONTROL.sub(instead, text)


def steer(stream: Any, sequence: str) -> None:
    """Write control sequences of modelctl's own to a stream, whether or not the stream makes texts harmless."""
    getattr(stream, "steer", stream.write)(sequence)
