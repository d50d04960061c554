"""Turn the options of OpenAI's Responses API into the options of its chat API, and these into a request. Pure."""

import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import orjson

from gateway.conversation import BETWEEN, OMITTED_FILE, Conversation, image_text
from gateway.http.answers import Notes, named
from gateway.http.body import BodyMemory
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
from gateway.openai.foreign_options import ABOUT_THE_ACCOUNT, SYNONYMS, TRANSLATED, settle
from gateway.openai.requests import NAME, OWN, ApiRequest, read_chat, read_name
from protocol.process.worker_spec import GatewaySettings

# Turn the tools of OpenAI's Responses API, and the choice among them, into those of its chat API. Pure.
#
# A tool of another type than ``function`` and ``namespace`` runs at OpenAI, or is called in a form of its own. It is
# left out, which the notes of the request say.


KEPT: Final = ("name", "description", "parameters", "strict")
LOADERS: Final = ("additional_tools", "tool_search_output")
"""Types of items that bring further tools within a conversation."""


@dataclass(slots=True)
class OfferedTools:
    """The tools of a request.

    functions   the functions, in the shape of the chat API
    namespaces  (namespace, name) of each function that belongs to a namespace, by the name that the model sees
    left_out    names or types of the tools that are left out
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def flat_name(namespace: str, name: str) -> str:
    """Return the name by which a model knows a function of a namespace. Codex writes flat names in the same way."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def name_of_call(item: dict[str, Any], name: str) -> str:
    """Return the name by which the model knows the function of a call. ``item``: the call, or a choice of a tool."""
    namespace = item.get("namespace")
    return flat_name(namespace, name) if isinstance(namespace, str) and namespace else name


def read_tools(tools: Any, items: Any, notes: Notes) -> OfferedTools:
    """Return the tools of a request. Raises ApiError, which names the place.

    tools  the value of ``tools``, or None
    items  the value of ``input``. Some of its items bring further tools
    notes  told the tools that are left out
    """
    checked_or_none("tools", tools, list)
    offered = OfferedTools()
    taken: set[str] = set()
    for place, name, tool in _flattened(tools or (), "tools", offered):
        if name in taken:
            raise invalid(place, f"has the name {name!r}, which another tool has")
        taken.add(name)
        offered.functions.append(_function(place, name, tool))
    for i, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") in LOADERS and isinstance(item.get("tools"), list):
            for place, name, tool in _flattened(item["tools"], f"input[{i}].tools", offered):
                if name not in taken:  # the client has loaded it before
                    taken.add(name)
                    offered.functions.append(_function(place, name, tool))
    for left_out in offered.left_out:
        notes.change(f"tools: {left_out}")
    return offered


def read_choice(choice: Any, offered: OfferedTools) -> Any:
    """Return ``tool_choice`` in the shape of the chat API. Raises ApiError if it needs a tool that was left out."""
    if choice == "required" and not offered.functions and offered.left_out:
        raise _not_served(f"is required, and all tools were left out ({', '.join(offered.left_out[:8])})")
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": _chosen(choice)}}
    if kind != "allowed_tools":
        raise _not_served(f"asks for a tool of type {named(kind)!r}")
    tools, mode = choice.get("tools"), choice.get("mode")
    if not isinstance(tools, list):
        return {"type": kind, "allowed_tools": {"mode": mode, "tools": tools}}
    of_functions = [t for t in tools if not isinstance(t, dict) or t.get("type") in (None, "function")]
    if tools and not of_functions:
        if mode == "required":
            raise _not_served("requires one of tools that were left out")
        return "none"
    nested = [
        {"type": "function", "function": {"name": _chosen(tool)}} if isinstance(tool, dict) else tool
        for tool in of_functions
    ]
    return {"type": kind, "allowed_tools": {"mode": mode, "tools": nested}}


