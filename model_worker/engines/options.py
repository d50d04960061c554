"""An engine's own keys from models.yaml, checked by name and type before anything heavy happens."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from model_worker.engine import LoadError


class Options:
    """Reads the options of an engine one by one. Raises LoadError for an unknown key, naming the nearest known one."""

    def __init__(self, engine: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
        self._engine, self._given = engine, given
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
                raise LoadError(f"engine {engine} knows no option {key!r}: {hint}", key=key)

    def integer(self, key: str, default: int, *, minimum: int = 1, multiple_of: int = 1) -> int:
        """Return an integer option, or ``default`` unchanged if it is not given.

        Raises LoadError for another type, a value below ``minimum``, or a value that is no multiple of ``multiple_of``.
        """
        if key not in self._given:
            return default
        value = self._given[key]
        # In Python bool is an int, and YAML reads `threads: yes` as a bool.
        if isinstance(value, bool) or not isinstance(value, int):
            raise LoadError(f"option {key} of engine {self._engine} is {value!r}: it must be an integer", key=key)
        if value < minimum:
            message = f"option {key} of engine {self._engine} is {value}: it must be at least {minimum}"
            raise LoadError(message, key=key)
        if value % multiple_of:
            raise LoadError(
                f"option {key} of engine {self._engine} is {value}: it must be a multiple of {multiple_of}, "
                f"such as {-(-value // multiple_of) * multiple_of}",
                key=key,
            )
        return value

    def text(self, key: str) -> str | None:
        """Return an option that is a text, or None if it is not given. Raises LoadError for another type."""
        value = self._given.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise LoadError(f"option {key} of engine {self._engine} is {value!r}: it must be text", key=key)
        return value

    def choice(self, key: str, default: str, choices: Iterable[str]) -> str:
        """Return an option that is one of several words. Raises LoadError for any other value."""
        value = self._given.get(key, default)
        if value not in choices:
            raise LoadError(
                f"option {key} of engine {self._engine} is {value!r}: it must be one of {', '.join(choices)}", key=key
            )
        return str(value)
