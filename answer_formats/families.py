"""What is known about each family of models: how its calls are marked, and what its chat template shows of that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from answer_formats import deepseek, gemma, glm45, hermes, llama3, mistral, plain_json, qwen3_coder
from answer_formats.calls import Reader
from answer_formats.rules import Rules, Shape, Wanted


@dataclass(frozen=True, slots=True)
class Family:
    """A format of calls.

    begins   texts with which calls begin
    also     further markers that are special tokens of some models, and part of the text that a parser reads
    opening  character with which a call may begin at the beginning of an answer; "" if only markers begin calls
    """

    begins: tuple[str, ...]
    also: tuple[str, ...]
    read: Reader
    rules: Callable[[Rules, Sequence[Wanted]], Shape]
    opening: str = ""


def _gemma(tokens: tuple[str, str, str]) -> Family:
    begin, end, quote = tokens
    return Family(
        (begin,),
        (end, quote),
        partial(gemma.read_tokens, end=end, quote=quote),
        partial(gemma.rules_tokens, end=end, quote=quote),
    )


def _deepseek(*, fenced: bool) -> Family:
    read, rules = partial(deepseek.read, fenced=fenced), partial(deepseek.rules, fenced=fenced)
    return Family(deepseek.BEGINS, deepseek.ALSO, read, rules)


FAMILIES: Final[Mapping[str, Family]] = {
    "hermes": Family((hermes.BEGIN,), (hermes.END,), hermes.read, hermes.rules),
    "qwen3_coder": Family(
        (qwen3_coder.BEGIN, qwen3_coder.FUNCTION), (qwen3_coder.END,), qwen3_coder.read, qwen3_coder.rules
    ),
    "glm45": Family((glm45.BEGIN,), glm45.ALSO, glm45.read, glm45.rules),
    "llama3": Family((llama3.BEGIN,), (), llama3.read, llama3.rules, llama3.OPENING),
    "mistral": Family((mistral.BEGIN,), (), mistral.read, mistral.rules),
    "mistral_args": Family((mistral.BEGIN,), (mistral.ARGUMENTS, mistral.ID), mistral.read_args, mistral.rules_args),
    "deepseek_v3": _deepseek(fenced=True),
    "deepseek_v31": _deepseek(fenced=False),
    "gemma3": Family((gemma.CODE, *gemma.JSON_FENCES), (), gemma.read_fences, gemma.rules_fences, gemma.OPENING),
    "function_gemma": _gemma(gemma.FUNCTION_GEMMA),
    "gemma4": _gemma(gemma.GEMMA_4),
    "json": Family(plain_json.BEGINS, (), plain_json.read, plain_json.rules, plain_json.OPENING),
}
"""The formats of calls by name."""
FORMATS: Final = tuple(FAMILIES)
"""The names of the formats."""
_SIGNS: Final = (
    ("gemma4", ("<|tool_call>call:",), ()),
    ("function_gemma", ("<start_function_call>",), ()),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("deepseek_v3", (deepseek.SEPARATOR, "```json"), ()),
    ("deepseek_v31", (deepseek.SEPARATOR,), ()),
    ("qwen3_coder", ("<tool_call>", "<function="), ()),
    ("glm45", ("<tool_call>", "<arg_key>"), ()),
    ("hermes", ("<tool_call>", "arguments"), ()),
    ("llama3", ("<|python_tag|>",), ("<|python_start|>",)),
    ("llama3", ("Environment: ipython",), ("<|python_start|>",)),
    ("gemma3", ("<start_of_turn>", "tool_code"), ()),
)
"""For each format, texts that its chat templates hold, and texts that they do not hold. The first one that fits is
taken. <tool_call> belongs to three formats, so the tags within it are looked for first."""
REASONING: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
)
"""Markers before and behind the reasoning."""
_TOKENS: Final = {"<|channel>thought": "<|channel>"}
"""The special token of a marker that is not one token."""
ALL_MARKERS: Final = frozenset(
    (
        *(marker for family in FAMILIES.values() for marker in (*family.begins, *family.also)),
        *(_TOKENS.get(marker, marker) for pair in REASONING for marker in pair),
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
    return format, next(((start, end) for start, end in REASONING if end in text), None)


def markers_of(format: str) -> tuple[str, ...]:
    """Return the markers of a format of calls, which have to be part of the text that a parser reads."""
    return (*FAMILIES[format].begins, *FAMILIES[format].also)


def reasoning_tokens(markers: tuple[str, str]) -> tuple[str, ...]:
    """Return the special tokens of the markers of a reasoning, which have to be part of the text, too."""
    return tuple(_TOKENS.get(marker, marker) for marker in markers)


def beginnings_of(format: str) -> tuple[str, ...]:
    """Return the texts with which a call begins."""
    return FAMILIES[format].begins


def opening_of(format: str) -> str:
    """Return the character with which a call may begin at the beginning of an answer; "" if there is none."""
    return FAMILIES[format].opening
