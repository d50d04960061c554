"""The fields of GENERATE's body, and their validation.

The worker decides what is valid. Clients send options unchecked, and get an error that names the field.
"""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from protocol.chat import ChatFields, ChatMessage
from protocol.codec import unpack_body
from protocol.errors import FrameError, RequestError
from protocol.messages import ROUTE_KEYS
from protocol.presets import ALIASES, fill, force
from protocol.sampling_params import SamplingParams, TokenId, request_error
from protocol.values import FieldsDisagree, Length, ReadWith, Then, Unfit, Within, hints_of, read, reader

__all__ = ["ALIASES", "ChatMessage", "GenerateRequest", "SamplingParams", "parse_generate"]

ELSEWHERE = {
    "n": "one request has one answer: send n requests (the Python client's `choices` does)",
    "stream": "every answer is a stream",
} | dict.fromkeys(ROUTE_KEYS, "it is a key of GENERATE's route, which stands before the body")
"""Names that belong in the route, or that only other servers know, each with the remedy."""

CONSTRAINTS = ("json_schema", "regex", "choice")
"""Fields that constrain the shape of the answer."""
LEAST_LOOP, MOST_LOOP = 12, 4096
"""The lowest and the highest stop_on_loop that is not off."""
MOST_STOP_BYTES = 1 << 16
"""Bytes of all stop strings of a request together, in UTF-8."""
LONGEST_SCHEMA = 1 << 18
"""Characters of a JSON schema, written without spaces."""


def _whole_ids(token_ids: bytes | None) -> bytes | None:
    if token_ids is not None and (not token_ids or len(token_ids) % 4):
        raise ValueError("must be at least one id of 4 bytes (u32, little endian)")
    return token_ids


_STOPS = tuple[Annotated[str, Length(1)], ...]


def _stops(given: Any) -> tuple[str, ...]:
    """Return stop strings. One string stands for a list of one. Raises ValueError, which is Unfit for one of a list."""
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list | tuple):
        raise ValueError("must be a string, or an array of strings")
    stops: tuple[str, ...] = reader(_STOPS)(given, False)
    size = sum(len(each.encode()) for each in stops)
    if size > MOST_STOP_BYTES:
        raise ValueError(f"must have at most {MOST_STOP_BYTES} bytes of text in all, not {size}")
    return stops


def _long_loop(tokens: int) -> int:
    if 0 < tokens < LEAST_LOOP:
        raise ValueError(f"must be 0, which is off, or at least {LEAST_LOOP}: a row of dashes repeats as much")
    return tokens


def _schema_text(given: Any) -> str | None:
    """Return a JSON schema as text without spaces. ``given`` is a map, JSON text or None. Raises ValueError."""
    if not isinstance(given, str | dict):
        if given is None:
            return None
        raise ValueError("must be a JSON schema, as a map or as JSON text")
    if isinstance(given, str) and len(given) > 2 * LONGEST_SCHEMA:  # refuse it before the parser spends time on it
        raise ValueError(f"must be at most {LONGEST_SCHEMA} characters long, written without spaces")
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()  # a lone surrogate is a str, but no text
    except (TypeError, ValueError, RecursionError):  # bin, NaN, or nested without end
        raise ValueError("must be a JSON schema: this is not JSON") from None
    if not isinstance(schema, dict):
        raise ValueError("must be a JSON schema, which is a map")
    if len(text) > LONGEST_SCHEMA:
        raise ValueError(f"must be at most {LONGEST_SCHEMA} characters long, written without spaces")
    return text


