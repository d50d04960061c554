"""Answers as models of each family write them, made as their chat templates and documentation show them."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from protocol.answer_formats import json_formats
from protocol.answer_formats.families import FAMILIES
from protocol.answer_formats.source import Tool

Call = tuple[str, dict[str, Any]]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": ["number", "null"]},
        "flag": {"type": "boolean"},
        "where": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}}},
}
TOOLS = (
    Tool("get_weather", WEATHER),
    Tool("get_time", {}),
    Tool("write", {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}),
)
NESTED: Call = (
    "get_weather",
    {"share": None, "flag": True, "where": {"lat": 50.5, "name": "a {b} [c]"}, "tags": ["x", 'y "z"', "Łódź"]},
)
SIMPLE: Call = ("get_weather", {"city": "Łódź 🦊", "days": 3})
EMPTY: Call = ("get_time", {})
LINES: Call = ("write", {"text": ' if a < b:\n\t"q" \\ {}\n\n'})
NUMBER: Call = ("write", {"text": "0123"})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>' for name, arguments in calls
    )


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _qwen3_coder(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        shown = (
            _json(value) if isinstance(value, dict | list) else str(value)  # the template writes True and None
            for value in arguments.values()
        )
        values = "".join(
            f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in zip(arguments, shown, strict=True)
        )
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _glm45(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n" for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{values}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _llama3(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {_json(arguments)}}}' for name, arguments in calls)


def _llama3_tag(calls: Sequence[Call]) -> str:
    return f"<|python_tag|>{_llama3(calls)}"


def _mistral(calls: Sequence[Call]) -> str:
    listed = (f'{{"name": "{name}", "arguments": {_json(arguments)}, "id": "abcDEF123"}}' for name, arguments in calls)
    return f"[TOOL_CALLS] [{', '.join(listed)}]"


def _mistral_args(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _deepseek_v3(calls: Sequence[Call]) -> str:
    made = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(made) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    made = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "".join(made) + "<｜tool▁calls▁end｜>"


def _tool_code(calls: Sequence[Call]) -> str:
    lines = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    )
    return "```tool_code\n" + "\n".join(lines) + "\n```"


def _gemma(begin: str, end: str, quote: str) -> Callable[[Sequence[Call]], str]:
    def written(value: Any) -> str:
        match value:
            case str():
                return f"{quote}{value}{quote}"
            case dict():
                return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in sorted(value.items())) + "}"
            case list():
                return "[" + ",".join(map(written, value)) + "]"
            case _:
                return _json(value)

    return lambda calls: "".join(f"{begin}call:{name}{written(arguments)}{end}" for name, arguments in calls)


def _seed_oss(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(f"<parameter={key}>{_raw(value)}</parameter>\n" for key, value in arguments.items())
        return f"<seed:tool_call>\n<function={name}>\n{values}</function>\n</seed:tool_call>"

    return "\n".join(one(*call) for call in calls)


def _minimax_m2(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(f'<parameter name="{key}">{_raw(value)}</parameter>\n' for key, value in arguments.items())
        return f'<invoke name="{name}">\n{values}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(one(*call) for call in calls)}</minimax:tool_call>"


def _minimax_m3(calls: Sequence[Call]) -> str:
    mark = "]<]minimax[>["

    def tag(key: str, value: Any) -> str:
        return f"{mark}<{key}>{written(value)}{mark}</{key}>"

    def written(value: Any) -> str:
        match value:
            case dict():
                return "".join(tag(key, inner) for key, inner in value.items())
            case list():
                return "".join(tag("item", inner) for inner in value)
            case _:
                return _raw(value)  # the template leaves out None

    shown = (f'{mark}<invoke name="{name}">{written(arguments)}{mark}</invoke>\n' for name, arguments in calls)
    return f"{mark}<tool_call>\n{''.join(shown)}{mark}</tool_call>"


def _listed(begin: str, end: str, extra: str = "") -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        shown = (f'{{"name": "{name}", "arguments": {_json(arguments)}{extra}}}' for name, arguments in calls)
        return f"{begin}[{', '.join(shown)}]{end}"

    return write


def _minimax_m1(calls: Sequence[Call]) -> str:
    return f"<tool_calls>\n{_plain_json(calls)}\n</tool_calls>"


def _command_r7b(calls: Sequence[Call]) -> str:
    shown = (
        f'    {{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {_json(arguments)}}}'
        for number, (name, arguments) in enumerate(calls)
    )
    return "<|START_ACTION|>[\n" + ",\n".join(shown) + "\n]<|END_ACTION|>"


def _kimi_k2(calls: Sequence[Call]) -> str:
    shown = (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(shown)}<|tool_calls_section_end|>"


def _functionary_v31(calls: Sequence[Call]) -> str:
    return "".join(f"<function={name}>{_json(arguments)}</function>" for name, arguments in calls)


def _lfm2(calls: Sequence[Call]) -> str:
    shown = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    )
    return f"<|tool_call_start|>[{', '.join(shown)}]<|tool_call_end|>"


def _harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


def _harmony_by_template(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


def _plain_json(calls: Sequence[Call]) -> str:
    return json_formats.calls_text(calls)


RECEIVER_FIRST = _harmony_by_template
"""Writes calls as the chat template of gpt-oss does."""
WRITERS: dict[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "hermes": ("hermes", _hermes),
    "qwen3_coder": ("qwen3_coder", _qwen3_coder),
    "glm45": ("glm45", _glm45),
    "llama3, tag": ("llama3", _llama3_tag),
    "mistral": ("mistral", _mistral),
    "mistral_args": ("mistral_args", _mistral_args),
    "deepseek_v3": ("deepseek_v3", _deepseek_v3),
    "deepseek_v31": ("deepseek_v31", _deepseek_v31),
    "gemma3, code": ("gemma3", _tool_code),
    "function_gemma": ("function_gemma", _gemma("<start_function_call>", "<end_function_call>", "<escape>")),
    "gemma4": ("gemma4", _gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
    "seed_oss": ("seed_oss", _seed_oss),
    "minimax_m2": ("minimax_m2", _minimax_m2),
    "minimax_m3": ("minimax_m3", _minimax_m3),
    "granite": ("granite", _listed("<|tool_call|>", "")),
    "phi4": ("phi4", _listed("<|tool_call|>", "<|/tool_call|>")),
    "apriel": ("apriel", _listed("<tool_calls>", "</tool_calls>", ', "id": "call_1"')),
    "minimax_m1": ("minimax_m1", _minimax_m1),
    "nemotron": ("nemotron", _listed("<TOOLCALL>", "</TOOLCALL>")),
    "command_r7b": ("command_r7b", _command_r7b),
    "kimi_k2": ("kimi_k2", _kimi_k2),
    "functionary_v31": ("functionary_v31", _functionary_v31),
    "lfm2": ("lfm2", _lfm2),
    "harmony": ("harmony", _harmony),
    "json, fence": ("json", lambda calls: f"```json\n{_plain_json(calls)}\n```"),
}
"""For each way to write calls: the name of its format, and the function that writes calls."""
PYTHON = {
    "gemma3, code": ("```tool_code\n", "\n", "\n```"),
    "lfm2": ("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
}
"""For each way to write Python calls: what stands before, between and behind them."""
JSON = frozenset(
    ("hermes", "llama3", "mistral", "granite", "phi4", "apriel", "minimax_m1", "nemotron", "command_r7b", "json")
)
"""Formats that can write any name, because it stands in JSON."""
_OWN_ENDS = {
    "qwen3_coder": ("</parameter>",),
    "glm45": ("</arg_value>",),
    "seed_oss": ("</parameter>",),
    "minimax_m2": ("</parameter>",),
    "minimax_m3": ("]<]minimax[>[", "]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
    "function_gemma": ("<escape>",),
    "gemma4": ('<|"|>',),
}
"""Markers that end a string in a format, so that no string can hold them."""


def markers_in_a_string(format: str) -> Call:
    """Return a call whose argument holds the markers of its format."""
    markers = [*FAMILIES[format].begins, *FAMILIES[format].also, "</think>", "</function>", '"}}', "```"]
    return "write", {"text": " ".join(marker for marker in markers if marker not in _OWN_ENDS.get(format, ()))}


def bare(format: str) -> Callable[[Sequence[Call]], str] | None:
    """Return the function that writes calls without a marker, which begin an answer; None if a format has none."""
    return {"llama3": _llama3, "gemma3": lambda calls: _llama3(calls[:1]), "json": _plain_json}.get(format)
