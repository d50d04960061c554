"""The fields of a request that say how the next token is drawn, with their limits and defaults.

The defaults are neutral. The defaults of the engines are not, so an engine gets every value from here.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

from protocol.errors import RequestError
from protocol.values import Allowed, CheckedValues, FieldsDisagree, Flaw, Length, ReadWith, Then, Within

MOST_BIASES = 1024
LARGEST_BIAS = 100
LARGEST_ID = (1 << 31) - 1
DRY_LONGEST = 20
"""Tokens of the longest repeated sequence that DRY looks for. A dry_range other than 0 must be greater."""


def _biases(given: Any) -> dict[int, float] | None:
    """Return {id: bias} with integers as ids. On the wire they are strings, as in JSON."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError("must be a map of token ids and numbers")
    if len(given) > MOST_BIASES:
        raise ValueError(f"must hold at most {MOST_BIASES} token ids, not {len(given)}")
    biases: dict[int, float] = {}
    for key, bias in given.items():
        text = str(key)
        digits = len(text) <= 10 and text.isascii() and text.isdecimal()
        if isinstance(key, bool | bytes) or not digits or int(text) > LARGEST_ID:
            raise ValueError(f"must have token ids (0 to {LARGEST_ID}) as keys")
        if int(text) in biases:
            raise ValueError(f"must not hold an id twice ({int(text)})")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"must have numbers as values (that of {int(text)} is none)")
        if not math.isfinite(bias) or abs(bias) > LARGEST_BIAS:
            raise ValueError(
                f"must have values from -{LARGEST_BIAS} to {LARGEST_BIAS} (that of {int(text)} is {bias!r})"
            )
        biases[int(text)] = float(bias)
    return biases


def _dry_range(dry_range: int) -> int:
    if 0 < dry_range <= DRY_LONGEST:
        raise ValueError(f"must be 0 or more than {DRY_LONGEST}")
    return dry_range


TokenId = Annotated[int, Within(0, LARGEST_ID)]
LogitBias = Annotated[dict[int, float] | None, ReadWith(_biases)]


