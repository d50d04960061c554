"""Turn values that a model wrote as plain text into JSON, by the types that the tool's schema allows."""

import ast
import json
import re
from typing import Any, Final

from answer_formats.schemas import Schema, types, types_of_value
from answer_formats.source import BLANKS

_WHOLE_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
"""Python's words, which many chat templates write."""


def text_piece(text: str) -> str:
    """Return the inside of a JSON string for a piece of text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_text(root: Schema, schema: Schema) -> bool:
    """Return whether a value can be nothing but a string. Then every text is one, also if it looks like a number."""
    return types(root, schema) <= {"string"}


def to_json(text: str, root: Schema, schema: Schema) -> str:
    """Return the JSON of a value. A text that is no value of the allowed types becomes a string, so nothing is lost.

    A number is written as the model wrote it, with all its digits.
    """
    allowed = types(root, schema)
    if not allowed <= {"string"}:
        bare = text.strip(BLANKS)
        bare = _WORDS.get(bare, bare)
        for candidate in (bare, _from_python(bare)):
            found = None if candidate is None else strict_json(candidate)
            if candidate is not None and found is not None and found & (allowed - {"string"}):
                return candidate
    return json.dumps(text, ensure_ascii=False)


def strict_json(text: str) -> frozenset[str] | None:
    """Return the types of the value of a JSON text; None if the text is no JSON."""
    try:
        return types_of_value(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def open_in_string(text: str) -> bool:
    """Return whether a text ends within a JSON string."""
    return _WHOLE_STRING.sub("", text).count('"') > 0


def is_python(text: str) -> bool:
    """Return whether a text is a Python list or dict."""
    return _from_python(text) is not None


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _from_python(text: str) -> str | None:
    """Return the JSON of a Python list or dict; None if the text is none."""
    if not text.startswith(("[", "{")):
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
