"""Turn the options of OpenAI's API into the options of this project. Pure.

The worker checks the values, and its errors name the option. This module refuses what the gateway does not offer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from gateway.conversation import image_text
from gateway.http.answers import Notes, named, without_load_lines
from gateway.http.errors import JSON_SCHEMA, ApiError, checked, checked_or_none, invalid, unsupported
from gateway.openai.foreign_options import read_thinking, refuse, settle, translate
from protocol.answer_formats.source import Tool
from protocol.client.request_options import RequestOptions
from protocol.limits import MAX_STRING
from protocol.messages import ROUTE_KEYS
from protocol.presets import ALIASES

# Turn the messages of OpenAI's API into the messages of this project.


ROLES: Final = {"developer": "developer", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI's roles, each with the role that chat templates know."""
KEPT: Final = ("name", "tool_call_id")
DROPPED_OF_MESSAGES: Final = frozenset(
    {
        "refusal", "annotations", "parsed", "id", "opts", "reasoning_details", "provider_specific_fields",
        "thinking_blocks", "cache_control", "prefix", "partial", "images", "index", "function_call", "audio",
    }
)  # fmt: skip
"""Keys of messages that say nothing to the model, and are left out. Clients send back assistants' earlier answers with
keys of their own: the package openai adds ``parsed``, LiteLLM ``provider_specific_fields``."""
BEGUN: Final = ("prefix", "partial")
"""Keys that say true of an assistant's last message which the model is to continue: DeepSeek's and Qwen's."""
REASONING: Final = ("reasoning_content", "reasoning")
"""Keys of the reasoning in assistants' earlier answers. Templates know it as ``reasoning_content``."""
NOT_OFFERED: Final = {"audio": "these models read text only", "function_call": "use tool_calls instead"}
"""Keys of messages that are refused, each with the reason. A null is as good as none."""
TEXTS: Final = {"text": "text", "refusal": "refusal"}
"""Types of parts that are text, each with the key that holds it."""
PART_KEYS: Final = frozenset({"type", "text", "refusal", "cache_control", "annotations", "id", "index"})
"""Keys of a text part that are known. Prompts are cached without being asked, so ``cache_control`` changes nothing."""


def is_begun(given: Any) -> bool:
    """Return whether the last message is an assistant's that the model is to continue (``prefix: true``)."""
    last = given[-1] if isinstance(given, list) and given else None
    return isinstance(last, dict) and last.get("role") == "assistant" and any(last.get(key) is True for key in BEGUN)


def read_messages(given: Any, notes: Notes) -> list[dict[str, Any]]:
    """Return the conversation for ``AsyncClient.generate(messages=...)``.

    notes  filled with what is ignored or changed

    Raises ApiError, which names the message, for everything but text. The worker checks the rest.
    """
    if not isinstance(given, list) or not given:
        raise invalid("messages", "must be an array of at least one message")
    return [_read_message(f"messages[{i}]", message, notes) for i, message in enumerate(given)]


def _read_message(place: str, given: Any, notes: Notes) -> dict[str, Any]:
    checked(place, given, dict, "an object with role and content")
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{place}.role", f"must be one of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": ROLES[role]}
    for key, value in given.items():
        if key == "content":
            message[key] = _read_content(f"{place}.content", value, notes, is_result=role == "tool")
        elif key == "tool_calls" and value is not None:
            message[key] = _read_tool_calls(f"{place}.tool_calls", value)
        elif key in KEPT and value is not None:
            message[key] = value
        elif key in REASONING:
            checked_or_none(f"{place}.{key}", value, str)
            if value and role == "assistant" and (written := without_load_lines(value)):
                message["reasoning_content"] = written
        elif key in NOT_OFFERED and value:
            raise unsupported(f"{place}.{key}", f"is not offered: {NOT_OFFERED[key]}")
        elif value is not None and key not in DROPPED_OF_MESSAGES and key not in ("role", *KEPT, "tool_calls"):
            notes.ignore(f"messages.{key}", f"{place}.{key}")
    if message.get("tool_calls"):
        message.setdefault("content", None)  # templates ask whether it is none
    return message


