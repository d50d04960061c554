"""Grammars of calls allow what the models of each family write, and nothing that a parser would read otherwise."""

import json
import re
from typing import Any

import llguidance
import pytest

from model_worker.engines.constraint_child import attempt, judge
from model_worker.engines.constraint_grammar import LIMITS, Vocabulary, grammar, loosened
from protocol.answer_formats.families import FAMILIES
from protocol.answer_formats.parser import AnswerParser
from protocol.answer_formats.source import CallArguments, Tool
from protocol.errors import ErrorCode, RequestError
from tests.answer_formats.answers import (
    EMPTY,
    JSON,
    LINES,
    NESTED,
    NUMBER,
    PYTHON,
    RECEIVER_FIRST,
    SIMPLE,
    TOOLS,
    WRITERS,
    Call,
    bare,
    markers_in_a_string,
)

BYTES = Vocabulary([bytes([value]) for value in range(256)]).tokenizer()


def constraint(
    format: str, *, required: bool, parallel: bool = True, tools: Any = None, strict: bool = False, text: Any = None
) -> str:
    if tools is None:
        tools = [(tool.name, tool.parameters) for tool in TOOLS]
    listed = [{"name": name, "parameters": schema, "strict": strict} for name, schema in tools]
    return json.dumps({"format": format, "tools": listed, "required": required, "parallel": parallel, "text": text})


