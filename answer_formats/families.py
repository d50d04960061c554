"""What is known about each family of models: how its calls are marked, and what its chat template shows of that."""

from typing import Final

FORMATS: Final[dict[str, tuple[str, ...]]] = {"hermes": ("<tool_call>", "</tool_call>")}
"""The formats of calls by name, each with its markers. The first marker begins a call."""
REASONING: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Markers before and behind the reasoning."""
ALL_MARKERS: Final = frozenset(
    (
        *(marker for markers in FORMATS.values() for marker in markers),
        *(marker for pair in REASONING for marker in pair),
    )
)


def recognise(source: str, tool_source: str | None = None) -> tuple[str | None, tuple[str, str] | None]:
    """Return (format of calls, markers of the reasoning) of a chat template, each None if it shows none.

    tool_source  the template for conversations with tools, if the model has another one for them
    """
    text = f"{source}\n{tool_source or ''}"
    hermes = "<tool_call>" in text and "arguments" in text and "<function=" not in text and "<arg_key>" not in text
    reasoning = next(((start, end) for start, end in REASONING if end in text), None)
    return ("hermes" if hermes else None), reasoning


def markers_of(format: str) -> tuple[str, ...]:
    """Return the markers of a format of calls, which have to be part of the text that a parser reads."""
    return FORMATS[format]


def beginnings_of(format: str) -> tuple[str, ...]:
    """Return the texts with which a call begins."""
    return FORMATS[format][:1]
