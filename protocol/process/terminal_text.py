"""Keep text that others made up from steering a terminal: answers of models, logs, names, messages of errors.

A terminal obeys what it shows. One sequence writes the clipboard of the user (OSC 52). Others move the cursor, and can
forge a line in this way.
"""

import re
from typing import Any, Final

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
