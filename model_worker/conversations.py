"""Turn a conversation into what a chat template can take, and lose no word of it. Pure.

Chat templates are programs with opinions. One refuses a system message in the middle of a conversation, another one
drops the calls of a message whose content is an empty text. ``template_probes`` asks a template what it can take, and
notes that in a ``Form``. ``adapt`` changes a conversation only where its template asks for a change.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from answer_formats import plain_json

BETWEEN: Final = "\n\n"
"""Stands between texts that are merged into one message."""
REMINDER: Final = "<system-reminder>\n{}\n</system-reminder>"
"""The form of instructions within the turn of another role. Claude Code has introduced it, and many models have seen
it."""
INSTRUCTING: Final = ("system", "developer")
"""The roles of messages that instruct the assistant."""
REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning in a message. Clients send the first one."""
NULL_CONTENTS: Final = ("absent", "empty", "null")
"""Ways to write that a message with calls has no text."""
ARGUMENTS: Final = ("text", "map", "flat")
"""Ways to write the arguments of a call: as JSON text, as a map, or as a map of texts. Some templates write a map
within the arguments as Python would, so they get it as JSON text."""
NINE: Final = re.compile(r"[A-Za-z0-9]{9}")
"""The ids of calls that Mistral's templates take."""
_LETTERS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_TOOL_ORDER: Final = ("type", "function")
_FUNCTION_ORDER: Final = ("name", "description", "parameters")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Form:
    """What a chat template can take. The defaults are those of a template that can take everything.

    error              why the template renders no conversation at all; "" if it renders some
    system             whether it shows a system message at the beginning
    several_systems    whether it shows several system messages at the beginning
    system_within      whether it shows a system message behind other turns
    developer          whether it shows a message of role developer at the beginning
    developer_within   whether it shows a message of role developer behind other turns
    merged             roles of which two messages in a row have to become one
    user_after_result  whether a message of the user may follow the result of a call
    parts              roles whose content has to be a list of parts
    calls              whether it shows calls of tools
    results            whether it shows messages of role tool
    parallel           whether one message may have several calls
    null_contents      which of NULL_CONTENTS may stand beside calls
    arguments          which of ARGUMENTS a call may have
    nine               whether ids of calls must have nine letters or digits
    text_beside_calls  whether it shows the text of a message with calls
    split              whether that text may be a message of its own, in front of the calls
    reasons_beside     whether it shows a message with reasoning, a text and calls
    reasoning          the key in which it reads the reasoning; "" if it shows none
    tools              how it takes tools: "wrapped" as {type, function: {...}}, "bare" as {name, ...}; "" if it shows
                       none
    tools_list         whether it needs a list of tools, and an empty one if there are none
    turn_ends          what it writes behind the words of the assistant: at the end of the conversation, and before the
                       next words of the user
    call               what it writes for the call of the probe; "" if it shows no calls
    general            whether calls and results become texts of the format json, because the template shows no calls or
                       no tools; tools, too, if it shows none
    """

    error: str = ""
    system: bool = True
    several_systems: bool = True
    system_within: bool = True
    developer: bool = True
    developer_within: bool = True
    merged: tuple[str, ...] = ()
    user_after_result: bool = True
    parts: tuple[str, ...] = ()
    calls: bool = True
    results: bool = True
    parallel: bool = True
    null_contents: tuple[str, ...] = NULL_CONTENTS
    arguments: tuple[str, ...] = ARGUMENTS
    nine: bool = False
    text_beside_calls: bool = True
    split: bool = False
    reasons_beside: bool = True
    reasoning: str = REASONING[0]
    tools: str = "wrapped"
    tools_list: bool = False
    turn_ends: tuple[str, ...] = ()
    call: str = ""
    general: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Return the fields, for the template's process."""
        return asdict(self)

    def changes(self) -> list[str]:
        """Return what ``adapt`` may change for this template, for people."""
        if self.error:
            return []
        told = {
            "no system messages": not self.system,
            "one system message": self.system and not self.several_systems,
            "system messages at the beginning only": self.system and not self.system_within,
            "turns of one role merged": bool(self.merged),
            "content as parts": bool(self.parts),
            "arguments as JSON text": self.calls and self.arguments == ("text",),
            "arguments as maps": self.calls and "text" not in self.arguments,
            "one call a turn": self.calls and not self.parallel,
            "ids of nine characters": self.nine,
            "no text beside calls": self.calls and not self.text_beside_calls,
            "tools, calls and results as texts of the format json": self.general and not self.tools,
            "calls and results as texts of the format json": self.general and bool(self.tools),
            "no calls": not self.calls and not self.general,
            "no results": not self.results and not self.general,
            "no tools": not self.tools and not self.general,
        }
        return [text for text, holds in told.items() if holds]

    @classmethod
    def from_wire(cls, given: Any) -> "Form":
        """Return the form that the template's process has found. Raises ValueError for anything else."""
        if not isinstance(given, dict) or given.keys() != {field.name for field in fields(cls)}:
            raise ValueError("no form")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list | tuple) else value for key, value in given.items()
        }
        for field in fields(cls):
            value = values[field.name]
            texts = value if isinstance(value, tuple) else ()
            if type(value) is not type(field.default) or not all(type(text) is str for text in texts):
                raise ValueError("no form")
        return cls(**values)


