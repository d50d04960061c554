"""What a client may ask of a model: the body of GENERATE, validated.

The worker is the authority; clients send what they are given and get an error that names the field. Defaults are
neutral (the engines' own are not) and stand here once.
"""

import difflib
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from protocol.codec import unpack_body
from protocol.errors import FrameError, RequestError


class SamplingParams(BaseModel):
    """How the next token is drawn. Every default leaves the model's own distribution as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    temperature: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 1.0
    """0 is greedy: always the likeliest token."""
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Draw from the k likeliest tokens; 0 is off."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    """Draw from the smallest set of tokens whose probabilities sum to p; 1 is off."""
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Drop tokens less likely than this share of the likeliest; 0 is off."""
    top_a: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Drop tokens less likely than this times the square of the likeliest's probability; 0 is off."""
    typical_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    """Draw from the tokens nearest to the expected information whose probabilities sum to p; 1 is off."""
    tfs: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    """Tail-free sampling: keep this share of the curve's bend; 1 is off."""
    skew: Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)] = 0.0
    """Bends the draw towards likely (negative) or unlikely tokens; 0 is off."""
    smoothing_factor: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    """Quadratic smoothing of the logits around the likeliest; 0 is off."""
    temperature_last: bool = False
    """Apply the temperature after the other filters."""
    min_temp: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 1.0
    """Dynamic temperature, lower end; on when max_temp is greater."""
    max_temp: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 1.0
    """Dynamic temperature, upper end; on when greater than min_temp."""
    temp_exponent: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 1.0
    """Dynamic temperature: exponent of the normalized entropy."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 1.0
    """Divide the (positive) logits of tokens that prompt or answer already hold; 1 is off."""
    penalty_range: Annotated[int, Field(ge=-1, le=1 << 31)] = -1
    """Newest tokens that repetition_penalty looks at; -1 is all."""
    repetition_decay: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    """Tokens over which repetition_penalty fades out behind penalty_range; 0 ends it at once."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    """Subtract this for each time the answer holds the token; 0 is off."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    """Subtract this once if the answer holds the token; 0 is off."""
    dry_multiplier: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    """DRY: strength of the penalty on tokens that would continue a repeated sequence; 0 is off."""
    dry_base: Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)] = 1.75
    """DRY: growth of the penalty per token of the repeated sequence."""
    dry_allowed_length: Annotated[int, Field(ge=1, le=1000)] = 2
    """DRY: longest repeated sequence that costs nothing."""
    dry_range: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    """DRY: newest tokens that are searched; 0 is all, else more than 20."""
    dry_sequence_breakers: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64)], ...],
        Field(strict=False, max_length=64, fail_fast=True),
    ] = ()
    """DRY: texts whose tokens end a repeated sequence; empty is the engine's own punctuation."""
    xtc_probability: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """XTC: how often the likeliest tokens are left out; 0 is off."""
    xtc_threshold: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1
    """XTC: the least probability of a token that may be left out."""
    mirostat_mode: Literal[0, 2] = 0
    """2 draws by Mirostat 2.0; 0 is off."""
    mirostat_tau: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.5
    """Mirostat: target surprise, in bits."""
    mirostat_eta: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.3
    """Mirostat: learning rate."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids, -100 to 100."""
    banned_tokens: Annotated[tuple[int, ...], Field(strict=False, max_length=4096, fail_fast=True)] = ()
    """Token ids that are never drawn."""
    allowed_tokens: Annotated[tuple[int, ...], Field(strict=False, max_length=4096, fail_fast=True)] = ()
    """The only token ids that may be drawn; empty is all."""
    ignore_eos: bool = False
    """Never draw a token that ends the answer."""
    cfg_scale: Annotated[float, Field(ge=0, le=20, allow_inf_nan=False)] = 1.0
    """Classifier-free guidance: weight of the prompt against negative_prompt; 1 is off."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    """Seed of this request's draws; unset draws one."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    role: Annotated[str, Field(pattern="^(system|user|assistant|tool)$")]
    content: str


