"""What is known about each family of models: how its calls are marked, and what its chat template shows of that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from protocol.answer_formats import gemma, harmony, json_formats, tag_formats
from protocol.answer_formats.rules import CallGrammar, Rules, WantedTool
from protocol.answer_formats.source import Reader


@dataclass(frozen=True, slots=True)
class Family:
    """A format of calls.

    begins   texts with which calls begin
    also     further markers that are special tokens of some models, and part of the text that a parser reads
    opening  character with which a call may begin at the beginning of an answer; "" if only markers begin calls
    headers  texts that stand between the parts of an answer, and are part of none. Answers without tools have them, too
    ends     special tokens that end an answer
    lead     text that may stand before a message of the answer; "" for none
    head     text that stands before the text that the user reads; "" for none
    """

    begins: tuple[str, ...]
    also: tuple[str, ...]
    read: Reader
    rules: Callable[[Rules, Sequence[WantedTool]], CallGrammar]
    opening: str = ""
    headers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    lead: str = ""
    head: str = ""


def _gemma(tokens: tuple[str, str, str]) -> Family:
    begin, end, quote = tokens
    return Family(
        (begin,),
        (end, quote),
        partial(gemma.read_tokens, end=end, quote=quote),
        partial(gemma.rules_tokens, end=end, quote=quote),
    )


def _listed(form: json_formats.ListForm, *headers: str) -> Family:
    read, rules = partial(json_formats.read_json_list, form=form), partial(json_formats.json_list_rules, form=form)
    return Family((form.begin,), (form.end,) if form.end else (), read, rules, headers=headers)


def _named(form: json_formats.NamedForm) -> Family:
    return Family(
        form.begins,
        form.also,
        partial(json_formats.read_named, form=form),
        partial(json_formats.named_rules, form=form),
    )


def _functions(functions: tag_formats.Functions) -> Family:
    return Family(
        functions.begins,
        functions.also,
        partial(tag_formats.read_functions, functions=functions),
        partial(tag_formats.functions_rules, functions=functions),
    )


def _lfm2(begin: str, end: str) -> Family:
    read, rules = partial(json_formats.read_listed, end=end), partial(json_formats.rules_listed, end=end)
    return Family((begin,), (end,), read, rules)


FAMILIES: Final[Mapping[str, Family]] = {
    "hermes": Family(
        (json_formats.HERMES_BEGIN,), (json_formats.END,), json_formats.read_hermes, json_formats.hermes_rules
    ),
    "qwen3_coder": _functions(tag_formats.QWEN3_CODER),
    "seed_oss": _functions(tag_formats.SEED_OSS),
    "minimax_m2": _functions(tag_formats.MINIMAX_M2),
    "minimax_m3": _functions(tag_formats.MINIMAX_M3),
    "glm45": Family((tag_formats.BEGIN,), tag_formats.ALSO, tag_formats.read_glm45, tag_formats.glm45_rules),
    "llama3": Family(
        (json_formats.LLAMA3_BEGIN,), (), json_formats.read_llama3, json_formats.llama3_rules, json_formats.OPENING
    ),
    "mistral": _listed(json_formats.MISTRAL),
    "mistral_args": Family(
        (json_formats.MISTRAL_BEGIN,),
        (json_formats.MISTRAL_ARGUMENTS, json_formats.ID),
        json_formats.read_mistral,
        json_formats.mistral_rules,
    ),
    "granite": _listed(json_formats.GRANITE),
    "phi4": _listed(json_formats.PHI4),
    "apriel": _listed(json_formats.APRIEL, "[END FINAL RESPONSE]"),
    "minimax_m1": _listed(json_formats.MINIMAX_M1),
    "nemotron": _listed(json_formats.NEMOTRON),
    "command_r7b": _listed(json_formats.COMMAND_R7B, "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "deepseek_v3": _named(json_formats.DEEPSEEK_V3),
    "deepseek_v31": _named(json_formats.DEEPSEEK_V31),
    "kimi_k2": _named(json_formats.KIMI_K2),
    "functionary_v31": _named(json_formats.FUNCTIONARY_V31),
    "lfm2": _lfm2("<|tool_call_start|>", "<|tool_call_end|>"),
    "gemma3": Family((gemma.CODE, *gemma.JSON_FENCES), (), gemma.read_fences, gemma.rules_fences, gemma.OPENING),
    "function_gemma": _gemma(gemma.FUNCTION_GEMMA),
    "gemma4": _gemma(gemma.GEMMA_4),
    "harmony": Family(
        harmony.BEGINS,
        harmony.TOKENS,
        harmony.read,
        harmony.rules,
        harmony.OPENING,
        harmony.HEADERS,
        harmony.ENDS,
        harmony.LEAD,
        harmony.HEAD,
    ),
    "json": Family(json_formats.BEGINS, (), json_formats.read_plain, json_formats.plain_rules, json_formats.OPENING),
}
"""The formats of calls by name."""
FORMATS: Final = tuple(FAMILIES)
"""The names of the formats."""
_SIGNS: Final = (
    ("harmony", ("<|channel|>analysis<|message|>", "to="), ()),
    ("gemma4", ("<|tool_call>call:",), ()),
    ("function_gemma", ("<start_function_call>",), ()),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json"), ()),
    ("deepseek_v31", ("<｜tool▁sep｜>",), ()),
    ("kimi_k2", ("<|tool_call_argument_begin|>",), ()),
    ("command_r7b", ("<|START_ACTION|>",), ()),
    ("seed_oss", ("<seed:tool_call>", "<function="), ()),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke name="), ()),
    ("minimax_m3", ("]<]minimax[>[", "<tool_call>", "<invoke name="), ()),
    ("nemotron", ("<TOOLCALL>",), ()),
    ("apriel", ("<tool_calls>[",), ()),
    ("minimax_m1", ("<tool_calls>", '{"name": '), ("<tool_call>",)),
    ("lfm2", ("<|tool_call_start|>",), ()),
    ("lfm2", ("<|tool_list_start|>",), ()),
    ("lfm2", ("List of tools: [", "<|im_start|>"), ()),
    ("phi4", ("<|/tool_call|>",), ()),
    ("phi4", ("<|/tool|>",), ()),
    ("granite", ("<|tool_call|>",), ()),
    ("qwen3_coder", ("<tool_call>", "<function="), ()),
    ("glm45", ("<tool_call>", "<arg_key>"), ()),
    ("hermes", ("<tool_call>", "arguments"), ()),
    ("functionary_v31", ("<function=", "</function>"), ("<tool_call>",)),
    ("llama3", ("<|python_tag|>",), ("<|python_start|>",)),
    ("llama3", ("Environment: ipython",), ("<|python_start|>",)),
    ("gemma3", ("<start_of_turn>", "tool_code"), ()),
)
"""For each format, texts that its chat templates hold, and texts that they do not hold. The first one that fits is
taken. <tool_call> belongs to three formats, so the tags within it are looked for first."""
REASONING: Final = (
    harmony.REASONING,
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<mm:think>", "</mm:think>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
"""Markers before and behind the reasoning."""
_TOKENS: Final = {"<|channel>thought": ("<|channel>",), harmony.REASONING[0]: ("<|channel|>", "<|message|>")}
"""The special tokens of a marker that is not one token."""
ALL_MARKERS: Final = frozenset(
    (
        *(marker for family in FAMILIES.values() for marker in (*family.begins, *family.also)),
        *(token for pair in REASONING for marker in pair for token in _TOKENS.get(marker, (marker,))),
    )
)


def recognise(source: str, tool_source: str | None = None) -> tuple[str | None, tuple[str, str] | None]:
    """Return (format of calls, markers of the reasoning) of a chat template, each None if it shows none.

    tool_source  the template for conversations with tools, if the model has another one for them
    """
    text = f"{source}\n{tool_source or ''}"
    format = next(
        (
            name
            for name, shown, absent in _SIGNS
            if all(sign in text for sign in shown) and not any(sign in text for sign in absent)
        ),
        None,
    )
    known = [markers for markers in REASONING if (markers == harmony.REASONING) == (format == "harmony")]
    return format, next(((start, end) for start, end in known if end in text), None)


def markers_of(format: str) -> tuple[str, ...]:
    """Return the markers of a format of calls, which have to be part of the text that a parser reads."""
    return (*FAMILIES[format].begins, *FAMILIES[format].also)


def reasoning_tokens(markers: tuple[str, str]) -> tuple[str, ...]:
    """Return the special tokens of the markers of a reasoning, which have to be part of the text, too."""
    return tuple(token for marker in markers for token in _TOKENS.get(marker, (marker,)))


def beginnings_of(format: str) -> tuple[str, ...]:
    """Return the texts with which a call begins."""
    return FAMILIES[format].begins


def opening_of(format: str) -> str:
    """Return the character with which a call may begin at the beginning of an answer; "" if there is none."""
    return FAMILIES[format].opening


def has_headers(name: str) -> bool:
    """Return whether texts that are part of nothing stand between the parts of an answer in this format."""
    return bool(FAMILIES[name].headers)


def head_of(format: str) -> str:
    """Return the text that stands before the text that the user reads; "" if there is none."""
    return FAMILIES[format].head


def ends_of(format: str) -> tuple[str, ...]:
    """Return the special tokens that end an answer, besides the model's own."""
    return FAMILIES[format].ends
