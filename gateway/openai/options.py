"""Turn the options of OpenAI's API into the options of this project. Pure.

The worker checks the values, and its errors name the option. This module refuses what the gateway does not offer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from answer_formats.parser import Tool
from gateway.http.errors import ApiError
from gateway.http.notes import Notes
from gateway.openai.foreign_options import read_thinking, refuse, settle, translate
from gateway.openai.messages import is_begun, read_messages
from gateway.openai.tools import read_tools
from protocol.aliases import ALIASES
from protocol.client.request_options import RequestOptions
from protocol.limits import MAX_STRING
from protocol.messages import ROUTE_KEYS

MOST_ANSWERS: Final = 128
"""Largest ``n``, as at OpenAI."""
MOST_TOP: Final = 20
"""Most of the likeliest tokens that are named at one place."""
MOST_PROMPT_LOGPROBS: Final = 1 << 21
"""Most log-probabilities of prompts in one answer, where a character counts as a token. As JSON, 80 bytes each."""
MOST_REQUESTS: Final = 1024
"""Most answers of one request for completions: its prompts times ``n``."""
CHAT_ONLY: Final = frozenset(
    {
        "messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "template_kwargs",
        "reasoning_effort", "add_generation_prompt", "continue_final_message", "allowed_tools", "with_format",
        "reasoning_budget", "enable_thinking", "thinking", "reasoning", "verbosity", "response_prefix",
    }
)  # fmt: skip
"""Options of chats: they go to the chat template, or say how the model reasons and calls tools."""
UNASKED: Final[dict[str, tuple[Any, ...]]] = {
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "add_generation_prompt": (True,),
}
"""Values of such options that ask a completion for nothing. Some clients send them always."""
RESERVED: Final = frozenset({"on_behalf_of", "trace_ids", "notes", "progress", "prompt_logprobs_from"})
"""Options that only the gateway itself gives."""
OWN: Final = (
    frozenset(RequestOptions.__annotations__) - CHAT_ONLY - RESERVED - ALIASES.keys() - {"token_ids", "prompt_logprobs"}
)
"""Options of this project that both kinds of requests give by their own names. Only the gateway names the caller
and the HTTP request."""
KNOWN: Final = (
    OWN | CHAT_ONLY | {"model", "n", "stream", "stream_options", "response_format", "prompt", "token_ids"}
) - {"allowed_tools", "with_format"}
"""Names of all options, without other servers' names for them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request of OpenAI's API, in the terms of this project.

    model          name of the model, as the sender has written it; empty for the default model
    options        keywords of ``AsyncClient.generate``
    names          fields of ``options`` that the sender calls otherwise: {our name: the sender's}
    n              number of answers
    stream         whether the answer is streamed
    include_usage  whether the stream ends with an event that counts the tokens
    tools          the tools that the model may call
    notes          what was ignored or changed
    echo           whether the answer begins with the prompt
    vllm_top       vLLM's ``prompt_logprobs``: the number of likeliest tokens that the answer names for each place of
                   the prompt. None: the answer has no such list
    """

    model: str
    options: RequestOptions
    names: dict[str, str]
    n: int
    stream: bool
    include_usage: bool
    tools: tuple[Tool, ...] = ()
    notes: Notes = field(default_factory=Notes)
    echo: bool = False
    vllm_top: int | None = None


def read_chat(body: dict[str, Any], notes: Notes) -> Wanted:
    """Return the request in the body of a POST to /v1/chat/completions. Raises ApiError, which names the option.

    notes  filled with what is ignored or changed
    """
    names: dict[str, str] = {"allowed_tools": "tool_choice"}
    given = translate(body, names)
    messages = given.pop("messages", None)
    options: dict[str, Any] = {"messages": read_messages(messages, notes), "with_format": True}
    parallel = _read_bool(given, "parallel_tool_calls", default=True)
    offered = read_tools(given.pop("tools", None), given.pop("tool_choice", None), parallel, notes)
    options |= offered.options
    variables = read_thinking(given, names)
    if more := _read_map(given, "chat_template_kwargs", names.get("chat_template_kwargs")):
        variables |= more
        names["template_kwargs"] = names.get("chat_template_kwargs", "chat_template_kwargs")
    if variables:
        options["template_kwargs"] = variables
    for name in ("add_generation_prompt", "continue_final_message", "reasoning_budget"):
        if (value := given.pop(name, None)) is not None:
            options[name] = value
    if "reasoning_budget" in options and not notes.refuse:
        options["budget_if_reasoning"] = True
    if (prefix := given.pop("response_prefix", None)) not in (None, ""):
        if not isinstance(prefix, str):
            raise ApiError(400, "response_prefix must be a string", param="response_prefix")
        options["messages"].append({"role": "assistant", "content": prefix})
    if prefix or is_begun(messages):
        options["continue_final_message"] = True
        options.pop("add_generation_prompt", None)
    for name in ("prompt", "token_ids"):
        if given.pop(name, None):
            raise ApiError(400, f"{name} is for /v1/completions: a chat has messages", param=name)
    given.pop("add_special_tokens", None)  # the template writes them
    return replace(_read_rest(given, options, names, notes), tools=offered.tools)


def read_completion(body: dict[str, Any], notes: Notes) -> tuple[list[str | list[int]], Wanted]:
    """Return the prompts, and the request without them, in the body of a POST to /v1/completions. Raises ApiError.

    notes  filled with what is ignored or changed
    """
    names: dict[str, str] = {}
    given = translate(body, names)
    for name in sorted(CHAT_ONLY):
        if given.pop(name, None) not in (None, [], {}, "", False, *UNASKED.get(name, ())):
            shown = names.get(name, name)
            raise ApiError(400, f"{shown} is for /v1/chat/completions: a completion has a prompt", param=shown)
    called = "prompt" if given.get("token_ids") is None else "token_ids"
    if called == "token_ids" and given.get("prompt") is not None:
        raise ApiError(400, "give prompt or token_ids, not both", param="token_ids")
    prompts = _read_prompts(given.pop(called, None), called)
    given.pop("prompt", None)
    given.pop("token_ids", None)
    options: dict[str, Any] = {}
    logprobs = given.pop("logprobs", None)  # a number here: how many of the likeliest tokens
    if type(logprobs) is int:
        options |= {"logprobs": True, "top_logprobs": logprobs}
    elif logprobs:  # this project's own form of the option
        options["logprobs"] = logprobs
    names |= {"token_ids": called} | ({"top_logprobs": "logprobs"} if type(logprobs) is int else {})
    if (echo := _read_bool(given, "echo")) and "logprobs" in options:
        options["prompt_logprobs"] = options.get("top_logprobs", given.get("top_logprobs") or 0)
        names["prompt_logprobs"] = "logprobs"
    wanted = replace(_read_rest(given, options, names, notes), echo=echo)
    _check_prompts(prompts, wanted, called)
    if len(prompts) * wanted.n > MOST_REQUESTS:
        raise ApiError(
            400, f"{len(prompts)} prompts with n = {wanted.n}: at most {MOST_REQUESTS} answers at once", param=called
        )
    return prompts, wanted


def _check_prompts(prompts: Sequence[str | list[int]], wanted: Wanted, called: str) -> None:
    """Raise ApiError for prompts with too many log-probabilities for one answer."""
    top = wanted.options.get("prompt_logprobs")
    size = sum(map(len, prompts))
    if type(top) is int and size * (top + 1) > MOST_PROMPT_LOGPROBS:
        raise ApiError(
            400,
            f"{called} has {size} characters or token ids: with {top} of the likeliest tokens at each place, "
            f"log-probabilities of at most {MOST_PROMPT_LOGPROBS // (top + 1)} are sent at once",
            param=called,
        )


def _read_prompts(given: Any, called: str) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(type(each) is int for each in given):
            return [given]
        if all(isinstance(each, str) or (isinstance(each, list) and each) for each in given):
            return given
    raise ApiError(400, f"{called} must be a string, an array of token ids, or an array of such prompts", param=called)


def read_model(given: Any) -> str:
    """Return the name of a model; an empty one for none, which stands for the default model.

    Raises ApiError for something that cannot be a name, which no frame could carry.
    """
    if given is None:
        return ""
    if not isinstance(given, str):
        raise ApiError(400, "model must be the name of a model: GET /v1/models lists them", param="model")
    if len(given) > MAX_STRING:
        raise ApiError(
            404, f"no model {given[:64]!r}... is configured: GET /v1/models lists them", code="model_not_found",
            param="model",
        )  # fmt: skip
    return given


def _read_rest(given: dict[str, Any], options: dict[str, Any], names: dict[str, str], notes: Notes) -> Wanted:
    model = read_model(given.pop("model", None))
    n = given.pop("n", 1)
    if type(n) is not int or not 1 <= n <= MOST_ANSWERS:
        raise ApiError(400, f"n must be a whole number from 1 to {MOST_ANSWERS}", param=names.get("n", "n"))
    if given.get("best_of") == n:
        del given["best_of"]
    stream = _read_bool(given, "stream")
    include_usage = _read_stream_options(given, notes)
    vllm_top = _read_prompt_logprobs(given, options, names, n, stream=stream)
    if (shape := given.pop("response_format", None)) is not None:
        options |= read_format(shape, notes)
        names["json_schema"] = "response_format"
    for name, value in given.items():
        shown = names.get(name, name)
        if name in RESERVED:
            raise ApiError(400, f"{name} is given by the gateway itself: leave it out", param=name)
        if name not in OWN:
            settle(name, value, KNOWN, notes)
            continue
        if name in options and options[name] != value:
            raise ApiError(400, f"{shown} is given twice: {names.get(name, name)} says it, too", param=shown)
        if name in ROUTE_KEYS:
            if name == "priority" and value == 0:
                continue  # vLLM's number for the usual priority
            if not isinstance(value, str | int | float) or len(str(value)) > MAX_STRING:
                raise ApiError(
                    400, f"{name} must be a number, or a text of at most {MAX_STRING} characters", param=name
                )
        options[name] = value
    options.setdefault("cut_to_context", True)
    return Wanted(model, cast(RequestOptions, options), names, n, stream, include_usage, notes=notes, vllm_top=vllm_top)


def _read_stream_options(given: dict[str, Any], notes: Notes) -> bool:
    """Return whether the stream ends with the usage. vLLM's ``continuous_usage_stats`` asks for more of them."""
    stream_options = _read_map(given, "stream_options") or {}
    include_usage = _read_bool(stream_options, "include_usage", "stream_options.include_usage")
    _read_bool(stream_options, "include_obfuscation", "stream_options.include_obfuscation")  # nothing to hide here
    for name, value in stream_options.items():
        if value is not None and value is not False:
            notes.ignore(f"stream_options.{name}")
    return include_usage


def _read_prompt_logprobs(
    given: dict[str, Any], options: dict[str, Any], names: dict[str, str], n: int, *, stream: bool
) -> int | None:
    """Return vLLM's ``prompt_logprobs``, and ask for as many of the likeliest tokens as this or ``echo`` needs."""
    top: int | None = given.pop("prompt_logprobs", None)
    if top is not None:
        if type(top) is not int or not 0 <= top <= MOST_TOP:
            raise ApiError(400, f"prompt_logprobs must be a whole number from 0 to {MOST_TOP}", param="prompt_logprobs")
        if stream:
            raise refuse("prompt_logprobs", "a stream does not have it: echo with logprobs works in streams, too")
        echoed = options.get("prompt_logprobs")
        if type(echoed) is not int or echoed < top:
            options["prompt_logprobs"] = top
            names.pop("prompt_logprobs", None)
    if n > 1 and "prompt_logprobs" in options:
        raise ApiError(
            400, f"n is {n}: with log-probabilities of the prompt there is one answer for each prompt", param="n"
        )
    return top


def read_format(given: Any, notes: Notes) -> dict[str, Any]:
    """Return the option that gives the answer the shape of a ``response_format``. Raises ApiError.

    ``strict: false`` makes no difference: the answer always has the shape of the schema.
    """
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text" or given == {}:
        _note_unknown(given, "response_format", {"type"}, notes)
        return {}
    if kind == "json_object":
        _note_unknown(given, "response_format", {"type", "schema"}, notes)  # with a schema: the form of llama-server
        if given.get("schema") is not None:
            return {"json_schema": _schema(given, "response_format")}
        return {"json_schema": {"type": "object"}, "whitespace_flexible": True}
    if kind == "json_schema":
        _note_unknown(given, "response_format", {"type", "json_schema"}, notes)
        described = given.get("json_schema")
        if not isinstance(described, dict):
            raise ApiError(400, "response_format.json_schema must be an object", param="response_format.json_schema")
        _note_unknown(described, "response_format.json_schema", {"name", "description", "schema", "strict"}, notes)
        return {"json_schema": _schema(described, "response_format.json_schema")}
    raise ApiError(
        400, "response_format.type must be text, json_object or json_schema", param="response_format.type"
    )  # fmt: skip


def _schema(given: dict[str, Any], place: str) -> dict[str, Any]:
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise ApiError(400, f"{place}.schema must be a JSON schema, which is an object", param=f"{place}.schema")
    return schema


def _note_unknown(given: dict[str, Any], place: str, known: set[str], notes: Notes) -> None:
    for name, value in given.items():
        if name not in known and value is not None:
            notes.ignore(f"{place}.{name}")


def _read_bool(given: dict[str, Any], name: str, shown: str | None = None, *, default: bool = False) -> bool:
    value = given.pop(name, None)
    if value is None:
        return default
    if type(value) is not bool:
        raise ApiError(400, f"{shown or name} must be true or false", param=shown or name)
    return value


def _read_map(given: dict[str, Any], name: str, shown: str | None = None) -> dict[str, Any] | None:
    value = given.pop(name, None)
    if value is not None and not isinstance(value, dict):
        raise ApiError(400, f"{shown or name} must be an object", param=shown or name)
    return dict(value) if value is not None else None
