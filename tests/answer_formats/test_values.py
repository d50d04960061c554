"""Plain texts become JSON of the types that the schema allows, and no character is lost."""

import json
from typing import Any

import pytest

from protocol.answer_formats.json_formats import python_value
from protocol.answer_formats.rules import to_json

ROOT = {"$defs": {"n": {"type": "integer"}, "me": {"anyOf": [{"$ref": "#/$defs/me"}, {"type": "null"}]}}}
STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("text", "schema", "meant"),
    [
        ("0123", STRING, '"0123"'),
        ("true", STRING, '"true"'),
        (' {"a": 1}\n', STRING, '" {\\"a\\": 1}\\n"'),
        ("3", {"type": "integer"}, "3"),
        (" 3 ", {"type": "integer"}, "3"),
        ("3.0", {"type": "integer"}, "3.0"),
        ("3.5", {"type": "integer"}, '"3.5"'),
        ("123456789012345678901234567890.10", {"type": "number"}, "123456789012345678901234567890.10"),
        ("True", {"type": "boolean"}, "true"),
        ("None", {"type": ["string", "null"]}, "null"),
        ("null", {"anyOf": [STRING, {"type": "null"}]}, "null"),
        ("nullable", {"anyOf": [STRING, {"type": "null"}]}, '"nullable"'),
        ("42", {"type": ["string", "integer"]}, "42"),
        ("42", {"enum": ["42", "43"]}, '"42"'),
        ("7", {"enum": ["7", 1, None]}, '"7"'),
        ("1", {"enum": ["7", 1, None]}, "1"),
        ("null", {"enum": ["null", 1]}, '"null"'),
        ("true", {"enum": ["true", 1]}, '"true"'),
        ("3", {"anyOf": [{"const": "3"}, {"type": "integer", "minimum": 5}]}, '"3"'),
        ("8", {"anyOf": [{"const": "3"}, {"type": "integer", "minimum": 5}]}, "8"),
        ("42", {"$ref": "#/$defs/n"}, "42"),
        ("null", {"$ref": "#/$defs/me"}, "null"),
        ("[1, 2", {"type": "array"}, '"[1, 2"'),
        ("{'a': True, 'b': (1, None)}", {"type": "object"}, '{"a": true, "b": [1, null]}'),
        ('{"a":  1}', {"type": "object"}, '{"a":  1}'),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("hello", {}, '"hello"'),
        ("7", True, "7"),
        ("", STRING, '""'),
        ("", {"type": "integer"}, '""'),
        ("[" * 100_000, {"type": "array"}, json.dumps("[" * 100_000)),
    ],
)
def test_plain_text(text: str, schema: Any, meant: str) -> None:
    assert to_json(text, ROOT, schema) == meant


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('"a\\u00e9\\/"', '"a\\u00e9\\/"'), ("'it''s'", '"its"'), ("-1.5e3", "-1.5e3"), ("1_000", "1000"),
        ("True", "true"), ("true", "true"), ("None", "null"), ("(1, 'a')", '[1, "a"]'), ("f(x)", '"f(x)"'),
        ("{'a': {1}}", '"{\'a\': {1}}"'), ("r'\\d'", '"\\\\d"'),
    ],
)  # fmt: skip
def test_python(text: str, meant: str) -> None:
    assert python_value(text, {}, {}) == meant
