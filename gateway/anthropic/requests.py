"""Turn the options of Anthropic's API into the options of OpenAI's API, and these into a request. Pure.

So a request of either API takes the same way to the worker. Clients of this API send many options that say nothing
about the answer, and more with each version. Unknown options are ignored, and that is said. An option that would change
the answer, and that is not offered, is refused by its name.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from gateway.anthropic.blocks import Thinking, reasoning_in
from gateway.conversation import BETWEEN, IMAGES, OMITTED_FILE, Conversation, image_text
from gateway.http.answers import Notes, named
from gateway.http.errors import (
    JSON_SCHEMA,
    ApiError,
    checked,
    checked_or_none,
    invalid,
    object_in,
    string_in,
    unsupported,
)
from gateway.openai.requests import OWN, ApiRequest, read_chat, read_name

# Turn the messages of Anthropic's API into a conversation. Pure.
#
# The API divides a turn into blocks. Its clients send back the blocks of earlier answers, also those of Anthropic's
# own models, and the results of tools as blocks of a user's turn.


ROLES: Final = ("user", "assistant", "system")
"""The roles of messages. Newer clients also send ``system`` within the conversation."""
FAILED: Final = "Error: "
"""Stands before the result of a tool that failed (``is_error``). Chat templates know no other way to say so."""
FOUND: Final = "The tool {} is available now."
"""Stands for a block that names a tool which the client has searched for. The model then sees the tool itself."""
FILES: Final = ("document", "container_upload")
"""Types of blocks that are files. A document that is text can be read."""
ACCOUNTING: Final = "x-anthropic-billing-header:"
"""The beginning of a block that Claude Code sends to Anthropic's accounts. It says nothing to the model, and differs
between conversations: at the beginning of the prompt, nothing behind it would be in the model's cache."""


def read_messages(system: Any, given: Any, notes: Notes) -> list[dict[str, Any]]:
    """Return the conversation of a request, for ``AsyncClient.generate``.

    system  the value of ``system``: None, a text or text blocks
    given   the value of ``messages``
    notes   told what is left out

    Raises ApiError, which names the block, for everything but text and tools.
    """
    conversation = Conversation()
    if system is not None and (text := BETWEEN.join(_instructions("system", system))):
        conversation.system(text)
    if not isinstance(given, list) or not given:
        raise invalid("messages", "must be an array of at least one message")
    for i, message in enumerate(given):
        _read_message(conversation, f"messages[{i}]", message, notes)
    if not (read := conversation.messages()):
        raise invalid("messages", "holds instructions without a text only: add a message of the user")
    return read


def tools_found(messages: Any) -> set[str]:
    """Return the names of the tools that the client has searched for, according to the results of its calls."""
    found: set[str] = set()
    blocks = [block for message in _maps(messages) for block in _maps(message.get("content"))]
    for block in blocks:
        found.update(
            name
            for inner in _maps(block.get("content"))
            if inner.get("type") == "tool_reference" and isinstance(name := inner.get("tool_name"), str)
        )
    return found


def _maps(given: Any) -> Iterable[dict[str, Any]]:
    return (each for each in given if isinstance(each, dict)) if isinstance(given, list) else ()


def _read_message(conversation: Conversation, place: str, given: Any, notes: Notes) -> None:
    checked(place, given, dict, "an object with role and content")
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise invalid(f"{place}.role", f"must be one of {', '.join(ROLES)}")
    if role == "system":
        if text := BETWEEN.join(_instructions(f"{place}.content", content)):
            conversation.system(text)
        return
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    checked(f"{place}.content", blocks, list, "a string, or an array of blocks")
    if role == "assistant":
        conversation.said("")
    elif not blocks:
        conversation.user("")
    for i, block in enumerate(blocks):
        read = _read_asked if role == "user" else _read_said
        read(conversation, f"{place}.content[{i}]", block, notes)


def _read_asked(conversation: Conversation, place: str, block: Any, notes: Notes) -> None:
    """Add a block of the user's turn. Pictures and files of the user are refused. Unknown blocks are left out."""
    kind = _kind(place, block)
    if kind == "text":
        conversation.user(string_in(place, block, "text"))
    elif kind == "tool_result":
        text = BETWEEN.join(_result(f"{place}.content", block.get("content"), notes))
        failed = block.get("is_error")
        if failed not in (None, True, False):
            raise invalid(f"{place}.is_error", "must be true or false")
        conversation.result(string_in(place, block, "tool_use_id"), f"{FAILED}{text}" if failed else text)
    elif (readable := _readable(block)) is not None:
        conversation.user(readable)
    elif kind in IMAGES or kind in FILES:
        raise _not_offered(place, kind, "text and tool_result")
    else:
        notes.change(f"messages: {named(kind)}")