def _flattened(tools: Iterable[Any], place: str, offered: OfferedTools) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (place, name for the model, tool) of each function, also of those within namespaces.

    offered  gets the namespaces, and the tools that are left out
    """
    for i, tool in enumerate(tools):
        here = f"{place}[{i}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise invalid(here, "must be an object with a type")
        if tool["type"] == "function":
            yield here, read_name(here, tool), tool
        elif tool["type"] == "namespace":
            yield from _within(here, tool, offered)
        else:
            offered.left_out.append(named(tool.get("name") or tool["type"]))


def _within(place: str, namespace: dict[str, Any], offered: OfferedTools) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the functions of a namespace, as ``_flattened``. The first one tells what the namespace is for."""
    whose, about = read_name(place, namespace), namespace.get("description")
    for i, tool in enumerate(checked(f"{place}.tools", namespace.get("tools"), list)):
        here = f"{place}.tools[{i}]"
        checked(here, tool, dict, "an object with a type")
        if tool.get("type") != "function":
            offered.left_out.append(named(tool.get("name") or tool.get("type")))
            continue
        name = read_name(here, tool)
        flat = flat_name(whose, name)
        if not NAME.fullmatch(flat):
            raise invalid(here, f"is called {flat[:140]!r} with its namespace: at most 128 characters")
        offered.namespaces[flat] = whose, name
        if isinstance(about, str) and about:
            told = tool.get("description")
            tool = tool | {"description": f"{about}\n\n{told}" if isinstance(told, str) else about}
            about = None
        yield here, flat, tool


def _function(place: str, name: str, given: dict[str, Any]) -> dict[str, Any]:
    checked_or_none(f"{place}.parameters", given.get("parameters"), dict, JSON_SCHEMA)
    kept = {key: given[key] for key in KEPT if given.get(key) is not None} | {"name": name}
    return {"type": "function", "function": kept}


def _chosen(choice: dict[str, Any]) -> Any:
    name = choice.get("name")
    return name_of_call(choice, name) if isinstance(name, str) else name


def _not_served(why: str) -> ApiError:
    return unsupported(
        "tool_choice",
        f"{why}: only tools of type 'function' and 'namespace' can be called here, so use auto, or name one of these",
    )


# Turn the input of OpenAI's Responses API into a conversation. Pure.
#
# The input is a text or a list of items: messages, calls of tools, their results, and reasoning. Clients send back the
# items of earlier answers, also those of OpenAI's own models, with their ids and states, which say nothing to the
# model.


ROLES: Final = ("user", "assistant", "system", "developer")
TEXTS: Final = {"input_text": "text", "output_text": "text", "refusal": "refusal", "text": "text"}
"""Types of content parts that are text, each with the key that holds it."""
REASONING: Final = ("reasoning_text", "summary_text", "text")
"""Types of the parts of reasoning."""
FILES: Final = ("input_file", "input_audio")
"""Types of other parts in the result of a tool that the model cannot read. A text stands in their place."""
ACTIONS: Final = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "tool_search_call": ("tool_search", "arguments"),
}
"""Types of calls of OpenAI's own tools which the client has run: the name of the tool, and the key of its arguments."""
RESULTS: Final = (
    "function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output",
    "apply_patch_call_output",
)  # fmt: skip


def read_input(
    instructions: Any, given: Any, notes: Notes, unseal: Callable[[str], str | None] = lambda _: None
) -> Conversation:
    """Return the conversation of a request. Raises ApiError, which names the item that is not offered.

    notes   told what is left out
    unseal  returns the reasoning in an ``encrypted_content``; None if somebody else has encrypted it
    """
    conversation = Conversation()
    if checked_or_none("instructions", instructions, str):
        conversation.system(instructions)
    if isinstance(given, str):
        conversation.user(given)
        return conversation
    if not isinstance(given, list) or not given:
        raise invalid("input", "must be a string, or an array of at least one item")
    reader = _ItemReader(conversation, notes, unseal)
    for i, item in enumerate(given):
        reader.read(f"input[{i}]", item)
    if conversation.newest is None:
        raise invalid("input", "has no item that the model can read: add a message of the user")
    return conversation