def allows(text: str, constraint: str) -> bool:
    """Return whether a constraint of calls allows an answer."""
    matcher = llguidance.LLMatcher(BYTES, grammar("tools", constraint), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return all(not matcher.is_stopped() and matcher.consume_token(byte) for byte in text.encode()) and bool(
        matcher.is_accepting()
    )


def written(way: str, *calls: Call) -> str:
    """Return calls as the grammar has them, which writes the values of Python calls as JSON."""
    format, write = WRITERS[way]
    if way in PYTHON:
        begin, between, end = PYTHON[way]
        shown = (", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in args.items()) for _, args in calls)
        lines = (f"{name}({args})" for (name, _), args in zip(calls, shown, strict=True))
        return begin + between.join(lines) + end
    text = write(calls)
    return text.replace("\nTrue\n", "\ntrue\n").replace("\nNone\n", "\nnull\n") if format == "qwen3_coder" else text


@pytest.mark.parametrize("way", WRITERS)
@pytest.mark.parametrize("required", [True, False])
def test_calls_are_allowed(way: str, required: bool) -> None:
    format = WRITERS[way][0]
    made = constraint(format, required=required)
    before = "" if required else 'Well, {"a": 1} <b> [x].\n'
    for calls in (
        [SIMPLE],
        [NESTED],
        [EMPTY],
        [LINES],
        [NUMBER],
        [markers_in_a_string(format)],
        [EMPTY, SIMPLE, EMPTY],
    ):
        assert allows(before + written(way, *calls), made), calls
    if not required:
        assert allows("", made)
        assert allows(before, made)
        assert allows(f"{before}{written(way, EMPTY)}\nDone.", made)
    else:
        assert not allows("", made)
        assert not allows(f"Well. {written(way, EMPTY)}", made)


@pytest.mark.parametrize("way", WRITERS)
@pytest.mark.parametrize("required", [True, False])
def test_other_calls_are_not_allowed(way: str, required: bool) -> None:
    format = WRITERS[way][0]
    made = constraint(format, required=required)
    before = "" if required else "Well. "
    for call in (
        ("rm", {}),
        ("get_time", {"zone": "x"}),
        ("get_weather", {"days": "three"}),
        ("get_weather", {"days": 1.5}),
        ("get_weather", {"where": {"lat": "north"}}),
        ("get_weather", {"tags": [{"a": 1}] if format == "minimax_m3" else [1]}),  # which writes 1 and "1" alike
        ("write", {}),
    ):
        assert not allows(before + written(way, call), made), call
    one = constraint(format, required=required, parallel=False)
    assert allows(before + written(way, EMPTY), one)
    assert not allows(before + written(way, EMPTY, EMPTY), one)


@pytest.mark.parametrize("format", ["llama3", "gemma3", "json"])
def test_a_call_without_a_marker(format: str) -> None:
    write = bare(format)
    assert write is not None
    for required in (True, False):
        made = constraint(format, required=required)
        assert allows(write([SIMPLE]), made)
        assert not allows(write([("get_weather", {"days": "three"})]), made)
        assert allows(write([("rm", {"a": 1})]), made) is not required, "JSON that names no tool is text"
    made = constraint(format, required=False)
    for text in ('{"name": "Ada", "age": 36}', '{"a": {"name": "get_time"}}', "{", f"So: {write([EMPTY])}"):
        assert allows(text, made), text
    for text in (
        write([("get_time", {"x": 1})]),
        '{"type": "function", "name": "get_time", "parameters": {"x": 1}}',
        '{"function": "get_time", "parameters": {"x": 1}}',
    ):
        assert not allows(text, made), text


def test_further_calls_of_llama_follow_the_schema() -> None:
    made = constraint("llama3", required=False)
    call = '{"name": "get_time", "parameters": {}}'
    assert allows(f"{call}; {call}", made)
    assert not allows(f'{call}; {{"name": "get_time", "parameters": {{"x": 1}}}}', made)
    assert not allows(f"{call}; {call}", constraint("llama3", required=False, parallel=False))


STRING_SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string", "enum": ["a b", "", "c\nd"]}, ["a b", "", "c\nd"], ["a", "a b "]),
    ({"type": "string", "pattern": r"^\d+/\w$"}, ["12/a"], ["x12/a", "12/ab", "٣/a"]),
    ({"type": "string", "pattern": "a+[/.]"}, ["xxa/x", "a."], ["xx"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "łóд"], ["a", "abcd"]),
    ({"type": "string", "format": "date"}, ["2024-02-28"], ["2024-02-31", "soon"]),
    ({"type": ["string", "null"]}, ["nil", "null"], [" None"]),
    ({"anyOf": [{"type": "string", "minLength": 2}, {"type": "integer", "minimum": 5}]}, ["ab", "7"], ["a", "3"]),
    ({"const": "x"}, ["x"], ["y"]),
    ({"$ref": "#/$defs/color"}, ["red"], ["blue"]),
]


@pytest.mark.parametrize("format", ["glm45", "qwen3_coder", "seed_oss", "minimax_m2", "minimax_m3"])
@pytest.mark.parametrize(("schema", "good", "bad"), STRING_SCHEMAS)
def test_strings_without_quotes_follow_their_schema(format: str, schema: Any, good: list[str], bad: list[str]) -> None:
    whole = {"properties": {"x": schema}, "required": ["x"], "$defs": {"color": {"enum": ["red"]}}}
    made = constraint(format, required=True, tools=[("f", whole)])
    write = next(write for name, write in WRITERS.values() if name == format)
    for text in good:
        assert allows(write([("f", {"x": text})]), made), text
    for text in bad:
        assert not allows(write([("f", {"x": text})]), made), text


def refused(constraint: str) -> RequestError:
    error = attempt(BYTES, "tools", constraint)
    assert error is not None
    assert error.field == "tools"
    return error


@pytest.mark.parametrize("format", FAMILIES)
def test_a_schema_that_cannot_be_enforced_is_refused_by_tool_and_key(format: str) -> None:
    fine = ("fine", {"properties": {"a": {"type": "integer"}}})
    bad = {"type": "object", "properties": {"b": {"type": "integer", "not": {"const": 1}}}, "required": ["b"]}
    for given in ({"required": True}, {"required": False, "strict": True}):
        error = refused(constraint(format, tools=[fine, ("bad", bad)], **given))
        assert error.message.startswith("tools: bad: ")
        assert "not" in error.message
        assert error.code == ErrorCode.UNSUPPORTED
    assert attempt(BYTES, "tools", constraint(format, required=False, tools=[fine, ("bad", bad)])) is None


@pytest.mark.parametrize(
    "format", ["glm45", "qwen3_coder", "seed_oss", "minimax_m2", "minimax_m3", "gemma4", "gemma3", "lfm2"]
)
def test_an_object_that_the_format_writes_itself(format: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "minProperties": 1}
    error = refused(constraint(format, tools=[("bad", schema)], required=True))
    assert error.message.startswith("tools: bad: minProperties ")


TAGS: list[tuple[Any, list[Any], list[Any]]] = [
    ({}, ["", "x", 1, None, [1, [2]], {"a": {"b": "c"}}], []),
    ({"type": "array"}, [[], [["y"], "x"]], ["x"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1], [1, 2]],
     [[], [1, 2, 3], ["x"]]),
    ({"anyOf": [{"type": "string", "minLength": 1}, {"type": "array"}]}, ["x", ["y"]], [""]),
    ({"type": ["object", "null"], "properties": {"a": {}}}, [{"a": 1}, {"a": {"b": 1}}, {}, None], [{"b": 1}, 3, "x"]),
    ({"type": ["object", "string"], "properties": {"a": {}, "b": {}}, "required": ["b"]},
     [{"a": 1, "b": 1}, {"b": 1}, ""], [{"a": 1}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1, "item": 2}], [{"x": "y"}]),
    ({"enum": ["red", {"a": 1}]}, ["red"], ["blue", {"a": 1}]),  # such an object is JSON
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), TAGS)
def test_objects_and_lists_that_are_tags_within_tags(schema: Any, good: list[Any], bad: list[Any]) -> None:
    """What the grammar allows is read as it was meant. A list without items beside strings would be read as a text."""
    whole = {"properties": {"x": schema}, "required": ["x"]}
    made = constraint("minimax_m3", required=True, tools=[("f", whole)])
    write = WRITERS["minimax_m3"][1]
    for value in good:
        text = write([("f", {"x": value})])
        assert allows(text, made), value
        parser = AnswerParser(tool_format="minimax_m3", tools=[Tool("f", whole)])
        parts = [*parser.feed(text), *parser.finish()]
        told = "".join(part.json for part in parts if isinstance(part, CallArguments))
        assert json.loads(told) == {"x": value}
    for value in bad:
        assert not allows(write([("f", {"x": value})]), made), value


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object"}]}, "several alternatives"),
        ({"type": ["object", "array"], "properties": {"item": {}}}, "item"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"/a": {}}}, "cannot be written"),
    ],
)
def test_tags_that_could_be_read_in_two_ways_are_refused(schema: Any, why: str) -> None:
    tools = [("f", {"properties": {"x": schema}, "required": ["x"]})]
    assert why in refused(constraint("minimax_m3", required=True, tools=tools)).message