def _read_said(conversation: Conversation, place: str, block: Any, notes: Notes) -> None:
    """Add a block of the assistant's turn. Signatures of other servers are accepted, and say nothing. Blocks of tools
    that ran at Anthropic are left out."""
    kind = _kind(place, block)
    if kind == "text":
        conversation.said(string_in(place, block, "text"))
    elif kind == "thinking":
        conversation.reasoned(string_in(place, block, "thinking") or reasoning_in(block.get("signature")))
    elif kind == "redacted_thinking":
        return  # only Anthropic can read it
    elif kind == "tool_use":
        call_id, name, arguments = string_in(place, block, "id"), string_in(place, block, "name"), block.get("input")
        checked(f"{place}.input", arguments, dict)
        conversation.called(call_id, name, arguments)
    else:
        notes.change(f"messages: {named(kind)}")


def _instructions(place: str, given: Any) -> list[str]:
    """Return the texts of instructions, without the one for Anthropic's accounts."""
    return [text for text in _texts(place, given) if not text.startswith(ACCOUNTING)]


def _result(place: str, given: Any, notes: Notes) -> list[str]:
    """Return the texts of a tool's result. A text stands for each picture and file."""
    if not isinstance(given, list):
        return [] if given is None else _texts(place, given)
    texts = []
    for i, block in enumerate(given):
        if (kind := _kind(f"{place}[{i}]", block)) == "tool_reference":
            texts.append(FOUND.format(string_in(f"{place}[{i}]", block, "tool_name")))
        elif kind == "text":
            texts.append(string_in(f"{place}[{i}]", block, "text"))
        elif (text := image_text(block, notes) or _readable(block)) is not None:
            texts.append(text)
        elif kind in FILES:
            notes.omit("files")
            texts.append(OMITTED_FILE)
        else:
            notes.change(f"messages: {named(kind)}")
    return texts


def _readable(block: dict[str, Any]) -> str | None:
    """Return the text of a document or a search result that is text; None for any other block."""
    source = block.get("source") if block.get("type") == "document" else None
    if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
        texts = [source["data"]]
    elif block.get("type") == "search_result":
        texts = [part["text"] for part in _maps(block.get("content")) if isinstance(part.get("text"), str)]
    else:
        return None
    title = block.get("title")
    return BETWEEN.join([title, *texts] if isinstance(title, str) else texts)


def _texts(place: str, given: Any) -> list[str]:
    """Return texts that are given as a string or as text blocks."""
    if isinstance(given, str):
        return [given]
    texts = []
    for i, block in enumerate(checked(place, given, list, "a string, or an array of text blocks")):
        kind = _kind(f"{place}[{i}]", block)
        if kind != "text":
            raise _not_offered(f"{place}[{i}]", kind, "text")
        texts.append(string_in(f"{place}[{i}]", block, "text"))
    return texts