class _ItemReader:
    """Adds items to a conversation."""

    def __init__(self, conversation: Conversation, notes: Notes, unseal: Callable[[str], str | None]) -> None:
        self._conversation, self._notes, self._unseal = conversation, notes, unseal

    def read(self, place: str, item: Any) -> None:
        """Add an item. An item of an unknown type, or of a tool that runs at OpenAI, is left out."""
        checked(place, item, dict)
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(place, item)
        elif kind == "function_call":
            name = name_of_call(item, string_in(place, item, "name"))
            self._called(place, item, name, _arguments(string_in(place, item, "arguments")))
        elif kind == "custom_tool_call":
            name = name_of_call(item, string_in(place, item, "name"))
            self._called(place, item, name, {"input": string_in(place, item, "input")})
        elif isinstance(kind, str) and kind in ACTIONS and isinstance(item.get("call_id"), str):
            name, key = ACTIONS[kind]
            arguments = item.get(key)
            self._called(place, item, name, arguments if isinstance(arguments, dict) else {})
        elif isinstance(kind, str) and kind in RESULTS:
            key = "call_id" if kind != "local_shell_call_output" or "call_id" in item else "id"
            self._conversation.result(string_in(place, item, key), self._result(f"{place}.output", item.get("output")))
        elif kind == "tool_search_output" and isinstance(item.get("call_id"), str):
            tools = item.get("tools")
            names = [named(tool.get("name")) for tool in tools or () if isinstance(tool, dict)]
            self._conversation.result(item["call_id"], ", ".join(names) or "none")
        elif kind == "reasoning":
            self._conversation.reasoned(self._reasoning(place, item))
        elif kind == "compaction_trigger":
            raise unsupported(
                place, f"is of type {kind!r}: compaction is not offered, so have the client summarize the items"
            )
        elif kind not in LOADERS:
            self._notes.change(f"input: {named(kind)}")

    def _called(self, place: str, item: dict[str, Any], name: str, arguments: Any) -> None:
        self._conversation.called(string_in(place, item, "call_id"), name, arguments)

    def _message(self, place: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise invalid(f"{place}.role", f"must be one of {', '.join(ROLES)}")
        content = item.get("content")
        if role == "assistant":
            self._conversation.said(_text(f"{place}.content", content, ""))
            return
        text = _text(f"{place}.content", content, BETWEEN)
        if role == "user":
            self._conversation.user(text)
        else:
            self._conversation.system(text)

    def _reasoning(self, place: str, item: dict[str, Any]) -> str:
        """Return the text of a reasoning item: its content, or what it has encrypted, or its summary."""
        if text := _reasoning_in(place, item, "content"):
            return text
        sealed = item.get("encrypted_content")
        if isinstance(sealed, str) and sealed:
            if (opened := self._unseal(sealed)) is not None:
                return opened
            self._notes.change("reasoning.encrypted_content")
        return _reasoning_in(place, item, "summary")

    def _result(self, place: str, given: Any) -> str:
        """Return the result of a call as a text. A text stands for each picture and file."""
        if given is None or isinstance(given, str):
            return given or ""
        if not isinstance(given, list):
            return orjson.dumps(given).decode()
        texts = []
        for i, part in enumerate(given):
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str):  # the outputs of OpenAI's own shell have no type
                texts.append(orjson.dumps(part).decode())
            elif kind in TEXTS:
                texts.append(string_in(f"{place}[{i}]", part, TEXTS[kind]))
            elif (image := image_text(part, self._notes)) is not None:
                texts.append(image)
            elif kind in FILES:
                self._notes.omit("files")
                texts.append(OMITTED_FILE)
            else:
                self._notes.change(f"input: {named(kind)}")
        return BETWEEN.join(texts)


def _arguments(text: str) -> Any:
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return text


def _reasoning_in(place: str, item: dict[str, Any], name: str) -> str:
    texts = []
    for i, part in enumerate(checked_or_none(f"{place}.{name}", item.get(name), list) or ()):
        if not isinstance(part, dict) or part.get("type") not in REASONING:
            where = f"{place}.{name}[{i}]"
            raise invalid(where, f"must be of type {REASONING[0]} or {REASONING[1]}, with a text")
        texts.append(string_in(f"{place}.{name}[{i}]", part, "text"))
    return BETWEEN.join(texts)


def _text(place: str, given: Any, between: str) -> str:
    """Return a text that is given as a string or as parts. ``between``: stands between two parts."""
    if isinstance(given, str):
        return given
    checked(place, given, list, "a string, or an array of text parts")
    texts = []
    for i, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in TEXTS:
            shown = kind[:64] if isinstance(kind, str) else type(kind).__name__
            raise unsupported(
                f"{place}[{i}]",
                f"is of type {shown!r}, which is not offered: these models read text, so send a part of type "
                "input_text",
            )
        texts.append(string_in(f"{place}[{i}]", part, TEXTS[kind]))
    return between.join(texts)


