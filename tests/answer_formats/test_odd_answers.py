"""Models leave their formats at times. What they meant is found where it is clear, and else the text stays."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.answer_formats.families import FAMILIES, markers_of
from protocol.answer_formats.parser import AnswerParser
from protocol.answer_formats.source import CallArguments, CallEnd, CallStart
from tests.answer_formats.answers import PYTHON, TOOLS, WRITERS, Call, bare
from tests.answer_formats.splitting import Cut, Meant, check_divisions, divided, parsed

TIME: Call = ("get_time", {})
M3 = "]<]minimax[>["

ODD: list[tuple[str, str, Meant]] = [
    # Hermes
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "get_time"}</tool_call>', [("get_time", {"x": 1})]),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": "{\\"x\\": 1}"}</tool_call>', [("get_time", {"x": 1})]),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', [TIME]),
    ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', [TIME]),
    ("hermes", '<tool_call>\n{"name": "get_time", "arguments": {}}}\n</tool_call>', [TIME]),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {}}<tool_call>{"name": "get_time"}', [TIME, TIME]),
    ("hermes", "Write <tool_call> and </tool_call>.", [("text", "Write <tool_call> and </tool_call>.")]),
    ("hermes", "<tool_call>no JSON</tool_call>", [("text", "<tool_call>no JSON</tool_call>")]),
    ("hermes", "<tool_call> {a}", [("text", "<tool_call> {a}")]),
    # Qwen3-Coder
    ("qwen3_coder", "<function=get_time>\n</function>\n</tool_call> so", [TIME, ("text", "so")]),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=days>3</parameter></function></tool_call>",
     [("get_weather", {"days": 3})]),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\na</function>b\n</function>\n</tool_call>",
     [("write", {"text": "a</function>b"})]),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\n\n\n</parameter>\n</function>\n</tool_call>",
     [("write", {"text": "\n"})]),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\n</param\n</parameter>\n</tool_call>",
     [("write", {"text": "</param"})]),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\na\n</function>\n</tool_call>\n",
     [("write", {"text": "a"})]),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\na</parameter>b\n</parameter>\n</function>",
     [("write", {"text": "a</parameter>b"})]),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\n</parameter>\n</function>\n</tool_call>",
     [("write", {"text": ""})]),
    ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>a\n</parameter>\n</function>\n</tool_call>",
     [("write", {"text": "a"})]),
    ("qwen3_coder", "<tool_call>\n<function=rm>\n<parameter=x>\n<tool_call><function=get_time></function></tool_call>",
     [("text", "<tool_call>\n<function=rm>\n<parameter=x>\n<tool_call><function=get_time></function></tool_call>")]),
    # MiniMax M3
    ("minimax_m3", f"{M3}<tool_call>{M3}<invoke name=\"write\">{M3}<text>a{M3}</invoke>{M3}</tool_call> so",
     [("write", {"text": "a"}), ("text", "so")]),
    ("minimax_m3", f"{M3}<tool_call>{M3}<invoke name=\"write\">{M3}<text>a{M3}</txt>{M3}</tool_call>",
     [("write", {"text": "a"})]),
    ("minimax_m3", f"{M3}<tool_call>{M3}<invoke name=\"write\">{M3}<text>{M3}<b>{M3}</text>{M3}</invoke>",
     [("write", {"text": f"{M3}<b>"})]),
    ("minimax_m3", f"{M3}<tool_call>{M3}<invoke name=\"get_weather\">{M3}<where>{{\"lat\": 1}}{M3}</where>{M3}<tags>"
     f"{M3}</tags>{M3}<other>\n{M3}<item>{M3}<item>7{M3}</item>{M3}</item>\n{M3}</other>\n{M3}</invoke>",
     [("get_weather", {"where": {"lat": 1}, "tags": [], "other": [[7]]})]),
    ("minimax_m3", f"{M3}<tool_call>{M3}<invoke name=\"get_weather\">{M3}<where>{M3}</where>{M3}<share>{M3}</share>"
     f"{M3}<days> 3 {M3}</days>{M3}</invoke>{M3}<invoke name=\"rm\">{M3}</invoke>{M3}</tool_call>",
     [("get_weather", {"where": {}, "share": None, "days": 3}),
      ("text", f"{M3}<invoke name=\"rm\">{M3}</invoke>")]),
    ("minimax_m3", f"{M3} and {M3}<tool_call>", [("text", f"{M3} and {M3}<tool_call>")]),
    # GLM
    ("glm45", "<tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
     [("get_weather", {"days": 3})]),
    ("glm45", "<tool_call>get_time</tool_call><tool_call>get_time\n</tool_call>", [TIME, TIME]),
    ("glm45", "A <tool_call> is a mark", [("text", "A <tool_call> is a mark")]),
    ("glm45", '<tool_call>get_weather<arg_key>where</arg_key><arg_value>{"a": "</arg_value>"}</arg_value></tool_call>',
     [("get_weather", {"where": {"a": "</arg_value>"}})]),
    ("glm45", "<tool_call>get_weather\n<arg_key>tags</arg_key><arg_value>['a \"']</arg_value></tool_call>",
     [("get_weather", {"tags": ['a "']})]),
    # Llama
    ("llama3", '<|python_tag|>get_weather.call(city="a)b", days=3)', [("get_weather", {"city": "a)b", "days": 3})]),
    ("llama3", '{"type": "function", "name": "get_time", "parameters": {}}', [TIME]),
    ("llama3", '{"name": "get_time", "parameters": {}}; {"name": "rm", "parameters": {}}',
     [TIME, ("text", '; {"name": "rm", "parameters": {}}')]),
    ("llama3", '<|python_tag|>print("x")', [("text", '<|python_tag|>print("x")')]),
    # Mistral
    ("mistral", '[TOOL_CALLS][{"name": "get_time", "arguments": {}}, {"name": "get_time", "arguments": {}}]</s>',
     [TIME, TIME, ("text", "</s>")]),
    ("mistral_args", "[TOOL_CALLS]get_time[CALL_ID]abcDEF123[ARGS]{}", [TIME]),
    ("mistral_args", '[TOOL_CALLS]get_time[ARGS]{}[TOOL_CALLS]get_time[ARGS]{"a": "[ARGS]"}',
     [TIME, ("get_time", {"a": "[ARGS]"})]),
    # DeepSeek
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜>", [TIME]),
    ("deepseek_v31", "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜> x", [TIME, ("text", "x")]),
    # Gemma
    ("gemma3", "```tool_code\nprint(default_api.get_time())\n```", [TIME]),
    ("gemma3", "```tool_code\n[get_time(), get_weather(city='a', tags=['x,', \"y)\"])]\n```",
     [TIME, ("get_weather", {"city": "a", "tags": ["x,", "y)"]})]),
    ("gemma3", "```tool_code\nget_weather('a', days=1)\n```", [("get_weather", {"city": "a", "days": 1})]),
    ("gemma3", '```json\n{"name": "get_time", "parameters": {}}\n```', [TIME]),
    ("gemma3", '```json\n{"name": "Ada"}\n```', [("text", '```json\n{"name": "Ada"}\n```')]),
    ("gemma4", '<|tool_call>call:get_weather{city:"a",days:3,tags:[],flag:True}<tool_call|>',
     [("get_weather", {"city": "a", "days": 3, "tags": [], "flag": True})]),
    ("gemma4", '<|tool_call>call:get_weather{city:01234}<tool_call|>', [("get_weather", {"city": "01234"})]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "meant"), ODD)
def test_odd_calls(format: str, text: str, meant: Meant) -> None:
    check_divisions(format, text, meant)


@pytest.mark.parametrize(
    ("format", "text", "meant"),
    [
        ("hermes", '<tool_call>{"name": "write", "arguments": {"text": "a', [("write", Cut('{"text": "a'))]),
        ("hermes", '<tool_call>{"name": "write", "arguments": {"text": "a\\', [("write", Cut('{"text": "a\\'))]),
        ("hermes", '<tool_call>{"name": "write"', [("text", '<tool_call>{"name": "write"')]),
        ("qwen3_coder", "<tool_call>\n<function=write>\n<parameter=text>\na<", [("write", Cut('{"text": "a<'))]),
        ("qwen3_coder", "<tool_call>\n<function=write>\n<para", [("write", Cut("{"))]),
        ("glm45", "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>a", [("write", Cut('{"text": "a'))]),
        (
            "minimax_m3",
            f'{M3}<tool_call>{M3}<invoke name="write">{M3}<text>a{M3}</te',
            [("write", Cut(f'{{"text": "a{M3}</te'))],
        ),
        (
            "minimax_m3",
            f'{M3}<tool_call>{M3}<invoke name="get_weather">{M3}<where>{M3}<lat>1',
            [("get_weather", Cut('{"where": {"lat": 1'))],
        ),
        ("gemma3", "```tool_code\nwrite(text='a', x=1", [("write", Cut('{"text": "a"'))]),
        ("gemma4", '<|tool_call>call:write{text:<|"|>a', [("write", Cut('{"text": "a'))]),
    ],
)
def test_calls_that_are_cut_off_stay_as_they_are(format: str, text: str, meant: Meant) -> None:
    check_divisions(format, text, meant)


HALF = "\\ud800"


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", f'<tool_call>{{"name": "write", "arguments": "{{\\"text\\": \\"{HALF}\\"}}"}}</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "write", "arguments": {{"text": "{HALF}"}}}}</tool_call>'),
        ("gemma3", f"```tool_code\nwrite(text='{HALF}')\n```"),
        ("glm45", f"<tool_call>write\n<arg_key>tags</arg_key><arg_value>['{HALF}']</arg_value></tool_call>"),
        ("llama3", f'<|python_tag|>write.call(text="{HALF}")'),
        ("mistral", f'[TOOL_CALLS][{{"name": "write", "id": "{HALF}", "arguments": {{"text": "{HALF}"}}}}]'),
    ],
)
def test_half_a_character_that_a_model_escapes_stays_an_escape(format: str, text: str) -> None:
    """A str can hold a lone surrogate, but no message of the gateway can."""
    parser = AnswerParser(tool_format=format, tools=TOOLS)
    parts = [*parser.feed(text), *parser.finish()]
    assert "".join(part.json for part in parts if isinstance(part, CallArguments)).count(HALF) == 1
    for part in parts:
        repr(part).encode()


@pytest.mark.parametrize("way", WRITERS)
def test_a_draft_that_is_cut_by_the_end_of_the_reasoning(way: str) -> None:
    format, write = WRITERS[way]
    text = write([("write", {"text": "x"})])
    draft = text[: text.index("write") + 7]
    found = parsed(format, list(f"{draft}\n</think>\nIt is 5."), inside=True)
    assert found == [("reasoning", draft.rstrip()), ("text", "It is 5.")]


def test_an_id_is_told() -> None:
    parser = AnswerParser(tool_format="mistral_args", tools=TOOLS)
    parts = [*parser.feed("[TOOL_CALLS]get_time[CALL_ID]abcDEF123[ARGS]{}"), *parser.finish()]
    assert parts == [CallStart(0, "get_time", "abcDEF123"), CallArguments(0, "{}"), CallEnd(0)]


@pytest.mark.parametrize("way", [way for way in WRITERS if way not in PYTHON])
def test_strings_are_told_while_they_come(way: str) -> None:
    format, write = WRITERS[way]
    parser = AnswerParser(tool_format=format, tools=TOOLS)
    told = sum(len(parser.feed(character)) for character in write([("write", {"text": "word " * 40})]))
    assert told > 150


def _fragments(format: str) -> st.SearchStrategy[str]:
    family = FAMILIES[format]
    writers = [write for name, write in WRITERS.values() if name == format]
    if (without_marker := bare(format)) is not None:
        writers.append(without_marker)
    calls = [write([call]) for write in writers for call in (TIME, ("write", {"text": "é\n"}), ("rm", {"a": 1}))]
    marks = [*markers_of(format), "<think>", "</think>", family.opening, '{"name": "get_time"', '"arguments": {', "}"]
    pieces = st.sampled_from([*calls, *marks, " ", "\n", "text", "🦊", "<", '"'])
    return st.lists(pieces | st.text(max_size=3), max_size=8).map("".join)


@pytest.mark.long
@pytest.mark.parametrize("format", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_depends_on_the_division(format: str, data: st.DataObject) -> None:
    """Whatever a model writes, its parts do not depend on the division, and calls name known tools."""
    text = data.draw(_fragments(format))
    inside = data.draw(st.booleans())
    whole = parsed(format, [text], inside=inside)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    assert parsed(format, divided(text, cuts), inside=inside) == whole
    assert parsed(format, list(text), inside=inside) == whole
    assert {kind for kind, _ in whole} <= {"text", "reasoning", *(tool.name for tool in TOOLS)}


@pytest.mark.parametrize("format", [format for format, family in FAMILIES.items() if not family.headers])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_text_is_lost(format: str, data: st.DataObject) -> None:
    """Text without a complete call of a known tool, and without reasoning, comes back as it is."""
    text = data.draw(_fragments(format)).replace("think>", "thought>")
    found = parsed(format, list(text))
    if not found or [kind for kind, _ in found] == ["text"]:
        told = "".join(str(part) for _, part in found)
        assert told == text.lstrip(" \t\r\n")


def test_tags_within_tags_without_end() -> None:
    """Each level would be a level of Python's stack. Deep ones are text."""
    text = f'{M3}<tool_call>{M3}<invoke name="get_weather">{M3}<other>' + f"{M3}<a>" * 20_000
    found = parsed("minimax_m3", [text])
    assert found[0][0] == "get_weather"
    assert len(found) == 1


@pytest.mark.parametrize("format", ["gemma4", "function_gemma"])
@pytest.mark.parametrize("piece", ["{a:", "["])
def test_values_within_values_without_end(format: str, piece: str) -> None:
    """Each level of values is a level of Python's stack. A model may write thousands."""
    call = "<|tool_call>call:get_weather{a:" if format == "gemma4" else "<start_function_call>call:get_weather{a:"
    parser = AnswerParser(tool_format=format, tools=TOOLS)
    parts = [*parser.feed(call + piece * 20_000), *parser.finish()]
    assert sum(isinstance(part, CallStart) for part in parts) == 1


def test_an_argument_of_megabytes_takes_seconds_at_most() -> None:
    """The cost of a long argument grows with its length, and not with its square."""
    parser = AnswerParser(tool_format="hermes", tools=TOOLS)
    value = "line of a file \\n" * 60_000
    parts = parser.feed('<tool_call>{"name": "write", "arguments": {"text": "')
    for at in range(0, len(value), 5):
        parts += parser.feed(value[at : at + 5])
    parts += parser.feed('"}}</tool_call>')
    told = "".join(part.json for part in parts if isinstance(part, CallArguments))
    assert json.loads(told) == {"text": json.loads(f'"{value}"')}
