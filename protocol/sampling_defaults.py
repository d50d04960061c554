"""Check a model's sampling defaults, forced values and hard limits, which stand in models.yaml. Pure.

    sampling: {preset: steady, temperature: 0.7, max_tokens: 512}
    forced: {repetition_penalty: 1.0}
    limits: {max_tokens: 2048, prompt_tokens: 8192, temperature: 1.5}

A default applies to a field that a request leaves out, and a forced value to every request. A request beyond a limit is
refused with an error that names the field. If neither the request nor a default sets ``max_tokens``, the limit is its
value.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from protocol.errors import RequestError
from protocol.presets import PRESETS, fill
from protocol.request import GenerateRequest
from protocol.sampling_params import SamplingParams, request_error
from protocol.values import Unfit, hints_of, read

DEFAULTS: Final = frozenset(hints_of(SamplingParams)) - {"seed"} | {
    "preset", "max_tokens", "min_tokens", "stop", "stop_on_loop", "stop_token_ids", "banned_strings",
}  # fmt: skip
"""Keys of ``sampling``."""
FORCED: Final = DEFAULTS - {"preset"}
"""Keys of ``forced``."""
LIMITS: Final[Mapping[str, type]] = {
    "prompt_tokens": int, "max_tokens": int, "min_tokens": int, "top_logprobs": int, "prompt_logprobs": int,
    "temperature": float, "max_temp": float, "cfg_scale": float,
}  # fmt: skip
"""Keys of ``limits``. prompt_tokens is the longest prompt. Every other key names an option and bounds its value."""
_LEAST: Final = {"prompt_tokens": 1, "max_tokens": 1}


class DefaultsProblem(ValueError):
    """An unusable value in models.yaml. ``key`` is the wrong key, or None for the whole map. ``problem`` says why."""

    def __init__(self, key: str | None, problem: str) -> None:
        super().__init__(f"{key}: {problem}" if key else problem)
        self.key, self.problem = key, problem


def check_sampling(sampling: Any) -> None:
    """Raise DefaultsProblem if ``sampling`` has values that would be refused in a request."""
    _check_keys(sampling, DEFAULTS)
    preset = sampling.get("preset", "none")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise DefaultsProblem("preset", f"must be one of {', '.join(PRESETS)}")
    fields: dict[str, Any] = {"prompt": "x"}
    fill(fields, sampling)
    if "max_tokens" in sampling:
        fields["max_tokens"] = sampling["max_tokens"]
    try:
        if fields.get("max_tokens") == 0:
            raise DefaultsProblem("max_tokens", "must be at least 1")
        read(GenerateRequest, fields)
    except Unfit as e:
        error = request_error(e.flaws[0], DEFAULTS, {})
        raise DefaultsProblem((error.field or "").partition(".")[0] or None, error.message) from None


def check_forced(forced: Any, sampling: Mapping[str, Any]) -> None:
    """Raise DefaultsProblem if ``forced`` has values that would be refused in a request without any option.

    sampling  the model's defaults, which ``check_sampling`` has checked
    """
    _check_keys(forced, FORCED)
    check_sampling({**sampling, **forced})


def check_limits(limits: Any, sampling: Mapping[str, Any]) -> None:
    """Raise DefaultsProblem for limits that are invalid, or that refuse even a request without any option.

    sampling  the model's defaults, which ``check_sampling`` has checked
    """
    _check_keys(limits, LIMITS)
    for key, most in limits.items():
        whole = LIMITS[key] is int
        least = _LEAST.get(key, 0)
        right = isinstance(most, int if whole else int | float) and not isinstance(most, bool)
        if not right or not math.isfinite(most) or most < least:
            raise DefaultsProblem(key, f"must be a {'whole number' if whole else 'number'}, at least {least}")
    fields: dict[str, Any] = {"prompt": "x"}
    fill(fields, sampling)
    if "max_tokens" in sampling:
        fields["max_tokens"] = sampling["max_tokens"]
    try:
        read(GenerateRequest, fields).check_limits(limits)
    except RequestError as e:
        raise DefaultsProblem(e.field, f"{e.message}: a request that leaves it out would be refused") from None


def _check_keys(given: Any, known: Iterable[str]) -> None:
    if not isinstance(given, Mapping):
        raise DefaultsProblem(None, "must be a map")
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise DefaultsProblem(
                str(key),
                f"unknown key; {f'did you mean {near[0]!r}?' if near else 'known are ' + ', '.join(sorted(known))}",
            )