class UnfitError(Exception):
    """Raised for a conversation that cannot be put into the template's form without loss. The text names the reason."""


def adapt(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, form: Form
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Return messages and tools in the form that a template can take. The given ones stay as they are.

    messages  maps with role (system, developer, user, assistant or tool), content (a text, or None beside calls), and
              perhaps name, tool_calls, tool_call_id and reasoning_content

    Raises UnfitError.
    """
    adapted = [_without_empty_calls(message) for message in messages]
    if form.general and (tools or not form.calls):
        adapted = _as_texts(adapted, None if form.tools else tools)
        form = replace(form, calls=True, results=True)
        tools = tools if form.tools else None
    adapted = _with_systems(adapted, form)
    adapted = _merged(adapted, form)
    adapted = _with_calls(adapted, form)
    adapted = [_with_reasoning(message, form) for message in adapted]
    if form.parts:
        adapted = [_in_parts(message, form) for message in adapted]
    if tools is None:
        return adapted, [] if form.tools_list else None
    return adapted, [_ordered(tool, form) for tool in tools]


def _without_empty_calls(message: Message) -> Message:
    if not message.get("tool_calls"):
        return {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _as_texts(messages: list[Message], tools: Sequence[dict[str, Any]] | None) -> list[Message]:
    """Write tools, calls and results as the texts that the format json has for them."""
    turns: list[Message] = []
    if tools:
        first = messages[0] if messages[0]["role"] in INSTRUCTING else {"role": "system", "content": ""}
        turns.append(_joined(first, plain_json.tools_text(tools)))
        messages = messages[1:] if messages[0]["role"] in INSTRUCTING else messages
    names: dict[Any, str] = {}
    for message in messages:
        if calls := message.get("tool_calls"):
            written: list[tuple[str, Any]] = []
            for call in calls:
                function = call.get("function")
                function = function if isinstance(function, dict) else {}
                name, arguments = str(function.get("name", "")), function.get("arguments") or {}
                names[call.get("id")] = name
                decoded = _decoded(arguments) if isinstance(arguments, str) else arguments
                written.append((name, arguments if decoded is None else decoded))
            text, before = plain_json.calls_text(written), message.get("content")
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            turns.append({**kept, "content": f"{before}\n{text}" if before else text})
        elif message["role"] == "tool":
            text = plain_json.result_text(
                message.get("name") or names.get(message.get("tool_call_id")), message["content"]
            )
            last = turns[-1] if turns else None
            if last is not None and "is_result" in last:
                last["content"] += "\n" + text
            else:
                turns.append({"role": "user", "content": text, "is_result": True})
        else:
            turns.append(message)
    return [{key: value for key, value in turn.items() if key != "is_result"} for turn in turns]


def _with_systems(messages: list[Message], form: Form) -> list[Message]:
    """Put the instructions where the template shows them."""
    first = next((i for i, message in enumerate(messages) if message["role"] not in INSTRUCTING), len(messages))
    leading = [_instructing(message, form.developer) for message in messages[:first]]
    of_one_role = len({message["role"] for message in leading}) == 1
    if len(leading) > 1 and not (form.several_systems and (of_one_role or form.developer_within)):
        text = BETWEEN.join(message["content"] for message in leading)
        leading = [{**leading[0], "content": text}]
    turns: list[Message] = []
    waiting: list[str] = []
    if leading and not form.system and leading[0]["role"] == "system":
        waiting, leading = [leading[0]["content"]], []
    for message in messages[first:]:
        if message["role"] in INSTRUCTING:
            kept = _instructing(message, form.developer_within)
            if turns and "tool_calls" in turns[-1]:  # between a call and its result no other turn may be
                waiting.append(REMINDER.format(message["content"]))
            elif form.developer_within if kept["role"] == "developer" else form.system_within:
                turns.append(kept)
            elif turns and turns[-1]["role"] in ("user", "tool"):
                turns[-1] = _joined(turns[-1], REMINDER.format(message["content"]))
            else:
                waiting.append(REMINDER.format(message["content"]))
            continue
        if waiting:
            text = BETWEEN.join(waiting)
            if message["role"] == "user":
                message = {**message, "content": text + BETWEEN + message["content"]}
            elif message["role"] == "tool":
                message = _joined(message, text)
            else:
                turns.append({"role": "user", "content": text})
            waiting = []
        turns.append(message)
    if waiting:
        turns.append({"role": "user", "content": BETWEEN.join(waiting)})
    return [*leading, *turns]


def _instructing(message: Message, developer: bool) -> Message:
    return message if developer or message["role"] == "system" else {**message, "role": "system"}


def _joined(message: Message, text: str) -> Message:
    before = message.get("content")
    return {**message, "content": before + BETWEEN + text if before else text}


def _merged(messages: list[Message], form: Form) -> list[Message]:
    """Merge neighbours where the template wants one message for each turn."""
    merged: list[Message] = []
    for message in messages:
        role = message["role"]
        last = merged[-1] if merged else None
        if last is not None and last["role"] == role and role in form.merged and "tool_calls" not in last:
            one = {**last, **message}
            one["content"] = BETWEEN.join(text for text in (last.get("content"), message.get("content")) if text)
            if reasoned := [m["reasoning_content"] for m in (last, message) if m.get("reasoning_content")]:
                one["reasoning_content"] = BETWEEN.join(reasoned)
            merged[-1] = one
        elif last is not None and last["role"] == "tool" and role == "user" and not form.user_after_result:
            merged[-1] = _joined(last, message["content"])
        else:
            merged.append(message)
    return merged


def _with_calls(messages: list[Message], form: Form) -> list[Message]:
    """Write calls and results as the template takes them."""
    if any("tool_calls" in message for message in messages) and not form.calls:
        raise UnfitError("the model's chat template does not show calls of tools: leave out tool_calls")
    if any(message["role"] == "tool" for message in messages) and not form.results:
        raise UnfitError("the model's chat template does not show results of tools: leave out messages of role tool")
    ids = _nine(messages) if form.nine else {}
    turns = messages if form.parallel else _one_by_one(messages)
    return [turn for message in turns for turn in _called(message, form, ids)]


def _called(message: Message, form: Form, ids: Mapping[str, str]) -> Iterator[Message]:
    """Yield the messages that show one message: usually that message, and two if a text cannot stand beside calls."""
    if message["role"] == "tool" and message.get("tool_call_id") in ids:
        message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
    if "tool_calls" not in message:
        yield message
        return
    calls = [_call(call, form, ids) for call in message["tool_calls"]]
    text = message.get("content")
    if text and not (form.text_beside_calls and (form.reasons_beside or not message.get("reasoning_content"))):
        if not form.split:
            raise UnfitError("the model's chat template shows no text beside calls: send the text as a message before")
        yield {"role": "assistant", "content": text}
        text = None
    kept = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
    content = {} if text else _no_content(text, form)
    yield {"role": kept.pop("role"), **({"content": text} if text else content), **kept, "tool_calls": calls}


def _no_content(text: str | None, form: Form) -> dict[str, str | None]:
    """Return the content of a message that has calls and no text. Keep an empty text if the template takes it."""
    ways = NULL_CONTENTS if text is None else ("empty", "absent", "null")
    way = next((way for way in ways if way in form.null_contents), "empty")
    return {} if way == "absent" else {"content": "" if way == "empty" else None}


def _call(call: dict[str, Any], form: Form, ids: Mapping[str, str]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    call = {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), form)}}
    if call.get("id") in ids:
        call["id"] = ids[call["id"]]
    return call


def _arguments(given: Any, form: Form) -> Any:
    """Return the arguments of a call as the template takes them. A text that is no JSON object is kept as a text, or as
    the only argument of a map."""
    given = {} if given is None else given
    as_text = "text" in form.arguments
    if isinstance(given, str) and as_text:
        return given or "{}"
    if not isinstance(given, dict):
        decoded = _decoded(given) if isinstance(given, str) else None
        given = {"arguments": given} if decoded is None else decoded
    if "map" in form.arguments:
        return given
    if as_text:
        return json.dumps(given, ensure_ascii=False)
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in given.items()
    }


def _decoded(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text. Some clients encode it twice. None if it is no object."""
    value: Any = text or "{}"
    for _ in range(2):
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _nine(messages: Sequence[Message]) -> dict[str, str]:
    """Return the nine letters or digits of each id. One id always becomes the same ones, whatever stands beside it."""
    given = [str(call.get("id")) for message in messages for call in message.get("tool_calls", ()) if call.get("id")]
    given += [message["tool_call_id"] for message in messages if message.get("tool_call_id")]
    ids = {id: id for id in given if NINE.fullmatch(id)}
    taken = set(ids)
    for id in given:
        salt = 0
        while id not in ids:
            number = int.from_bytes(hashlib.sha256(f"{salt}:{id}".encode(errors="surrogatepass")).digest())
            made = "".join(_LETTERS[number // 62**k % 62] for k in range(9))
            if made not in taken:
                ids[id] = made
                taken.add(made)
            salt += 1
    return ids


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Write a message with several calls as a message for each call, followed by its result."""
    turns: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            turns.append(message)
            continue
        end = at
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results, at = list(messages[at:end]), end
        for number, call in enumerate(calls):
            begin = message if not number else {"role": message["role"], "content": None}
            turns.append({**begin, "tool_calls": [call]})
            found = [result for result in results if result.get("tool_call_id") == call.get("id") is not None]
            if not found and results and results[0].get("tool_call_id") is None:
                found = results[:1]
            turns += found
            results = [result for result in results if not any(result is one for one in found)]
        turns += results
    return turns


def _with_reasoning(message: Message, form: Form) -> Message:
    """Give the reasoning the names that templates know. transformers fills the first two."""
    reasoned = message.get("reasoning_content")
    if not reasoned:
        return message
    named = {"thinking": reasoned} | ({form.reasoning: reasoned} if form.reasoning else {})
    return {**named, **message}


def _in_parts(message: Message, form: Form) -> Message:
    if message["role"] not in form.parts or not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _ordered(tool: dict[str, Any], form: Form) -> dict[str, Any]:
    """Return a tool with its keys in the order in which models have seen them."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    ordered = {key: function[key] for key in _FUNCTION_ORDER if key in function} | function
    if form.tools == "bare":
        return ordered
    return {key: tool[key] for key in _TOOL_ORDER if key in tool} | tool | {"function": ordered}