NOT_OFFERED: Final = {
    "conversation": "conversations are not stored: send the earlier items in input, or previous_response_id",
    "background": "nobody could fetch the response later: use stream",
    "prompt": "prompts are not stored: send instructions and input",
    "top_logprobs": "log-probabilities are offered at /v1/chat/completions",
    "context_management": "compaction is not offered: send fewer items in input",
    "moderation": "leave it out",
    "logprobs": "log-probabilities are offered at /v1/chat/completions",
}
"""Options that are refused, each with the remedy. A value that asks for nothing is as good as none."""
IGNORED: Final = ABOUT_THE_ACCOUNT | {"max_tool_calls", "client_metadata"}
"""Options that say nothing about the answer. ``max_tool_calls`` limits OpenAI's own tools, of which there are none."""
KNOWN: Final = (
    OWN
    | IGNORED
    | set(NOT_OFFERED)
    | {
        "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning", "include",
        "max_output_tokens", "truncation", "stream", "stream_options", "chat_template_kwargs", "reasoning_budget",
        "previous_response_id", "n",
    }
)  # fmt: skip
TAKEN_OVER: Final = (
    "model", "stream", "stream_options", "parallel_tool_calls", "chat_template_kwargs", "reasoning_budget", "n"
)  # fmt: skip
"""Options that the chat API has by the same names, besides those of modelctl itself."""
ENCRYPTED: Final = "reasoning.encrypted_content"
"""The value of ``include`` that asks for the reasoning in an encrypted form, too."""
NAMES: Final = {
    "max_tokens": "max_output_tokens",
    "json_schema": "text.format",
    "messages": "input",
    "allowed_tools": "tool_choice",
}
"""Our names of fields that this API calls otherwise."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """One request of the Responses API.

    wanted      the request in the terms of this project
    echoed      keys of the response that repeat the request
    namespaces  as ``OfferedTools.namespaces``
    seals       whether the reasoning is wanted in an encrypted form, too
    """

    wanted: ApiRequest
    echoed: dict[str, Any]
    namespaces: dict[str, tuple[str, str]]
    seals: bool


def read_request(
    body: dict[str, Any], notes: Notes, unseal: Callable[[str], str | None] = lambda _: None, *, stores: bool = False
) -> ResponsesRequest:
    """Return the request in the body of a POST to /v1/responses. Raises ApiError, which names the option.

    body    with ``StoredItems.input_of`` the request in the place of its input
    notes   filled with what is ignored or changed
    unseal  as in ``read_input``
    stores  whether the response is kept
    """
    for name, value in body.items():
        if value and name in NOT_OFFERED:
            raise unsupported(name, f"is not offered: {NOT_OFFERED[name]}")
        if name not in KNOWN and name not in SYNONYMS and name not in TRANSLATED:
            settle(name, value, KNOWN, notes)
    seals = _read_include(body, notes)
    if body.get("truncation") not in (None, "disabled"):  # a prompt that is too long is refused
        notes.change("truncation=disabled")
    chat = {name: body[name] for name in body if name in OWN or name in SYNONYMS or name in TRANSLATED}
    for name in NOT_OFFERED:
        chat.pop(name, None)
    chat |= {name: body.get(name) for name in TAKEN_OVER}
    items = body.get("input")
    chat["messages"] = read_input(body.get("instructions"), items, notes, unseal).messages()
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    offered = read_tools(body.get("tools"), items, notes)
    chat["tools"] = offered.functions
    chat["tool_choice"] = read_choice(body.get("tool_choice"), offered)
    chat["response_format"] = _read_format(text := object_in(body, "text"))
    if text.get("verbosity") not in (None, "medium"):
        notes.change("text.verbosity")
    effort = object_in(body, "reasoning").get("effort")
    if checked_or_none("reasoning.effort", effort, str) is not None:
        chat["reasoning_effort"] = effort
    wanted = read_chat(chat, notes)
    if wanted.n != 1:
        raise unsupported("n", "is not offered: one response has one answer")
    wanted.names.update(NAMES)
    return ResponsesRequest(wanted, _echoed(body) | {"store": stores}, offered.namespaces, seals)


def _read_include(body: dict[str, Any], notes: Notes) -> bool:
    """Return whether the reasoning is wanted in an encrypted form. All else that ``include`` can ask for is not here:
    OpenAI's own tools have no results, and log-probabilities are offered at /v1/chat/completions."""
    include = checked_or_none("include", body.get("include"), list) or ()
    for value in include:
        if value != ENCRYPTED:
            notes.change(f"include: {named(value)}")
    return ENCRYPTED in include