class GenerateRequest(SamplingParams):
    """The body of GENERATE. Exactly one of prompt, messages and token_ids."""

    prompt: str | None = None
    """Text, taken as it is (no template)."""
    messages: Annotated[tuple[ChatMessage, ...], Field(strict=False, min_length=1, fail_fast=True)] | None = None
    """A conversation, rendered with the model's own chat template."""
    token_ids: bytes | None = None
    """Token ids, u32 little endian."""
    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    """Most tokens to generate; unset is what is left of the context."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        Field(strict=False, max_length=16, fail_fast=True),
    ] = ()
    """Strings that end the answer; they are not part of it."""
    min_tokens: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    """Least tokens to generate: until then no end token is drawn and no stop string is looked for."""
    stop_token_ids: Annotated[tuple[int, ...], Field(strict=False, max_length=64, fail_fast=True)] = ()
    """Token ids that end the answer, beside the model's own; their text is not part of it."""
    banned_strings: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        Field(strict=False, max_length=64, fail_fast=True),
    ] = ()
    """Strings that the answer does not hold, whatever their case: it goes back and takes another way."""
    token_healing: bool = False
    """Draw the prompt's last token anew among those that begin with its text."""
    logprobs: bool = False
    """Report the natural logarithm of each token's probability, before any sampling parameter."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    """Report so many of the likeliest tokens beside each; needs logprobs."""
    negative_prompt: str | None = None
    """The text that cfg_scale leads away from; default the prompt's beginning-of-sequence token alone."""

    @field_validator("token_ids")
    @classmethod
    def _whole_ids(cls, token_ids: bytes | None) -> bytes | None:
        if token_ids is not None and (not token_ids or len(token_ids) % 4):
            raise ValueError("must be at least one id of 4 bytes (u32, little endian)")
        return token_ids

    @model_validator(mode="after")
    def _one_prompt(self) -> "GenerateRequest":
        given = [name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of prompt, messages and token_ids, not {len(given)}")
        return self


def parse_generate(body: bytes) -> GenerateRequest:
    """The validated request in a GENERATE body. Raises RequestError naming the field, its value and its limit."""
    try:
        fields = unpack_body(body)
    except FrameError as e:
        raise RequestError(e.message, field="body") from None
    try:
        return GenerateRequest.model_validate(fields)
    except ValidationError as e:
        raise _request_error(e.errors(include_url=False)[0]) from None


_MUST_BE = {
    "string_type": "a string",
    "string_pattern_mismatch": "system, user, assistant or tool",
    "bytes_type": "a bin of token ids (u32, little endian)",
    "model_type": "a map of role and content",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "string_too_short": "at least {min_length} character long",
    "string_too_long": "at most {max_length} characters long",
    "too_short": "at least {min_length} long",
    "too_long": "at most {max_length} long",
}
"""What a value must be, by pydantic's name for what is wrong with it."""

_SHOWN_NAME = 64
"""Characters of an unknown field's name that an error repeats."""


def _request_error(error: Any) -> RequestError:
    """One sentence that names the field, its value and its limit. Text is never shown, only its length."""
    path = [str(part) for part in error["loc"]]
    field = ".".join(path) or None
    kind = error["type"]
    if kind in ("extra_forbidden", "invalid_key"):
        known = list(GenerateRequest.model_fields if len(path) == 1 else ChatMessage.model_fields)
        field = f"{field[:_SHOWN_NAME]}..." if field and len(field) > _SHOWN_NAME else field
        near = difflib.get_close_matches(path[-1][:_SHOWN_NAME], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
        return RequestError(f"unknown field {field!r}: {hint}", field=field)
    if kind == "missing":
        return RequestError(f"{field} is missing", field=field)
    if kind == "value_error":
        rule = error["msg"].removeprefix("Value error, ")
    elif kind in ("finite_number", "float_type", "int_type"):
        rule = f"must be {_number_rule(path[-1])}"
    elif kind == "tuple_type":
        rule = f"must be a list of {'messages' if field == 'messages' else 'strings'}"
    elif kind in _MUST_BE:
        limits = {name: f"{v:.15g}" if isinstance(v, float) else v for name, v in error.get("ctx", {}).items()}
        rule = f"must be {_MUST_BE[kind].format(**limits)}"
    else:
        rule = error["msg"]
    return RequestError(f"{field} is {_show(error['input'])}: {rule}" if field else rule, field=field)


@cache
def _number_rule(name: str) -> str:
    """ "a finite number from 0 to 10", from the field's own bounds."""
    schema = GenerateRequest.model_json_schema()["properties"].get(name, {})
    schema = schema.get("anyOf", [schema])[0]
    rule = "a whole number" if schema.get("type") == "integer" else "a finite number"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{rule} from {low:.15g} to {high:.15g}"
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    bounds = [
        f"{word} {bound if isinstance(bound, int) else format(bound, '.15g')}"
        for word, bound in (("at least", low), ("more than", above), ("at most", high), ("less than", below))
        if bound is not None
    ]
    return ", ".join([rule, *([" and ".join(bounds)] if bounds else [])])


def _show(value: Any) -> str:
    """A number as it is; of all else, which may be somebody's text, the type and the length only."""
    if value is None:
        return "nil"
    if isinstance(value, int | float):
        return repr(value)
    for kind, name, unit in ((str, "string", "character"), (bytes, "bin", "byte"), (list, "list", "element")):
        if isinstance(value, kind):
            return f"a {name} of {len(value)} {unit}{'' if len(value) == 1 else 's'}"
    return "a map" if isinstance(value, dict) else f"a {type(value).__name__}"