@pytest.mark.parametrize("format", [format for format in FAMILIES if format not in JSON])
def test_a_name_that_the_format_cannot_write(format: str) -> None:
    error = refused(constraint(format, tools=[("a<b\n[", {})], required=False))
    assert "cannot be written" in error.message
    assert error.code == ErrorCode.UNSUPPORTED


def test_a_pattern_that_looks_around_is_ignored_unless_the_tool_is_strict() -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "^(?!x)y$"}}, "required": ["a"]}
    for format in FAMILIES:
        assert attempt(BYTES, "tools", constraint(format, tools=[("f", schema)], required=False)) is None
        error = refused(constraint(format, tools=[("f", schema)], required=True))
        assert error.message.startswith("tools: f: ")


@pytest.mark.parametrize("format", FAMILIES)
def test_recursion(format: str) -> None:
    tree = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/properties/tree"}}}
    schema = {"type": "object", "properties": {"tree": tree}, "required": ["tree"]}
    made = constraint(format, tools=[("f", schema)], required=True)
    assert attempt(BYTES, "tools", made) is None
    write = next(write for name, write in WRITERS.values() if name == format)
    if format not in ("gemma3", "lfm2"):
        assert allows(write([("f", {"tree": {"n": 1, "next": {"n": 2, "next": {}}}})]), made)


