"""Fill in the options that a request leaves out, from the model's defaults and from presets. Pure."""

from collections.abc import Mapping
from typing import Any, Final

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "none": {},
    # These values keep small models from falling into loops.
    "steady": {"repetition_penalty": 1.11, "frequency_penalty": 0.03},
}
"""Sets of sampling parameters, by name. A request or a model's defaults may give such a name as ``preset``."""


def force(fields: dict[str, Any], forced: Mapping[str, Any]) -> dict[str, float | None]:
    """Replace options of a request by those that models.yaml forces. Return the options that had another value, with
    the new value if it is a number or a switch, else with None.

    ``max_tokens`` is only removed: as a default it is cut to what the prompt leaves of the context.

    fields  the fields of the request, without aliases; changed in place
    forced  option → value, which ``sampling_defaults.check_sampling`` has checked
    """
    replaced: dict[str, float | None] = {}
    preset = fields.get("preset")
    by_preset = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    for name, value in forced.items():
        given = fields.pop(name, None)
        if given is None:
            given = by_preset.get(name)
        if isinstance(given, str) and isinstance(value, list):
            given = [given]
        if given is not None and given != value:
            replaced[name] = value if isinstance(value, int | float) else None
        if name != "max_tokens":
            fields[name] = value
    return replaced


def changed_option(name: str, value: float | None) -> str:
    """Return how notes name a replaced option: ``temperature=0.7``, ``temperature_last=true``, or its name alone.

    value  the new value; None for one that is no number and no switch
    """
    if isinstance(value, bool):
        return f"{name}={str(value).lower()}"
    return f"{name}={value:.15g}" if isinstance(value, int | float) else name


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


# Other names of fields of GENERATE. In a module of its own, since the gateway does without the validation.


ALIASES: Final = {
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "min_length": "min_tokens",
    "stop_sequence": "stop",
    "rep_pen": "repetition_penalty",
    "repetition_range": "penalty_range",
    "rep_pen_range": "penalty_range",
    "typical": "typical_p",
    "dynatemp_low": "min_temp",
    "dynatemp_high": "max_temp",
    "dynatemp_exponent": "temp_exponent",
    "ban_eos_token": "ignore_eos",
    "guidance_scale": "cfg_scale",
    "dry_penalty_last_n": "dry_range",
}
"""Other names of fields, which OpenAI's and the EXL2 community's servers use. On the wire, a field that is given under
two names is an error. One value has another form, too: a top_k of -1 means 0, which is off."""
