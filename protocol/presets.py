"""Fill in the options that a request leaves out, from the model's defaults and from presets. Pure."""

from collections.abc import Mapping
from typing import Any, Final

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "none": {},
    # These values keep small models from falling into loops.
    "steady": {"repetition_penalty": 1.11, "frequency_penalty": 0.03},
}
"""Sampling parameters by a name, which a request or a model's defaults may give as ``preset``."""


def fill(fields: dict[str, Any], defaults: Mapping[str, Any]) -> frozenset[str]:
    """Add to a request's fields what they leave out. Returns the names that the model's defaults have set.

    What counts is, in this order: the request's fields, its preset, the model's defaults, the preset among these
    (unless the request gives one, be it "none"). ``max_tokens`` is left alone: unset, it depends on the prompt.

    fields    as they came, under their own names (no aliases); changed in place
    defaults  as ``sampling_defaults.check_sampling`` passed them
    """
    preset = fields.get("preset")
    given = PRESETS.get(preset) if isinstance(preset, str) else None
    model = dict(PRESETS[defaults.get("preset", "none")]) if preset is None else {}
    model |= {name: value for name, value in defaults.items() if name not in ("preset", "max_tokens")}
    set_by_model = frozenset(model) - fields.keys() - (given or {}).keys()
    for name, value in {**model, **(given or {})}.items():
        fields.setdefault(name, value)
    return set_by_model