# --- sloppy schemas

A: dict[str, Any] = {"required": ["a"]}
SLOPPY: list[tuple[dict[str, Any], str]] = [
    ({"required": None}, "required is null"),
    ({"required": False}, "required is false"),
    ({"properties": None}, "properties is null"),
    ({"properties": []}, "properties is a list"),
    ({"type": "string"}, "allows no object"),
    ({"properties": {"a": None}}, "a schema is null"),
    ({"properties": {"a": {"type": "any"}}}, "type is 'any'"),
    ({"properties": {"a": {"type": "STRING"}}}, "type is 'STRING'"),
    ({"properties": {"a": {"type": ["string", None]}}}, "type is a list"),
    ({"properties": {"a": {"enum": None}}}, "enum is null"),
    ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "\\$ref is '#/\\$defs/none'"),
    ({"properties": {"a": {"type": "integer", "minimum": "0"}}}, "minimum is '0'"),
    ({"properties": {"a": {"type": "string", "maxLength": 1.5}}}, "maxLength is 1.5"),
    ({"properties": {"a": {"type": "array", "items": "string"}}}, "a schema is 'string'"),
    ({"properties": {"a": {"anyOf": None}}}, "anyOf is null"),
    # Only llguidance finds these.
    ({"properties": {"a": {"type": "string", "pattern": "^{.*}$"}}} | A, "repetition"),
    ({"properties": {"a": {"type": "string", "pattern": "("}}} | A, "f: "),
    ({"properties": {}} | A, "f: "),
]


@pytest.mark.parametrize("format", FAMILIES)
@pytest.mark.parametrize(("schema", "why"), SLOPPY)
def test_a_schema_that_cannot_be_read_is_refused_only_if_it_has_to_be_enforced(
    format: str, schema: dict[str, Any], why: str
) -> None:
    """In other requests the arguments of that tool are any object, and the other tools keep their schemas."""
    tools = [("f", schema), ("fine", {"properties": {"n": {"type": "integer"}}})]
    for given in ({"required": True}, {"required": False, "strict": True}):
        wrong, loose = judge(BYTES, "tools", constraint(format, tools=tools, **given))
        if wrong is None:  # the format writes such a value as free text
            continue
        assert wrong.message.startswith("tools: f: ")
        assert re.search(why, wrong.message) or why == "repetition" or "not" in wrong.message
        assert not loose
    made = constraint(format, tools=tools, required=False)
    wrong, loose = judge(BYTES, "tools", made)
    assert wrong is None
    assert set(loose) <= {"f"}
    free = loosened(made, ["f"])
    way = next(way for way, (name, _) in WRITERS.items() if name == format)

    def write(calls: list[Call]) -> str:
        return written(way, *calls)

    assert allows(write([("f", {"a": "x", "b_2": [1, {"c": None}]})]), free)
    assert allows(write([("f", {})]), free)
    assert not allows(write([("fine", {"n": "x"})]), free)
    assert not allows(write([("fine", {"b": 1})]), free)


def test_python_calls_of_a_tool_without_a_schema_that_can_be_read() -> None:
    made = loosened(constraint("gemma3", tools=[("f", {"properties": None})], required=False), ["f"])
    assert allows('```tool_code\nf(a="x", b_2=[1, {"c": null}])\n```', made)
    assert not allows("```tool_code\nf(a=)\n```", made)


@pytest.mark.parametrize("format", FAMILIES)
def test_annotations_of_a_schema_are_ignored(format: str) -> None:
    schema = {
        "properties": {"a": {"type": "string", "format": "password", "writeOnly": True}},
        "required": ["a"],
        "propertyNames": {"type": "string"},
    }
    for given in ({"required": True}, {"required": False, "strict": True}, {"required": False}):
        assert judge(BYTES, "tools", constraint(format, tools=[("f", schema)], **given)) == (None, [])
    assert attempt(BYTES, "json_schema", json.dumps(schema | {"type": "object"})) is None