def _read_content(place: str, given: Any, notes: Notes, *, is_result: bool) -> str | None:
    """Return the text of a message. An array of text parts becomes the parts' joined text.

    is_result  whether the message is the result of a tool, in which a picture is replaced
    """
    if given is None or isinstance(given, str):
        return given
    checked(place, given, list, "a string, or an array of text parts")
    texts: list[str] = []
    for i, part in enumerate(given):
        if is_result and (replaced := image_text(part, notes)) is not None:
            texts.append(replaced)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in TEXTS:
            shown = kind[:32] if isinstance(kind, str) else type(part).__name__
            raise unsupported(
                f"{place}[{i}]", f"is of type {shown!r}: these models read text only, so send parts of type 'text'"
            )
        text = checked(f"{place}[{i}].{TEXTS[kind]}", part.get(TEXTS[kind]), str)
        for key, value in part.items():
            if value is not None and key not in PART_KEYS:
                notes.ignore(f"messages.content.{key}", f"{place}[{i}].{key}")
        texts.append(text)
    return "".join(texts)


def _read_tool_calls(place: str, given: Any) -> list[Any]:
    """Return the calls as the client sent them. The worker gives their arguments the form that the template takes.

    ``parsed_arguments`` is left out. The helpers of the package openai add it.
    """
    checked(place, given, list)
    calls: list[Any] = []
    for call in given:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and "parsed_arguments" in function:
            call = call | {"function": {key: value for key, value in function.items() if key != "parsed_arguments"}}
        calls.append(call)
    return calls


# Turn the tools of OpenAI's API, and the choice among them, into the options of this project. Pure.