def _kind(place: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return checked(place, kind, str, "an object with a type")


def _not_offered(place: str, kind: str, offered: str) -> ApiError:
    return unsupported(
        place,
        f"is of type {kind[:32]!r}, which is not offered: these models read text, so send blocks of type {offered}",
    )


NOT_OFFERED: Final = {
    "mcp_servers": "MCP servers are not offered: connect them to the client",
    "container": "containers are not offered",
}
"""Options that are refused, each with the reason. An empty value is as good as none."""
TAKEN: Final = frozenset(
    {
        "model", "messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "tool_choice", "thinking",
        "output_config", "output_format", "metadata", "service_tier", "cache_control", "context_management",
        *OWN, *NOT_OFFERED,
    }
)  # fmt: skip
"""Options that are read, or that change nothing here. Every other one is ignored, and that is said."""
NAMES: Final = {
    "stop": "stop_sequences",
    "json_schema": "output_config.format",
    "reasoning_budget": "thinking.budget_tokens",
    "template_kwargs": "output_config.effort",
    "allowed_tools": "tool_choice",
}
"""Our names of fields that this API calls otherwise."""
CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
"""OpenAI's word for each choice of tools, except for a certain tool."""


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """One request of Anthropic's API.

    wanted      the request in the terms of this project
    max_tokens  most tokens of the answer; 0 if only the prompt is to be counted
    thinking    what the answer has of the reasoning
    """

    wanted: ApiRequest
    max_tokens: int
    thinking: Thinking


def read_request(body: dict[str, Any], notes: Notes, *, counts: bool = False) -> MessagesRequest:
    """Return the request in the body of a POST to /v1/messages. Raises ApiError, which names the option.

    notes   filled with what is ignored or changed
    counts  the request is one for /v1/messages/count_tokens, which has no ``max_tokens``
    """
    for name, reason in NOT_OFFERED.items():
        if body.get(name):
            raise unsupported(name, f"is not offered: {reason}")
    for name in sorted(body.keys() - TAKEN):
        if body[name] is not None:
            notes.ignore(name)
    chat: dict[str, Any] = {name: body[name] for name in OWN if name in body}
    chat |= {"model": body.get("model"), "stream": body.get("stream")}
    max_tokens = 0 if counts else _read_max_tokens(body.get("max_tokens"))
    chat["messages"] = messages = read_messages(body.get("system"), body.get("messages"), notes)
    if messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise ApiError(400, "the last message calls a tool: send its result after it", param="messages")
        chat["continue_final_message"] = True
    if (stops := body.get("stop_sequences")) is not None:
        chat["stop"] = checked("stop_sequences", stops, list, "an array of strings")
    chat |= _read_tools(body.get("tools"), body.get("tool_choice"), tools_found(body["messages"]), notes)
    thinking = object_in(body, "thinking")
    chat |= _read_thinking(thinking)
    chat |= _read_output(object_in(body, "output_config"), object_in(body, "output_format"))
    wanted = read_chat(chat, notes)
    wanted.names.update(NAMES)
    return MessagesRequest(wanted, max_tokens, _shown(thinking))


def _shown(thinking: dict[str, Any]) -> Thinking:
    if thinking.get("type") in (None, "disabled"):
        return "none"
    return "signed" if thinking.get("display") == "omitted" else "shown"


def _read_max_tokens(given: Any) -> int:
    if type(given) is not int or given < 1:
        shown = "missing" if given is None else given if isinstance(given, int | float) else "no number"
        raise invalid("max_tokens", f"is {shown}: must be a whole number of at least 1")
    return given


def _read_tools(tools: Any, choice: Any, found: Collection[str], notes: Notes) -> dict[str, Any]:
    """Return the options ``tools``, ``tool_choice`` and ``parallel_tool_calls`` of OpenAI's API.

    found  names of tools that the client has searched for. The model is not shown other tools with ``defer_loading``
    notes  told the tools that the server would have to bring: they are left out
    """
    shown: list[dict[str, Any]] = []
    left_out: list[str] = []
    for i, given in enumerate(checked_or_none("tools", tools, list) or ()):
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(given, dict) and kind not in (None, "custom"):
            left_out.append(named(given.get("name") or kind))
            notes.change(f"tools: {left_out[-1]}")
            continue
        tool = _read_tool(f"tools[{i}]", given)
        if not given.get("defer_loading") or tool["function"]["name"] in found:
            shown.append(tool)
    options: dict[str, Any] = {"tools": shown}
    if choice is None:
        return options
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        name = choice.get("name")
        if isinstance(name, str) and name in left_out:
            raise _left_out(f"tool_choice.name is {name!r}, which the server would have to bring", "tool_choice.name")
        if name not in [tool["function"]["name"] for tool in options["tools"]]:
            raise invalid("tool_choice.name", "must be the name of one of tools")
        options["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif kind == "any" and left_out and not shown:
        raise _left_out("tool_choice is any, and the server would have to bring every tool", "tool_choice")
    elif isinstance(kind, str) and kind in CHOICES:
        options["tool_choice"] = CHOICES[kind]
    else:
        raise invalid("tool_choice.type", "must be auto, any, tool or none")
    alone = choice.get("disable_parallel_tool_use")
    if alone not in (None, True, False):
        raise invalid("tool_choice.disable_parallel_tool_use", "must be true or false")
    if alone and options["tools"] and kind != "none":
        options["parallel_tool_calls"] = False
    return options


def _left_out(why: str, param: str) -> ApiError:
    return ApiError(
        400, f"{why}: such tools are not offered, so send a tool with a name and an input_schema", code="unsupported",
        param=param,
    )  # fmt: skip


def _read_tool(place: str, given: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's shape."""
    checked(place, given, dict, "an object with name and input_schema")
    function: dict[str, Any] = {"name": read_name(place, given)}
    function["parameters"] = checked(f"{place}.input_schema", given.get("input_schema"), dict, JSON_SCHEMA)
    if given.get("strict") is not None:
        function["strict"] = given["strict"]
    if (description := given.get("description")) is not None:
        function["description"] = checked(f"{place}.description", description, str)
    return {"type": "function", "function": function}


def _read_thinking(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of OpenAI's API that switch reasoning on or off. Without ``thinking`` the template decides.

    Templates know two names of the switch. A template ignores a variable that it does not know.
    """
    if not given:
        return {}
    kind, budget = given.get("type"), given.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise invalid("thinking.type", "must be enabled, disabled or adaptive")
    on = kind != "disabled"
    options: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": on, "thinking": on}}
    if kind == "enabled":
        if type(budget) is not int or budget < 1:
            raise invalid("thinking.budget_tokens", "must be a whole number of at least 1")
        options |= {"reasoning_budget": budget, "budget_if_reasoning": True}  # Claude Code sends it to every model
    return options


def _read_output(config: dict[str, Any], older: dict[str, Any]) -> dict[str, Any]:
    """Return the options of OpenAI's API for ``output_config``, and for ``output_format``, its older form."""
    options: dict[str, Any] = {}
    if (effort := config.get("effort")) is not None:
        options["reasoning_effort"] = checked("output_config.effort", effort, str)
    for place, shape in (("output_config.format", config.get("format")), ("output_format", older or None)):
        if shape is None:
            continue
        kind = shape.get("type") if isinstance(shape, dict) else None
        if kind != "json_schema" or not isinstance(shape.get("schema"), dict):
            raise invalid(place, "must have the type json_schema, and a schema")
        options["response_format"] = {"type": "json_schema", "json_schema": {"schema": shape["schema"]}}
    return options
