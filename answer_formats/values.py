"""Turn values that a model wrote as plain text into JSON, by the types that the tool's schema allows."""

import ast
import json
import re
from operator import ge, gt, le, lt
from typing import Any, Final

from answer_formats.schemas import Schema, branches, types, types_of_value
from answer_formats.source import BLANKS

_BOUNDS: Final = {"minimum": ge, "maximum": le, "exclusiveMinimum": gt, "exclusiveMaximum": lt}
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
            if candidate is None or found is None or not found & (allowed - {"string"}):
                continue
            # Beside strings, "7" is a number only if the schema allows this number: an enum may hold the text "7".
            if "string" not in allowed or _allows(root, schema, json.loads(candidate)):
                return candidate
    return json.dumps(text, ensure_ascii=False)


def _allows(root: Schema, schema: Schema, value: Any) -> bool:
    """Return whether one of a schema's alternatives allows a value, as far as types, lists and bounds say it."""
    return any(_fits(root, branch, value) for branch in branches(root, schema))


def _fits(root: Schema, branch: Schema, value: Any) -> bool:
    if isinstance(branch, bool) or not types_of_value(value) & types(root, branch):
        return branch is True
    listed = branch.get("enum", [branch["const"]] if "const" in branch else None)
    if listed is not None and not any(
        each == value and isinstance(each, bool) == isinstance(value, bool) for each in listed
    ):
        return False
    return not isinstance(value, int | float) or all(
        compare(value, branch[key]) for key, compare in _BOUNDS.items() if key in branch
    )


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
