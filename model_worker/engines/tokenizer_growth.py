"""Limit how much longer a tokenizer makes a text: a few bytes of tokenizer.json can ask for terabytes."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from model_worker.engine import LoadError

MOST_GROWTH = 64
"""The largest growth factor of all steps together. Real tokenizers write a space as a character of three bytes, or a
quotation mark as two characters."""
MOST_ADDED = 1024
"""The most characters that a tokenizer may put before a text or a word."""


def check_growth(tokenizer: tokenizers.Tokenizer, file: Path) -> None:
    """Raise LoadError for a tokenizer whose steps would make a text, or an answer, much longer than it is."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        step: Any = getattr(tokenizer, part)
        steps = list(_steps(json.loads(step.__getstate__()))) if step is not None else []
        growth = math.prod(map(_growth, steps))
        added = max((len(str(s.get(key) or "")) for s in steps for key in ("prepend", "replacement")), default=0)
        if growth > MOST_GROWTH or added > MOST_ADDED:
            what = f"{growth:.3g} times as long" if growth > MOST_GROWTH else f"longer by {added} characters"
            raise LoadError(f"{file}: its {part} makes a text {what}, which no model's does: it is not to be trusted")


def _steps(step: Any) -> Iterator[dict[str, Any]]:
    """Yield each step of a sequence, including the steps of nested sequences."""
    if isinstance(step, dict):
        inner = [each for key in ("normalizers", "pretokenizers", "decoders") for each in step.get(key) or ()]
        if not inner:
            yield step
        for each in inner:
            yield from _steps(each)


def _growth(step: dict[str, Any]) -> float:
    """Return the growth factor of a Replace step. Its regular expression may match a single character, or none."""
    if step.get("type") != "Replace":
        return 1.0
    replaced = (step.get("pattern") or {}).get("String")
    return max(1.0, len(step.get("content") or "") / max(1, len(replaced or "")))
