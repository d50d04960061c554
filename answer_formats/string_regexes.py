"""Regular expressions for the strings that a JSON schema allows, where a model writes them without quotes."""

import re
from typing import Final

_YEAR: Final = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR: Final = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE: Final = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL: Final = r"[a-zA-Z0-9]([a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_BYTE: Final = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]+W|[0-9]+D(T[0-9]+H)?|T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S))",
    "email": rf"[a-zA-Z0-9_+\-]+(\.[a-zA-Z0-9_+\-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": r"([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|::1|::",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.\-]*:[a-zA-Z0-9\-._~:/?#@!$&'()*+,;=%\[\]]+",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""Formats whose strings can be constrained. Each expression matches strings of the format, and most of them."""
_AROUND: Final = re.compile(r"\(\?(?!:|[imsux-]*[:)]|P?<[a-zA-Z_])|\\[bB1-9]|\\k")
EXACT: Final = ("date", "date-time")
"""Formats of which llguidance itself allows too much: a 29th of February in each year, and a year 0."""
_CLASSES: Final = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\x0B"}
_TOKEN: Final = re.compile(r"\\.|\[\^?|\]|/|\n|.", re.DOTALL)


def looks_around(pattern: str) -> bool:
    """Return whether a pattern looks around, or back. llguidance refuses such a pattern."""
    return bool(_AROUND.search(pattern))


def of_pattern(pattern: str) -> str:
    r"""Return the expression of whole strings in which a pattern of a schema is found.

    \d, \w and \s mean what they mean in JSON schemas: ASCII characters. An anchor within the pattern stays, and
    llguidance refuses it.
    """
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else '(?s:.*)'}({_ascii(inner)}){'' if ends else '(?s:.*)'}"


def _ascii(pattern: str) -> str:
    made: list[str] = []
    in_class = False
    for token in _TOKEN.findall(pattern):
        if token[0] == "[" and not in_class:
            in_class = True
        elif token == "]":
            in_class = False
        elif token == "[" and in_class:
            token = r"\["
        elif token == "/":
            token = r"\/"
        elif token == "\n":
            token = r"\n"
        elif token[0] == "\\" and (characters := _CLASSES.get(token[1:].lower())) is not None:
            if token[1].islower():
                token = characters if in_class else f"[{characters}]"
            elif not in_class:
                token = f"[^{characters}]"
        made.append(token)
    return "".join(made)


def of_length(shortest: int, longest: int | None) -> str:
    """Return the expression of strings by their number of characters."""
    return f"(?s:.{{{shortest},{'' if longest is None else longest}}})"
