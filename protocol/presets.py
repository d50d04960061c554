"""Fill in the options that a request leaves out, from the model's defaults and from presets. Pure."""

from collections.abc import Mapping
from typing import Any, Final

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "none": {},
    # These values keep small models from falling into loops.
    "steady": {"repetition_penalty": 1.11, "frequency_penalty": 0.03},
}
"""Sets of sampling parameters, by name. A request or a model's defaults may give such a name as ``preset``."""


def fill(fields: dict[str, Any], defaults: Mapping[str, Any]) -> frozenset[str]:
    """Add missing options to a request's fields. Returns the names that the model's defaults have set.

    The value of an option comes from the first of these that has it: the request's fields, the request's preset, the
    model's defaults, the preset that these defaults name. That last preset is not used if the request gives any preset,
    even "none". ``max_tokens`` is never added: its default depends on the prompt.

    fields    the fields of the request, without aliases; changed in place
    defaults  the model's defaults, which ``sampling_defaults.check_sampling`` has checked
    """
    preset = fields.get("preset")
    given = PRESETS.get(preset) if isinstance(preset, str) else None
    model = dict(PRESETS[defaults.get("preset", "none")]) if preset is None else {}
    model |= {name: value for name, value in defaults.items() if name not in ("preset", "max_tokens")}
    set_by_model = frozenset(model) - fields.keys() - (given or {}).keys()
    for name, value in {**model, **(given or {})}.items():
        fields.setdefault(name, value)
    return set_by_model
