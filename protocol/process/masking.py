"""Texts that this process must not show, and what it shows in their place.

models.yaml may name variables of the environment, and their values may be secrets. Whoever reads the file learns the
texts here. Everything that writes a log, or says why something failed, passes its words through ``masked``: a message
of the operating system has the whole path that could not be opened.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

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