class GenerateRequest(SamplingParams, ChatFields):
    """The body of GENERATE. It has exactly one of prompt, messages and token_ids."""

    prompt: str | None = None
    """A text, used as it is, without a chat template."""
    token_ids: Annotated[bytes | None, Then(_whole_ids)] = None
    """Token ids: u32, little endian."""
    max_tokens: Annotated[int, Within(0, 1 << 31)] | None = None
    """Most tokens of the answer. Unset: the model's default or limit, at most what is left of the context. With 0 the
    prompt is only read; a conversation needs at least 1."""
    cut_to_context: bool = False
    """Let the end of the context cut the answer, if max_tokens is more than the prompt leaves. False: refuse such a
    request."""
    stop: Annotated[_STOPS, ReadWith(_stops)] = ()
    """Strings that end the answer and are not part of it. One string stands for a list of one. At most 64 KiB
    together."""
    min_tokens: Annotated[int, Within(0, 1 << 31)] = 0
    """Least tokens of the answer. Until then no end token, stop string or loop ends it."""
    stop_on_loop: Annotated[int, Within(0, MOST_LOOP), Then(_long_loop)] = 0
    """End the answer with finish_reason "loop" when its last tokens, as many as this number, are a block that repeats
    three times or more. 0 is off, else at least 12. Reasoning and tool calls count."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Length(most=64)] = ()
    """Token ids that end the answer, besides the model's own. Their text is not part of it."""
    banned_strings: Annotated[
        tuple[Annotated[str, Length(1, 256)], ...],
        Length(most=64),
    ] = ()
    """Strings that the answer must not hold, in upper or lower case. The engine goes back and draws other tokens. If it
    finds none, the answer ends with finish_reason "banned_strings"."""
    token_healing: bool = False
    """Draw the prompt's last token again, from the tokens whose text begins with its text, so that a prompt may end
    inside a word. No effect on a prompt of one token, or with a special token at its end."""
    json_schema: Annotated[str | None, ReadWith(_schema_text)] = None
    """A JSON schema, as a map or as JSON text. The answer is JSON that validates against it, unless max_tokens cuts it.
    What is not offered is refused by name. Give at most one of json_schema, regex and choice."""
    whitespace_flexible: bool = False
    """Allow a line break and up to 40 blanks between the parts of the JSON that json_schema asks for."""
    regex: Annotated[str, Length(1, 8192)] | None = None
    """A regular expression that the whole answer matches, in the syntax of the Rust crate regex: no look-around, no
    back-references; `\\d` is 0-9."""
    choice: (
        Annotated[
            tuple[Annotated[str, Length(1, 1024)], ...],
            Length(1, 256),
        ]
        | None
    ) = None
    """The answer is one of these strings."""
    logprobs: bool = False
    """Report each token's log-probability (natural) by the model alone, before any sampling parameter."""
    top_logprobs: Annotated[int, Within(0, 20)] = 0
    """How many likeliest tokens to report with each token. Needs logprobs."""
    prompt_logprobs: Annotated[int, Within(0, 20)] | None = None
    """Report the log-probability (as with `logprobs`) of each token of the prompt but the first, and this number of
    likeliest tokens at its place. Tokens of the prompt times this number plus one is at most 1,048,576. Unset: none."""
    prompt_logprobs_from: Annotated[int, Within(1, 1 << 31)] = 1
    """The first token of the prompt, from 0, whose log-probability is reported. What stands before it may come from the
    cache. Needs prompt_logprobs."""
    with_format: bool = False
    """Send how the model writes reasoning and tool calls with the first event (key `format`), and keep their markers in
    the text. Stop strings then act neither in the reasoning nor from the first call on. Needs messages."""
    tool_choice: Literal["auto", "required"] | None = None
    """Constrain tool calls, for a model with a known tool format. "auto": the model decides, and calls have the
    shape of the tool's schema. "required": the answer consists of calls. With "auto" and one of json_schema, regex and
    choice, the answer is calls, or else a text of that shape. Unset: nothing constrains the answer. Needs tools."""
    allowed_tools: Annotated[
        tuple[Annotated[str, Length(1, 256)], ...] | None,
        Length(1, 256),
    ] = None
    """Names of the tools that may be called. Unset: all. Needs tool_choice."""
    parallel_tool_calls: bool = True
    """Allow more than one call in an answer. False needs tool_choice."""
    reasoning_budget: Annotated[int, Within(0, 1 << 31)] | None = None
    """Most tokens of reasoning. Then the worker writes the marker that ends the reasoning. For a model with known
    markers. Needs messages."""
    budget_if_reasoning: bool = False
    """Ignore `reasoning_budget` for a model without known reasoning markers. False: refuse such a request."""
    preset: Literal["none", "steady"] | None = None
    """A set of sampling parameters for options that the request leaves out. "none" switches off the model's preset."""
    negative_prompt: str | None = None
    """The text that cfg_scale leads away from. Unset: the beginning-of-sequence token. A model without such a token
    needs a text."""
    replaced: ClassVar[Mapping[str, float | None]] = MappingProxyType({})
    """The options whose values models.yaml has replaced, as ``presets.force`` returns them."""

    def check(self) -> None:
        """Raise FieldsDisagree or ValueError for values that do not go together."""
        ChatFields.check(self)
        SamplingParams.check(self)
        given = [name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of prompt, messages and token_ids, not {len(given)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise FieldsDisagree(
                "min_tokens", f"is {self.min_tokens}: must be at most max_tokens, which is {self.max_tokens}"
            )
        shapes = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(shapes) > 1:
            raise FieldsDisagree(shapes[1], f"cannot be given together with {shapes[0]}")
        if self.whitespace_flexible and self.json_schema is None:
            raise FieldsDisagree("whitespace_flexible", "is true: needs json_schema")
        if self.top_logprobs and not self.logprobs:
            raise FieldsDisagree("top_logprobs", f"is {self.top_logprobs}: needs logprobs to be true")
        self._check_prompt_logprobs()
        self._check_format()
        if self.negative_prompt is not None and self.cfg_scale == 1:
            raise FieldsDisagree("negative_prompt", "does nothing while cfg_scale is 1: give another cfg_scale")

    def _check_prompt_logprobs(self) -> None:
        if self.max_tokens == 0 and self.messages is not None:
            raise FieldsDisagree("max_tokens", "is 0: must be at least 1 for messages")
        if self.prompt_logprobs is None:
            if self.prompt_logprobs_from != 1:
                raise FieldsDisagree("prompt_logprobs_from", f"is {self.prompt_logprobs_from}: needs prompt_logprobs")
        elif self.token_healing or self.cfg_scale != 1:
            other = "token_healing" if self.token_healing else "cfg_scale"
            raise FieldsDisagree("prompt_logprobs", f"cannot be given together with {other}")

    def _check_format(self) -> None:
        if self.messages is None:
            for name in ("with_format", "reasoning_budget"):
                if getattr(self, name) not in (None, False):
                    raise FieldsDisagree(name, "needs messages: the model's chat template tells how it writes")
        if self.tool_choice is not None and not self.tools:
            raise FieldsDisagree("tool_choice", f"is {self.tool_choice}: needs tools")
        for name, unset in (("allowed_tools", None), ("parallel_tool_calls", True)):
            if self.tool_choice is None and getattr(self, name) != unset:
                raise FieldsDisagree(name, "needs tool_choice")

    @property
    def constraint(self) -> tuple[str, str] | None:
        """The request's constraint as (field, text), or None. The text of choice is a JSON list. The text of
        json_schema holds ``whitespace_flexible`` in the form that the library llguidance reads."""
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        if self.whitespace_flexible and self.json_schema is not None:
            schema = json.loads(self.json_schema) | {"x-guidance": {"whitespace_flexible": True}}
            return "json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        return next(((name, text) for name in CONSTRAINTS[:2] if (text := getattr(self, name)) is not None), None)

    def check_limits(self, limits: Mapping[str, Any], given: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raise RequestError, which names the field, if a value is beyond a model's hard limits.

        limits  the model's limits, with keys of ``sampling_defaults.LIMITS``. The prompt's tokens are not checked here
        given   {field: the other name that it was given by}
        """
        for name, most in limits.items():
            value = getattr(self, name, None)
            if value is not None and value > most:
                shown = given.get(name, name)
                raise RequestError(f"{shown} is {value:.15g}: this model allows at most {most:.15g}", field=shown)
        if self.min_tokens > limits.get("max_tokens", self.min_tokens):
            shown = given.get("min_tokens", "min_tokens")
            raise RequestError(
                f"{shown} is {self.min_tokens}: this model allows at most {limits['max_tokens']} tokens", field=shown
            )


def parse_generate(
    body: bytes,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    limits: Mapping[str, Any] = MappingProxyType({}),
    variables: Mapping[str, Any] = MappingProxyType({}),
    forced: Mapping[str, Any] = MappingProxyType({}),
) -> GenerateRequest:
    """Return the validated request in the body of a GENERATE.

    defaults, limits  those of the model, which ``protocol.sampling_defaults`` has checked
    variables         variables of the chat template, for a conversation that does not set them
    forced            option → value that the model has for every request, checked as ``defaults`` are

    Raises RequestError, which names the field, its value and its limit.
    """
    try:
        fields = unpack_body(body)
    except FrameError as e:
        raise RequestError(e.message, field="body") from None
    given = _rename(fields)
    if type(top_k := fields.get("top_k")) is int and top_k == -1:
        fields["top_k"] = 0  # other servers write -1 for off
    replaced = force(fields, forced)
    set_by_model = fill(fields, defaults) | forced.keys()
    if variables and fields.get("messages") is not None and isinstance(fields.get("template_kwargs"), dict | None):
        fields["template_kwargs"] = {**variables, **(fields.get("template_kwargs") or {})}
    try:
        request = read(GenerateRequest, fields)
    except Unfit as e:
        error = request_error(e.flaws[0], [*hints_of(GenerateRequest), *ALIASES], given, ELSEWHERE)
        if named := sorted(set_by_model.intersection(re.findall(r"\w+", error.message))):
            by_force = forced.keys() & set(named)
            error.message += f" ({' and '.join(named)} by this model's {'forced values' if by_force else 'defaults'})"
        try:
            raise error from None
        finally:
            del error  # its traceback holds this frame, and with it the prompt
    request.check_limits(limits, given)
    return request.but(replaced=replaced) if replaced else request


def _rename(fields: dict[str, Any]) -> dict[str, str]:
    """Replace aliases by the names of the fields. Return {name: alias}. Raises RequestError for a field given twice."""
    given: dict[str, str] = {}
    for alias, name in ALIASES.items():
        if alias not in fields:
            continue
        if name in fields:
            other = given.get(name, name)
            raise RequestError(f"{alias} and {other} are the same field: give one of them", field=alias)
        fields[name] = fields.pop(alias)
        given[name] = alias
    return given
