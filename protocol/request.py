"""What a client may ask of a model: the body of GENERATE, validated.

The worker is the authority; clients send what they are given and get an error that names the field. Defaults are neutral
(the engines' own are not) and stand here once.
"""

import difflib
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol.codec import unpack_body
from protocol.errors import FrameError, RequestError

Finite = Field(allow_inf_nan=False)


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
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 1.0
    """Divide the (positive) logits of tokens that prompt or answer already hold; 1 is off."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    """Subtract this for each time the answer holds the token; 0 is off."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    """Subtract this once if the answer holds the token; 0 is off."""
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
    messages: Annotated[tuple[ChatMessage, ...], Field(strict=False, min_length=1)] | None = None
    """A conversation, rendered with the model's own chat template."""
    token_ids: bytes | None = None
    """Token ids, u32 little endian."""
    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    """Most tokens to generate; unset is what is left of the context."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(strict=False, max_length=16)
    ] = ()
    """Strings that end the answer; they are not part of it."""

    @model_validator(mode="after")
    def _one_prompt(self) -> "GenerateRequest":
        given = [name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of prompt, messages and token_ids, not {len(given)}")
        if self.token_ids is not None and (not self.token_ids or len(self.token_ids) % 4):
            raise ValueError("token_ids: give at least one id, 4 bytes (u32, little endian) each")
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


_SAFE_TO_SHOW = (int, float, bool, type(None))


def _request_error(error: Any) -> RequestError:
    # tuple fields carry the member's index in loc; a union's branch names are noise to the reader
    path = [str(part) for part in error["loc"] if not str(part).startswith(("constrained", "function", "tuple["))]
    field = ".".join(path) or None
    if error["type"] == "extra_forbidden":
        known = list(GenerateRequest.model_fields) if len(path) == 1 else list(ChatMessage.model_fields)
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
        return RequestError(f"unknown field {field!r}: {hint}", field=field)
    value = error["input"]
    # prompts and messages must not end up in an error: show numbers only, else the type
    shown = f"{value!r}" if isinstance(value, _SAFE_TO_SHOW) else f"a {type(value).__name__}"
    message = error["msg"].removeprefix("Value error, ")
    return RequestError(f"{field} is {shown}: {message}" if field else message, field=field)