# --- calls, or else a text of a given shape

SHAPE = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name"]}


@pytest.mark.parametrize("way", WRITERS)
def test_a_call_or_a_text_of_the_shape(way: str) -> None:
    format = WRITERS[way][0]
    calls = [written(way, SIMPLE), written(way, EMPTY, NESTED)]
    if (write := bare(format)) is not None:
        calls.append(write([SIMPLE]))
    for kind, text, good, bad in (
        ("json_schema", json.dumps(SHAPE), ['{"name":"get_time","n":1}', '{"name":"Ada"}'], ['{"n":1}', "Well."]),
        ("json_schema", '{"type":"array","items":{"type":"integer"}}', ["[1,2]", "[]"], ["{}"]),
        ("json_schema", '{"anyOf":[{"type":"string"},{"type":"null"}]}', ['"[TOOL"', "null"], ["nil"]),
        ("regex", "(?s:.*)", ["", "Well. [x]", "<", "[TOOL", "`"], []),
        ("regex", "[a-z]+[0-9]", ["ab1"], ["ab", ""]),
        ("choice", '["yes","no"]', ["yes", "no"], ["", "yesno"]),
    ):
        made = constraint(format, required=False, text=[kind, text])
        head = FAMILIES[format].head
        for answer in good:
            assert allows(head + answer, made), (kind, answer)
            assert not head or allows(FAMILIES[format].lead + head + answer, made), (kind, answer)
        for answer in bad:
            assert not allows(head + answer, made), (kind, answer)
        for answer in calls:
            if kind != "regex" or write is None or answer != calls[-1]:  # any text may begin as JSON does
                assert allows(answer, made), (kind, answer)
            assert not allows(f"Well.\n{answer}", made) or text == "(?s:.*)"
            assert not allows(f"{answer}\nWell.", made) or text == "(?s:.*)"
        assert not allows(written(way, ("rm", {"a": 1})), made) or kind == "regex"


def test_a_shape_behind_the_headers_of_harmony() -> None:
    """An answer that has a shape has headers, too, also if there are no tools."""
    made = constraint("harmony", required=False, tools=[], text=["json_schema", json.dumps(SHAPE)])
    for before in ("<|channel|>final<|message|>", "<|start|>assistant<|channel|>final<|message|>"):
        assert allows(before + '{"name":"Ada"}', made)
        assert not allows(before + "Ada", made)
    assert not allows('{"name":"Ada"}', made)


def test_calls_of_harmony_with_the_receiver_first() -> None:
    made = constraint("harmony", required=False)
    call = RECEIVER_FIRST([SIMPLE])
    assert allows(f"<|channel|>analysis<|message|>hm<|end|>{call}", made)
    assert allows(call.removeprefix("<|start|>assistant"), made)
    wrong = RECEIVER_FIRST([("get_time", {"zone": "x"})])
    assert not allows(wrong, made)
    assert not allows(wrong.removeprefix("<|start|>assistant"), made)
    required = constraint("harmony", required=True)
    assert allows(f"<|start|>assistant{written('harmony', SIMPLE)}", required)
    assert allows(call.removeprefix("<|start|>assistant"), required)
    assert not allows(call.replace(" to=", "to="), required), "a parser reads no call there"


def test_a_shape_that_cannot_be_enforced_is_refused_as_such() -> None:
    for text in ('{"type":"array","uniqueItems":true}', '{"type":"any"}'):
        wrong, loose = judge(BYTES, "tools", constraint("hermes", required=False, text=["json_schema", text]))
        assert wrong is not None
        assert wrong.field == "json_schema"
        assert wrong.message.startswith("json_schema: ")
        assert not loose