MOST_TOOLS: Final = 256
NAME: Final = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
"""The names of tools. OpenAI allows 64 letters, digits, underscores and hyphens; MCP servers' names have more."""
FUNCTION_KEYS: Final = ("name", "description", "parameters", "strict")
"""Keys of a function, in the order in which the template sees them."""
DROPPED_OF_TOOLS: Final = frozenset({"returns", "return", "cache_control", "opts", "id"})
"""Further keys of tools and of their functions that are known, and say nothing here."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools of a request.

    options  keywords of ``AsyncClient.generate``
    tools    the tools that the model may call
    """

    options: dict[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()


def read_tools(tools: Any, choice: Any, parallel: bool, notes: Notes) -> Offered:
    """Return what a request says about tools. Raises ApiError, which names the place.

    Tools of other types than functions are OpenAI's own, or the client's. They are left out.

    tools     the value of ``tools``, or None
    choice    the value of ``tool_choice``, or None
    parallel  the value of ``parallel_tool_calls``
    notes     filled with what is ignored or left out
    """
    tools = checked_or_none("tools", tools, list) or []
    if len(tools) > MOST_TOOLS:
        raise invalid("tools", f"has {len(tools)} tools: at most {MOST_TOOLS}")
    known: dict[str, Tool] = {}
    shown: list[dict[str, Any]] = []
    for i, given in enumerate(tools):
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "function":
            notes.change(f"tools: {named(kind)}")
            continue
        tool, function = _read_tool(f"tools[{i}]", given, notes)
        shown.append({"type": "function", "function": function})
        if tool.name in known:
            raise invalid(f"tools[{i}]", f"has the name {tool.name!r}, which another tool has")
        known[tool.name] = tool
    mode, names = _read_choice(choice, known)
    if not known or mode == "none":
        return Offered()
    options: dict[str, Any] = {"tools": shown, "tool_choice": mode}
    if names is not None:
        options["allowed_tools"] = names
        known = {name: known[name] for name in names}
    if not parallel or (isinstance(choice, dict) and choice.get("type") == "function"):
        options["parallel_tool_calls"] = False
    return Offered(options, tuple(known.values()))


def read_name(place: str, tool: dict[str, Any]) -> str:
    """Return the name of a tool. ``place``: where the tool stands in the request. Raises ApiError for a wrong name."""
    name = tool.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(f"{place}.name", "must have 1 to 128 letters, digits and the signs _ . : -")
    return name


def _read_tool(place: str, given: Any, notes: Notes) -> tuple[Tool, dict[str, Any]]:
    """Return a tool, and its function as the template sees it."""
    function = given.get("function") if isinstance(given, dict) else None
    function = checked(f"{place}.function", function, dict, "an object with a name")
    name, parameters = read_name(f"{place}.function", function), function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(400, f"{place}.function.parameters must be a JSON schema, which is an object", param=place)
    if function.get("strict") not in (None, True, False):
        raise invalid(f"{place}.function.strict", "must be true or false")
    for keys, known, inside in ((given, ("type", "function"), ""), (function, FUNCTION_KEYS, "function.")):
        for key, value in keys.items():
            if value is not None and key not in known and key not in DROPPED_OF_TOOLS:
                notes.ignore(f"tools.{inside}{key}", f"{place}.{inside}{key}")
    return Tool(name, parameters or {}), {key: function[key] for key in FUNCTION_KEYS if function.get(key) is not None}


def _read_choice(choice: Any, known: dict[str, Tool]) -> tuple[str, list[str] | None]:
    """Return ("auto", "none" or "required"; the names of the tools that may be called, None for all)."""
    if choice is None or choice in ("auto", "none"):
        return choice or "auto", None
    if choice == "required":
        if not known:
            raise invalid("tool_choice", "is required, and there are no tools of type function: give some")
        return "required", None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "custom":
        raise unsupported("tool_choice", "names a tool of type custom, which was left out: choose a function")
    if kind == "function":
        return "required", [_known_name(choice, "tool_choice", known)]
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
            raise invalid("tool_choice.allowed_tools", "must have mode auto or required, and tools")
        place = "tool_choice.allowed_tools.tools"
        listed = allowed.get("tools")
        if not isinstance(listed, list) or not listed:
            raise invalid(place, "must be an array of at least one tool")
        names = [_known_name(each, f"{place}[{i}]", known) for i, each in enumerate(listed)]
        return allowed["mode"], list(dict.fromkeys(names))
    raise invalid("tool_choice", "must be auto, none or required, or an object of type function or allowed_tools")


def _known_name(given: Any, place: str, known: dict[str, Tool]) -> str:
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(f"{place}.function.name", "must name a tool")
    if name not in known:
        raise ApiError(400, f"{place} names {name[:64]!r}, which is not one of tools", param=f"{place}.function.name")
    return name


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
class ApiRequest:
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


def read_chat(body: dict[str, Any], notes: Notes) -> ApiRequest:
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
        options["messages"].append({"role": "assistant", "content": checked("response_prefix", prefix, str)})
    if prefix or is_begun(messages):
        options["continue_final_message"] = True
        options.pop("add_generation_prompt", None)
    for name in ("prompt", "token_ids"):
        if given.pop(name, None):
            raise invalid(name, "is for /v1/completions: a chat has messages")
    given.pop("add_special_tokens", None)  # the template writes them
    return replace(_read_rest(given, options, names, notes), tools=offered.tools)


def read_completion(body: dict[str, Any], notes: Notes) -> tuple[list[str | list[int]], ApiRequest]:
    """Return the prompts, and the request without them, in the body of a POST to /v1/completions. Raises ApiError.

    notes  filled with what is ignored or changed
    """
    names: dict[str, str] = {}
    given = translate(body, names)
    for name in sorted(CHAT_ONLY):
        if given.pop(name, None) not in (None, [], {}, "", False, *UNASKED.get(name, ())):
            shown = names.get(name, name)
            raise invalid(shown, "is for /v1/chat/completions: a completion has a prompt")
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


def _check_prompts(prompts: Sequence[str | list[int]], wanted: ApiRequest, called: str) -> None:
    """Raise ApiError for prompts with too many log-probabilities for one answer."""
    top = wanted.options.get("prompt_logprobs")
    size = sum(map(len, prompts))
    if type(top) is int and size * (top + 1) > MOST_PROMPT_LOGPROBS:
        raise invalid(
            called,
            f"has {size} characters or token ids: with {top} of the likeliest tokens at each place, "
            f"log-probabilities of at most {MOST_PROMPT_LOGPROBS // (top + 1)} are sent at once",
        )


def _read_prompts(given: Any, called: str) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(type(each) is int for each in given):
            return [given]
        if all(isinstance(each, str) or (isinstance(each, list) and each) for each in given):
            return given
    raise invalid(called, "must be a string, an array of token ids, or an array of such prompts")


def read_model(given: Any) -> str:
    """Return the name of a model; an empty one for none, which stands for the default model.

    Raises ApiError for something that cannot be a name, which no frame could carry.
    """
    name = checked_or_none("model", given, str, "the name of a model: GET /v1/models lists them") or ""
    if len(name) > MAX_STRING:
        raise ApiError(
            404, f"no model {name[:64]!r}... is configured: GET /v1/models lists them", code="model_not_found",
            param="model",
        )  # fmt: skip
    return name


def _read_rest(given: dict[str, Any], options: dict[str, Any], names: dict[str, str], notes: Notes) -> ApiRequest:
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
            raise invalid(name, "is given by the gateway itself: leave it out")
        if name not in OWN:
            settle(name, value, KNOWN, notes)
            continue
        if name in options and options[name] != value:
            raise invalid(shown, f"is given twice: {names.get(name, name)} says it, too")
        if name in ROUTE_KEYS:
            if name == "priority" and value == 0:
                continue  # vLLM's number for the usual priority
            if not isinstance(value, str | int | float) or len(str(value)) > MAX_STRING:
                raise invalid(name, f"must be a number, or a text of at most {MAX_STRING} characters")
        options[name] = value
    options.setdefault("cut_to_context", True)
    return ApiRequest(
        model, cast(RequestOptions, options), names, n, stream, include_usage, notes=notes, vllm_top=vllm_top
    )


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
            raise invalid("prompt_logprobs", f"must be a whole number from 0 to {MOST_TOP}")
        if stream:
            raise refuse("prompt_logprobs", "a stream does not have it: echo with logprobs works in streams, too")
        echoed = options.get("prompt_logprobs")
        if type(echoed) is not int or echoed < top:
            options["prompt_logprobs"] = top
            names.pop("prompt_logprobs", None)
    if n > 1 and "prompt_logprobs" in options:
        raise invalid("n", f"is {n}: with log-probabilities of the prompt there is one answer for each prompt")
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
        described = checked("response_format.json_schema", given.get("json_schema"), dict)
        _note_unknown(described, "response_format.json_schema", {"name", "description", "schema", "strict"}, notes)
        return {"json_schema": _schema(described, "response_format.json_schema")}
    raise invalid("response_format.type", "must be text, json_object or json_schema")


def _schema(given: dict[str, Any], place: str) -> dict[str, Any]:
    return checked(f"{place}.schema", given.get("schema"), dict, JSON_SCHEMA)


def _note_unknown(given: dict[str, Any], place: str, known: set[str], notes: Notes) -> None:
    for name, value in given.items():
        if name not in known and value is not None:
            notes.ignore(f"{place}.{name}")


def _read_bool(given: dict[str, Any], name: str, shown: str | None = None, *, default: bool = False) -> bool:
    value = checked_or_none(shown or name, given.pop(name, None), bool)
    return default if value is None else value


def _read_map(given: dict[str, Any], name: str, shown: str | None = None) -> dict[str, Any] | None:
    value = checked_or_none(shown or name, given.pop(name, None), dict)
    return dict(value) if value is not None else None
