"""Put variables of the environment into the values of a YAML file: ``${NAME}`` and ``${NAME:-default}``. Pure.

A value may be a secret. So whatever shows the value of a key shows it as the file has it (``Filled.written``), and
messages are masked (``Filled.texts``).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

MOST_CHARS: Final = 65_536
"""The longest value with its variables put in."""
_REFERENCE: Final = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{")

_QUOTED: Final = "${}"
"""The key that stands for a quoted text in JSON. No file can have it beside a value."""


class UnknownVariable(ValueError):
    """A reference that has no value. The message says why, and what to do."""


@dataclass(frozen=True)
class Filled:
    """A value with variables put in.

    written    as the file has it
    text       with the values of the variables
    variables  the variables that the environment has: name → value
    """

    written: str
    text: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> dict[str, str]:
        """The values of the variables, and their references: value → ``${NAME}``."""
        return {value: f"${{{name}}}" for name, value in self.variables.items()}


class Quoted(str):
    """A text in quotes that has variables. It counts as a number or a switch where a key wants one: in a map on one
    line, ``{cache_size: "${SIZE}"}``, YAML lets nobody write it without quotes."""

    @property
    def unquoted(self) -> Any:
        """The value of the text without quotes."""
        return plain_value(str(self))


def fill(text: str, environment: Mapping[str, str]) -> Filled | None:
    """Return a text with its variables put in; None if it names none. Raises UnknownVariable."""
    if "${" not in text:
        return None
    variables: dict[str, str] = {}

    def value_of(found: "re.Match[str]") -> str:
        name, default = found[1], found[2]
        if found[0] == "$${":
            return "${"
        if name is None:
            raise UnknownVariable(
                "has ${ without the name of a variable and }: write ${NAME}, ${NAME:-default}, or $${ for the text ${"
            )
        value = environment.get(name)
        if default is not None and not value:
            return str(default)
        if value is None:
            remedy = f"set it where modelctl is started, or write ${{{name}:-default}}"
            raise UnknownVariable(f"names the variable {name}, which the environment does not have: {remedy}")
        if "\0" in value or not _is_text(value):
            raise UnknownVariable(f"names the variable {name}, whose value is no text in UTF-8: set another one")
        variables[name] = value
        return value

    filled = _REFERENCE.sub(value_of, text)
    if len(filled) > MOST_CHARS:
        raise UnknownVariable(f"has more than {MOST_CHARS} characters with its variables put in: set shorter ones")
    return Filled(text, filled, variables)


def plain_value(text: str) -> Any:
    """Return the value of a text as YAML reads a word without quotes: a number, true, null or the text itself.

    Lists, maps and comments are not read: a variable cannot bring more than one value.
    """
    resolver = yaml.SafeLoader("")
    try:
        tag = resolver.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        return resolver.construct_object(yaml.ScalarNode(tag, text))
    except (ValueError, OverflowError, yaml.YAMLError):  # 2024-13-99 looks like a date
        return text
    finally:
        resolver.dispose()


def packed(value: Any) -> Any:
    """Return a value of a file, for JSON. JSON would make a plain text of one that is ``Quoted``."""
    if isinstance(value, dict):
        return {key: packed(part) for key, part in value.items()}
    if isinstance(value, list):
        return [packed(part) for part in value]
    return {_QUOTED: str(value)} if isinstance(value, Quoted) else value


def unpacked(value: Any) -> Any:
    """Return the value that ``packed`` has packed."""
    if isinstance(value, dict):
        if value.keys() == {_QUOTED}:
            return Quoted(value[_QUOTED])
        return {key: unpacked(part) for key, part in value.items()}
    return [unpacked(part) for part in value] if isinstance(value, list) else value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # bytes that are not UTF-8
        return False
    return True