class SamplingParams(CheckedValues):
    """The options for drawing the next token. Every default leaves the model's own distribution as it is."""

    temperature: Annotated[float, Within(0, 10)] = 1.0
    """The randomness of the draw. 0 is greedy: always the likeliest token."""
    top_k: Annotated[int, Within(0, 1_000_000)] = 0
    """Draw from the k likeliest tokens; 0 is off, and so is -1 in a request."""
    top_p: Annotated[float, Within(0, 1, above=True)] = 1.0
    """Draw from the smallest set of tokens whose probabilities sum to p; 1 is off."""
    min_p: Annotated[float, Within(0, 1)] = 0.0
    """Drop tokens less likely than this share of the likeliest; 0 is off."""
    top_a: Annotated[float, Within(0, 1)] = 0.0
    """Drop tokens less likely than this times the square of the likeliest's probability; 0 is off."""
    typical_p: Annotated[float, Within(0, 1, above=True)] = 1.0
    """Draw from the tokens whose information is nearest to the expected one, until their probabilities sum to p; 1 is
    off."""
    tfs: Annotated[float, Within(0, 1, above=True)] = 1.0
    """Tail-free sampling: keep this share of the curve's bend; 1 is off."""
    skew: Annotated[float, Within(-10, 10)] = 0.0
    """Bend the draw towards likely tokens (below 0) or unlikely tokens (above 0); 0 is off."""
    smoothing_factor: Annotated[float, Within(0, 100)] = 0.0
    """Quadratic smoothing of the logits around the likeliest; 0 is off."""
    temperature_last: bool = False
    """Apply the temperature after the other filters."""
    min_temp: Annotated[float, Within(0, 10)] = 1.0
    """Dynamic temperature, lower end; on when max_temp is greater."""
    max_temp: Annotated[float, Within(0, 10)] = 1.0
    """Dynamic temperature, upper end; on when greater than min_temp."""
    temp_exponent: Annotated[float, Within(0, 10, above=True)] = 1.0
    """Dynamic temperature: exponent of the normalized entropy."""
    repetition_penalty: Annotated[float, Within(0, 10, above=True)] = 1.0
    """Divide the (positive) logits of tokens that prompt or answer already hold; 1 is off."""
    penalty_range: Annotated[int, Within(-1, 1 << 31)] = -1
    """The number of newest tokens that repetition_penalty looks at; -1 is all."""
    repetition_decay: Annotated[int, Within(0, 1 << 31)] = 0
    """Tokens over which repetition_penalty fades out behind penalty_range; 0 ends it at once."""
    frequency_penalty: Annotated[float, Within(-2, 2)] = 0.0
    """Subtract this for each time the answer holds the token; 0 is off."""
    presence_penalty: Annotated[float, Within(-2, 2)] = 0.0
    """Subtract this once if the answer holds the token; 0 is off."""
    dry_multiplier: Annotated[float, Within(0, 100)] = 0.0
    """DRY: strength of the penalty on tokens that would continue a repeated sequence; 0 is off."""
    dry_base: Annotated[float, Within(1, 10)] = 1.75
    """DRY: growth of the penalty per token of the repeated sequence."""
    dry_allowed_length: Annotated[int, Within(1, 1000)] = 2
    """DRY: longest repeated sequence that costs nothing."""
    dry_range: Annotated[int, Within(0, 1 << 31), Then(_dry_range)] = 0
    """DRY: the number of newest tokens that are searched. 0 is all. Other values must be more than 20, the length of
    the longest sequence that DRY looks for."""
    dry_sequence_breakers: Annotated[
        tuple[Annotated[str, Length(1, 64)], ...],
        Length(most=64),
    ] = ()
    """DRY: texts whose tokens end a repeated sequence. Empty: the engine's own list of punctuation."""
    xtc_probability: Annotated[float, Within(0, 1)] = 0.0
    """XTC: the probability with which the likeliest tokens are left out; 0 is off."""
    xtc_threshold: Annotated[float, Within(0, 1)] = 0.1
    """XTC: the least probability of a token that may be left out."""
    mirostat_mode: Literal[0, 2] = 0
    """2 draws by Mirostat 2.0; 0 is off."""
    mirostat_tau: Annotated[float, Within(0, 100)] = 1.5
    """Mirostat: target surprise, in bits."""
    mirostat_eta: Annotated[float, Within(0, 1)] = 0.3
    """Mirostat: learning rate."""
    logit_bias: LogitBias = None
    """Values from -100 to 100, added to the logits of token ids. On the wire the ids are strings of decimal digits."""
    banned_tokens: Annotated[tuple[TokenId, ...], Length(most=4096)] = ()
    """Token ids that are never drawn."""
    allowed_tokens: Annotated[tuple[TokenId, ...], Length(most=4096)] = ()
    """The only token ids that may be drawn; empty is all."""
    ignore_eos: bool = False
    """Never draw a token that ends the answer."""
    cfg_scale: Annotated[float, Within(0, 20)] = 1.0
    """Classifier-free guidance: weight of the prompt against negative_prompt; 1 is off."""
    seed: Annotated[int, Within(0, 1 << 63, below=True)] | None = None
    """Seed of this request's draws. Unset: a random seed."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def check(self) -> None:
        """Raise FieldsDisagree for values that do not go together."""
        if self.min_temp >= self.max_temp and (self.min_temp, self.max_temp) != (1.0, 1.0):
            raise FieldsDisagree(
                "min_temp", f"is {self.min_temp:.15g}: must be less than max_temp, which is {self.max_temp:.15g}"
            )
        both = set(self.allowed_tokens).intersection(self.banned_tokens)
        if both:
            raise FieldsDisagree("banned_tokens", f"holds {min(both)}, which allowed_tokens holds too: leave one out")


# Say which field of a request does not fit, with its name, its value and its limit. Text is never quoted.


_MUST_BE = {
    str: "a string",
    bytes: "a bin of token ids (u32, little endian)",
    dict: "a map of role and content",
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
}
"""The values of a type that can be wanted."""

_SHOWN_NAME = 64
"""Characters of an unknown field's name that an error repeats."""

_LISTED_NAMES = 16
"""Most names that an error lists if no known name is similar. A request has more fields than that."""


