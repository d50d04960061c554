"""Other names of fields of GENERATE. In a module of its own, since the gateway does without the validation."""

from typing import Final

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
