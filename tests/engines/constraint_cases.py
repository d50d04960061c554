"""Constraints for tests: schemas of growing difficulty, schemas that are refused, regexes, and hostile constraints."""

from typing import Any

OBJECT = {"type": "object", "additionalProperties": False}

SCHEMAS: dict[str, dict[str, Any]] = {
    "integer": {"type": "integer"},
    "number with bounds": {"type": "number", "minimum": -2.5, "maximum": 7.25},
    "integer with bounds": {"type": "integer", "exclusiveMinimum": 17, "maximum": 4096},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 9999},
    "short string": {"type": "string", "minLength": 3, "maxLength": 12},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "pattern inside": {"type": "string", "pattern": "[0-9]{2}", "maxLength": 8},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "constant": {"const": {"a": [1, "two", None, True]}},
    "enum": {"enum": ["red", "green", 3, None, ["x"]]},
    "null or boolean": {"type": ["null", "boolean"]},
    "array": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 6},
    "array with least": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 5},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"const": 1}], "items": False, "minItems": 2},
    "tuple with rest": {
        "type": "array", "prefixItems": [{"const": "sum"}], "items": {"type": "integer", "maximum": 9, "minimum": -9},
        "minItems": 2, "maxItems": 5,
    },
    "array of arrays": {
        "type": "array", "maxItems": 3, "minItems": 1,
        "items": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"enum": [0, 1]}},
    },
    "object": OBJECT | {
        "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
    },
    "optional properties": OBJECT | {
        "properties": {name: {"type": "boolean"} for name in "abcdef"}, "required": ["c"],
    },
    "nothing in it": OBJECT,
    "map of integers": {
        "type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}, "maxProperties": 2,
    },
    "pattern of keys": OBJECT | {"patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "maxProperties": 3},
    "least of properties": OBJECT | {
        "minProperties": 2, "maxProperties": 2, "patternProperties": {"^[a-z]{1,3}$": {"const": 1}},
    },
    "nested": OBJECT | {
        "properties": {
            "user": OBJECT | {
                "properties": {
                    "id": {"type": "integer", "minimum": 1, "maximum": 999999},
                    "tags": {"type": "array", "items": {"enum": ["x", "y", "z"]}, "maxItems": 3},
                },
                "required": ["id", "tags"],
            },
            "ok": {"type": "boolean"},
        },
        "required": ["user", "ok"],
    },
    "five levels": OBJECT | {"required": ["a"], "properties": {"a": OBJECT | {"required": ["b"], "properties": {
        "b": OBJECT | {"required": ["c"], "properties": {"c": OBJECT | {"required": ["d"], "properties": {
            "d": {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2}}}}}}}}},
    "any of": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["none", "all"]}]},
    "any of objects": {"anyOf": [
        OBJECT | {"properties": {"kind": {"const": "circle"}, "r": {"type": "integer", "maximum": 9, "minimum": 0}},
                  "required": ["kind", "r"]},
        OBJECT | {"properties": {"kind": {"const": "square"}, "side": {"enum": [1, 2, 4]}},
                  "required": ["kind", "side"]},
    ]},
    "one of": {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 4}, {"type": "null"}]},
    "all of": {"allOf": [
        {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "required": ["a"]},
        {"properties": {"a": {"enum": [2, 3, 4]}, "b": {"type": "boolean"}}, "required": ["b"],
         "additionalProperties": False},
    ]},
    "definitions": {
        "$defs": {"point": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "minItems": 2,
                            "maxItems": 2}},
        **OBJECT, "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
    },
    "list by recursion": {
        "$defs": {"list": {"anyOf": [{"type": "null"}, OBJECT | {
            "properties": {"head": {"enum": [0, 1]}, "tail": {"$ref": "#/$defs/list"}},
            "required": ["head", "tail"]}]}},
        "$ref": "#/$defs/list",
    },
    "tree": {
        "$defs": {"tree": OBJECT | {
            "properties": {"v": {"enum": [0, 1]}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"},
                                                          "maxItems": 1}},
            "required": ["v", "kids"]}},
        "$ref": "#/$defs/tree",
    },
    "two that call each other": {
        "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "maxItems": 1},
                  "b": OBJECT | {"properties": {"a": {"$ref": "#/$defs/a"}}}},
        "$ref": "#/$defs/a",
    },
    "recursion at the root": OBJECT | {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"const": 0}]}}},
    "words of a person": {
        "title": "Reply", "description": "what a tool is called with", **OBJECT,
        "properties": {
            "tool": {"enum": ["search", "calculator"]},
            "arguments": {"anyOf": [
                OBJECT | {"properties": {"query": {"type": "string", "minLength": 1, "maxLength": 16}},
                          "required": ["query"]},
                OBJECT | {"properties": {"terms": {"type": "array", "items": {"type": "integer", "minimum": 0,
                                                                             "maximum": 99},
                                                   "minItems": 1, "maxItems": 3}}, "required": ["terms"]},
            ]},
            "größe": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        },
        "required": ["tool", "arguments", "größe"],
    },
}  # fmt: skip

NOT_OFFERED: list[tuple[str, dict[str, Any]]] = [
    ("not", {"not": {"type": "string"}}),
    ("if, then", {"if": {"type": "string"}, "then": {"maxLength": 3}}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("contains", {"type": "array", "contains": {"const": 1}}),
    ("dependentRequired", {"dependentRequired": {"a": ["b"]}}),
    ("propertyNames", {"propertyNames": {"pattern": "^a"}}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("$dynamicRef", {"$dynamicRef": "#a"}),
    ('format "regex"', {"type": "string", "format": "regex"}),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    ("look-around", {"type": "string", "pattern": "^(?!a)b$"}),
    ("$ref to another document", {"$ref": "https://example.org/schema.json"}),
    ("x-guidance", {"x-guidance": {"lenient": True}, "not": {}}),
    ("whitespace_flexible", {"x-guidance": {"whitespace_flexible": 1}}),
    ("x-guidance", {"x-guidance": {"whitespace_flexible": True, "item_separator": "x"}}),
    ("x-guidance", {"x-guidance": True}),
    ("not", {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {"const": 1}}}}}),
]
"""Pairs of a word that the refusal must contain, and a schema that is refused."""

REGEXES = [
    r"[a-z]{3,8}", r"(yes|no|perhaps)", r"\d{4}-\d{2}-\d{2}", r"[A-Z][a-z]+( [A-Z][a-z]+){0,2}",
    r"(0|1)+(\.[0-9]{1,4})?", r"a/b\.c?", "é{2}|ü🦊", r"\{\"k\": [0-9]{1,9}\}", r"^x[^y]{0,9}y$", r"(?i)abc",
]  # fmt: skip


def chain(length: int) -> dict[str, Any]:
    """Return a schema with a chain of ``length`` definitions that refer to each other."""
    definitions: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "integer"}}}


HOSTILE: list[tuple[str, Any]] = [
    ("json_schema", {"type": "integer", "multipleOf": 1_000_003}),  # would take minutes
    ("json_schema", chain(4000)),  # would overflow the stack
    ("json_schema", {"enum": [{"a": [n] * 20} for n in range(4000)]}),
    ("json_schema", {"type": "object", "properties": {f"k{n}": {"type": "integer"} for n in range(3000)}}),
    ("regex", "(a|b)?" * 1300),
    ("regex", "|".join(f".*{chr(97 + n)}.{{{n + 5}}}" for n in range(20))),
]
"""(field, constraint) pairs that must be refused or compiled while the worker's steps go on."""