def request_error(
    flaw: Flaw,
    known: Iterable[str],
    given: Mapping[str, str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> RequestError:
    """Return one sentence that names the field, its value and its limit. Text is never shown, only its length.

    known      names that the request takes
    given      {field: the other name that it was given by}
    elsewhere  {name that the request does not take: what to do instead}
    """
    if flaw.path and isinstance(flaw.path[-1], bytes):
        shown = flaw.path[-1][:_SHOWN_NAME].decode(errors="replace")
        return RequestError(f"the name {shown!r} is a bin: send names as strings", field=shown)
    path, problem = [str(part) for part in flaw.path], flaw.problem
    shown = ".".join([given.get(path[0], path[0]), *path[1:]]) if path else None
    if isinstance(problem, FieldsDisagree):
        return RequestError(f"{shown} {problem.rule}", field=shown)
    if problem is None:
        return RequestError(f"{shown} is missing", field=shown)
    if isinstance(problem, Allowed):
        rule = f"must be {_wanted(flaw.value, problem, path[0])}"
    elif isinstance(problem, str):
        rule = problem
        if len(path) > 1 and isinstance(flaw.value, dict):
            return RequestError(
                f"{shown}: {rule}", field=shown
            )  # something in the map is wrong, and not that it is one
    else:
        return _unknown(path, [*(known if len(path) == 1 else problem)], elsewhere)
    return RequestError(f"{shown} is {_show(flaw.value)}: {rule}" if shown else rule, field=shown)


def _unknown(path: list[str], names: list[str], elsewhere: Mapping[str, str]) -> RequestError:
    if len(path) == 1 and path[0] in elsewhere:
        return RequestError(f"unknown field {path[0]!r}: {elsewhere[path[0]]}", field=path[0])
    shown = ".".join(path)
    shown = f"{shown[:_SHOWN_NAME]}..." if len(shown) > _SHOWN_NAME else shown
    near = difflib.get_close_matches(path[-1][:_SHOWN_NAME], names, n=1)
    others = f"known are {', '.join(sorted(names))}" if len(names) <= _LISTED_NAMES else "none has a similar name"
    return RequestError(f"unknown field {shown!r}: {f'did you mean {near[0]!r}?' if near else others}", field=shown)


def _wanted(value: Any, wanted: Allowed, name: str) -> str:
    """Return which values a field takes, or the one bound that a value of the right type is beyond."""
    kind, bounds = wanted.kind, wanted.bounds
    if isinstance(kind, tuple):
        return " or ".join(map(repr, kind))
    if isinstance(bounds, Within):
        right = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
        return _beyond(value, bounds, kind) if right else _range(_MUST_BE[kind], bounds)
    if isinstance(bounds, Length):
        unit = " " if kind is list else " characters "
        if len(value) < bounds.least:
            return f"at least {bounds.least}{unit if bounds.least > 1 or kind is list else ' character '}long"
        return f"at most {bounds.most}{unit}long"
    if kind is not list:
        return _MUST_BE[kind]
    items = get_args(wanted.items)[0] if get_origin(wanted.items) is Annotated else wanted.items
    return f"an array of {({str: 'strings', int: 'token ids'}).get(items, name)}"


def _beyond(value: float, within: Within, kind: type) -> str:
    low = value < within.least or (within.above and value == within.least)
    bound = within.least if low else within.most
    words = ("more than" if within.above else "at least") if low else ("less than" if within.below else "at most")
    return f"{words} {bound if kind is int else format(bound, '.15g')}"


def _range(rule: str, within: Within) -> str:
    """Return bounds in words, such as "a finite number from 0 to 10"."""
    if not within.above and not within.below:
        return f"{rule} from {within.least:.15g} to {within.most:.15g}"
    low, high = "more than" if within.above else "at least", "less than" if within.below else "at most"
    return f"{rule}, {low} {within.least} and {high} {within.most}"


def _show(value: Any) -> str:
    """Return a number, true, false or null as text. For any other value return only its type and length.

    Another value may be a prompt. Types are named as in msgpack and JSON, because the client may be written in another
    language than Python.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    for kind, name, unit in ((str, "a string", "character"), (bytes, "a bin", "byte"), (list, "an array", "element")):
        if isinstance(value, kind):
            return f"{name} of {len(value)} {unit}{'' if len(value) == 1 else 's'}"
    return "a map" if isinstance(value, dict) else f"a {type(value).__name__}"