def _read_format(text: dict[str, Any]) -> dict[str, Any] | None:
    """Return ``response_format`` of the chat API for the option ``text``."""
    shape = text.get("format")
    if shape is None:
        return None
    kind = shape.get("type") if isinstance(shape, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid("text.format.type", "must be text, json_object or json_schema")
    if kind != "json_schema":
        return {"type": kind}
    return {
        "type": kind,
        "json_schema": {"schema": checked("text.format.schema", shape.get("schema"), dict, JSON_SCHEMA)},
    }


def _echoed(body: dict[str, Any]) -> dict[str, Any]:
    text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    parallel = body.get("parallel_tool_calls")
    return {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True if parallel is None else parallel,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "temperature": body.get("temperature"),
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "user": body.get("user"),
    }


# Keep the items of responses in memory, for clients that refer to them instead of sending them again.
#
# Nothing is written to a disk, and nothing outlives the process. What is kept belongs to the caller's key. Times and
# sizes are bounded, and the oldest goes first.


LIFETIME_S: Final = 3600.0
"""Seconds for which an item is kept at most."""
SHARES: Final = 8
"""One key may have the eighth part of all that is kept: 16 MiB of 128 MiB."""
OVERHEAD: Final = 512
"""Bytes that an entry takes besides its JSON."""


class _Entry(NamedTuple):
    data: bytes
    made_at: float

    @property
    def size(self) -> int:
        return len(self.data) + OVERHEAD


class StoredItems:
    """What is kept for all callers.

    most    most bytes together; 0 keeps nothing
    share   most bytes of one owner
    longest most bytes of one request's input with all that it refers to
    bodies  the memory of the bodies that are being read. Together with them, what is kept never takes more than
            ``bodies.most``: it gives way
    clock   seconds that only grow
    """

    def __init__(
        self, most: int, share: int, longest: int, bodies: BodyMemory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._share, self._longest, self._bodies, self._clock = most, share, longest, bodies, clock
        self._owned: dict[str | None, dict[str, _Entry]] = {}
        """The entries of each owner by their ids, the oldest first."""
        self._sizes: dict[str | None, int] = {}
        self._size = 0
        bodies.makes_room = self.shrink

    @classmethod
    def of(cls, settings: GatewaySettings, bodies: BodyMemory) -> "StoredItems":
        """Return what a process with these settings keeps. With ``auth: none``, all callers are one owner."""
        most = settings.stored_items
        return cls(most, most if settings.auth == "none" else most // SHARES, settings.max_body, bodies)

    @property
    def size(self) -> int:
        """The bytes that are kept."""
        return self._size

    def input_of(self, owner: str | None, body: dict[str, Any]) -> Any:
        """Return the ``input`` of a request with the items that it refers to in the places of the references.

        With ``previous_response_id``, the input and the output of that response come first. Raises ApiError 404 for
        what is not kept, whatever the reason is, and 413 if there would be too much of it.
        """
        given, previous = body.get("input"), body.get("previous_response_id")
        found: list[Any] = []
        size = 0
        if previous:
            entry = self._entry(owner, previous, "previous_response_id")
            size = self._within(len(entry.data), "previous_response_id")
            found = orjson.loads(entry.data)
        elif not isinstance(given, list):
            return given
        for i, item in enumerate([_message(given)] if isinstance(given, str) else given or ()):
            if not _is_reference(item):
                found.append(item)
                continue
            entry = self._entry(owner, item.get("id"), f"input[{i}]")
            size = self._within(size + len(entry.data), f"input[{i}]")
            found.append(orjson.loads(entry.data))
        return found

    def keep(self, owner: str | None, given: Any, response: dict[str, Any]) -> None:
        """Keep a complete response, and each item of its output.

        given     the request's ``input``, as ``input_of`` has returned it
        response  the response
        """
        if not self._most:
            return
        output = response["output"]
        for item in output:
            self._put(owner, item["id"], item)
        asked = [_message(given)] if isinstance(given, str) else given
        self._put(owner, response["id"], [*asked, *output])

    def shrink(self, size: int) -> None:
        """Drop the oldest entries until at most so many bytes are kept."""
        while self._size > max(0, size):
            owner = min(self._owned, key=lambda one: next(iter(self._owned[one].values())).made_at)
            self._drop(owner, next(iter(self._owned[owner])))

    def _within(self, size: int, place: str) -> int:
        if size > self._longest:
            raise ApiError(
                413, f"what the request refers to has more than {self._longest} bytes: send fewer items, themselves",
                code="too_large", param=place,
            )  # fmt: skip
        return size

    def _put(self, owner: str | None, name: str, what: Any) -> None:
        now = self._clock()
        entry = _Entry(orjson.dumps(what), now)
        self._expire(now)
        most = max(0, min(self._most, self._bodies.most - self._bodies.held.total()))
        if entry.size > min(self._share, most):
            return
        mine = self._owned.get(owner, {})
        while mine and self._sizes[owner] + entry.size > self._share:
            self._drop(owner, next(iter(mine)))
        self.shrink(most - entry.size)
        self._owned.setdefault(owner, {})[name] = entry
        self._sizes[owner] = self._sizes.get(owner, 0) + entry.size
        self._size += entry.size

    def _entry(self, owner: str | None, name: Any, place: str) -> _Entry:
        self._expire(self._clock())
        entry = self._owned.get(owner, {}).get(name) if isinstance(name, str) else None
        if entry is None:
            raise ApiError(
                404, f"{place} refers to something that is not kept here, or is not kept any more: send the items "
                "themselves (many clients do so with the option store: false)", code="not_found", param=place,
            )  # fmt: skip
        return entry

    def _expire(self, now: float) -> None:
        """Drop the entries that are too old. The oldest of each owner comes first."""
        for owner in list(self._owned):
            mine = self._owned[owner]
            while mine and now - next(iter(mine.values())).made_at > LIFETIME_S:
                self._drop(owner, next(iter(mine)))

    def _drop(self, owner: str | None, name: str) -> None:
        mine = self._owned[owner]
        size = mine.pop(name).size
        self._size -= size
        self._sizes[owner] -= size
        if not mine:
            del self._owned[owner], self._sizes[owner]


def _is_reference(item: Any) -> bool:
    """Return whether an item only names another one. Its type may be left out."""
    if not isinstance(item, dict):
        return False
    return item.get("type") == "item_reference" or ("type" not in item and "role" not in item and "id" in item)


def _message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


# Encrypt reasoning, so that a client can send it back without being able to read or change it.
#
# A client asks for that with ``include: [reasoning.encrypted_content]``. Each text is encrypted and authenticated with
# XChaCha20-Poly1305 of libsodium, under a key of this supervisor. It is bound to the caller's key and to the model:
# for any other caller and model it is as good as a text that somebody else has encrypted.


PREFIX: Final = "mctl1."
"""The beginning of an ``encrypted_content`` of this gateway. Another way to encrypt would have another one."""


def can_seal() -> bool:
    """Return whether the package that encrypts is installed."""
    return find_spec("nacl") is not None


class Sealer:
    """Encrypts and decrypts the reasoning of one caller and one model.

    secret  32 bytes, known to the gateways of one supervisor
    owner   the id of the caller's key; None if the gateway asks for no keys
    model   the name of the model, as the sender has written it
    """

    def __init__(self, secret: bytes, owner: str | None, model: str) -> None:
        self._secret = secret
        self._about = orjson.dumps([owner, model])

    def seal(self, text: str) -> str:
        """Return the encrypted text. It has a random nonce of 192 bits, so that the secret need not change."""
        from nacl.secret import Aead  # here, because few clients ask for it, and the import takes time

        return PREFIX + urlsafe_b64encode(bytes(Aead(self._secret).encrypt(text.encode(), self._about))).decode()

    def unseal(self, sealed: str) -> str | None:
        """Return the text in the result of ``seal``. None if it is foreign: of another supervisor, caller or model."""
        if not sealed.startswith(PREFIX) or not can_seal():
            return None
        from nacl.exceptions import CryptoError
        from nacl.secret import Aead

        try:
            data = urlsafe_b64decode(sealed.removeprefix(PREFIX).encode())
            return bytes(Aead(self._secret).decrypt(data, self._about)).decode()
        except (ValueError, CryptoError):  # also text that is no base64, and data that is shorter than its nonce
            return None
