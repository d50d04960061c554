"""Render conversations to text, in processes that may be killed: see ``template_child``.

This module starts no thread, and its calls do not block. A template that loops, or allocates without end, costs its own
request one second of processor time. The worker's steps go on meanwhile. One process is enough for templates that
behave. If a process works for longer than PATIENCE_S while other conversations wait, more processes are started.
Connections take turns, so a client whose conversations take long delays other clients little.

A process that was killed from outside, or that has stopped working, is not evidence against its conversation. The
conversation is rendered once more in another process. If that fails too, the request ends with ``helper_failed``, which
clients may retry.
"""

import hashlib
import json
import os
import re
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import msgpack

from model_worker.engine import ChatTemplate
from protocol.answer_formats import json_formats
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.process.birth import helper_environment
from protocol.process.helper_process import HelperProcess
from protocol.values import read

# Turn a conversation into what a chat template can take, and lose no word of it. Pure.
#
# Chat templates are programs with opinions. One refuses a system message in the middle of a conversation, another one
# drops the calls of a message whose content is an empty text. ``template_probes`` asks a template what it can take,
# and notes that in a ``TemplateForm``. ``adapt`` changes a conversation only where its template asks for a change.


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
class TemplateForm:
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
    def from_wire(cls, given: Any) -> "TemplateForm":
        """Return the form that the template's process has found. Raises ValueError for anything else."""
        if not isinstance(given, dict) or len(given) < len(fields(cls)):
            raise ValueError("no form: every field must be there")
        return read(cls, given)


class UnfitError(Exception):
    """Raised for a conversation that cannot be put into the template's form without loss. The text names the reason."""


def adapt(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, form: TemplateForm
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
        turns.append(_joined(first, json_formats.tools_text(tools)))
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
            text, before = json_formats.calls_text(written), message.get("content")
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            turns.append({**kept, "content": f"{before}\n{text}" if before else text})
        elif message["role"] == "tool":
            text = json_formats.result_text(
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


def _with_systems(messages: list[Message], form: TemplateForm) -> list[Message]:
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


def _merged(messages: list[Message], form: TemplateForm) -> list[Message]:
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


def _with_calls(messages: list[Message], form: TemplateForm) -> list[Message]:
    """Write calls and results as the template takes them."""
    if any("tool_calls" in message for message in messages) and not form.calls:
        raise UnfitError("the model's chat template does not show calls of tools: leave out tool_calls")
    if any(message["role"] == "tool" for message in messages) and not form.results:
        raise UnfitError("the model's chat template does not show results of tools: leave out messages of role tool")
    ids = _nine(messages) if form.nine else {}
    turns = messages if form.parallel else _one_by_one(messages)
    return [turn for message in turns for turn in _called(message, form, ids)]


def _called(message: Message, form: TemplateForm, ids: Mapping[str, str]) -> Iterator[Message]:
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


def _no_content(text: str | None, form: TemplateForm) -> dict[str, str | None]:
    """Return the content of a message that has calls and no text. Keep an empty text if the template takes it."""
    ways = NULL_CONTENTS if text is None else ("empty", "absent", "null")
    way = next((way for way in ways if way in form.null_contents), "empty")
    return {} if way == "absent" else {"content": "" if way == "empty" else None}


def _call(call: dict[str, Any], form: TemplateForm, ids: Mapping[str, str]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    call = {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), form)}}
    if call.get("id") in ids:
        call["id"] = ids[call["id"]]
    return call


def _arguments(given: Any, form: TemplateForm) -> Any:
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


def _with_reasoning(message: Message, form: TemplateForm) -> Message:
    """Give the reasoning the names that templates know. transformers fills the first two."""
    reasoned = message.get("reasoning_content")
    if not reasoned:
        return message
    named = {"thinking": reasoned} | ({form.reasoning: reasoned} if form.reasoning else {})
    return {**named, **message}


def _in_parts(message: Message, form: TemplateForm) -> Message:
    if message["role"] not in form.parts or not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _ordered(tool: dict[str, Any], form: TemplateForm) -> dict[str, Any]:
    """Return a tool with its keys in the order in which models have seen them."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    ordered = {key: function[key] for key in _FUNCTION_ORDER if key in function} | function
    if form.tools == "bare":
        return ordered
    return {key: tool[key] for key in _TOOL_ORDER if key in tool} | tool | {"function": ordered}


RENDER_S = 1.0
"""Seconds of processor time for compiling and rendering a template. After that the process's own timer ends it."""
PROBES_S = 2.0
"""Seconds of processor time for all probes of a model's templates."""
LEASE_S = 10.0
"""Seconds of wall-clock time that a process may take for one conversation. A process that has neither answered nor used
up its processor time by then has stopped working, and is killed."""
START_S = 20.0
"""Seconds that a process may take to start. Enough for a busy machine."""
PATIENCE_S = 0.05
"""Seconds that other conversations wait for a busy process before another process is started."""
MOST_CHILDREN = 4
MOST_TRIES = 2
"""The most processes that one conversation is given to, if processes are killed or stop working."""
RETRY_MS = 1000
"""``retry_after_ms`` of a request whose process failed."""
_LONGEST_ANSWER = 64 << 20
_PROGRAM = str(Path(__file__).with_name("template_child.py"))
_ROOT = str(Path(__file__).resolve().parent.parent)
"""The directory that this package is imported from. In an editable install it need not be in ``sys.path``."""

Outcome = tuple[int, str | WireError]
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that end a process by its own fault, other than the signal of its timer."""


@dataclass(slots=True, eq=False)
class _Chat:
    """A conversation to render for ``key``. ``tries`` counts the processes that it was given to."""

    key: int
    channel: int
    conversation: dict[str, Any]
    tries: int = 0


class Renderer:
    """Renders conversations by a model's template, in processes that it starts when they are needed.

    template  the model's chat template
    limit     the largest size of a rendered text, in bytes
    forms     what the template can take: of the one for conversations without tools, and of the one for those with
              tools (see ``probe_template``). Without forms, the template gets each conversation as it is

    ``ask`` takes a conversation under a key. ``collect`` returns the results in the order in which they are done. A
    result is the text, or RequestError (field "messages"), or WireError HELPER_FAILED if the processes were killed or
    stopped working, or WireError INTERNAL if the process crashed.
    """

    def __init__(self, template: ChatTemplate, limit: int, forms: Sequence[TemplateForm] = ()) -> None:
        self._sources = template.source, template.tool_source or template.source
        self._forms: list[dict[str, Any] | None] = [form.to_wire() for form in forms] or [None, None]
        self._fixed = {
            "special_tokens": dict(template.special_tokens),
            "limit": limit,
            "seconds": RENDER_S,
        }
        self._limit = limit
        self._waiting: dict[int, deque[_Chat]] = {}
        self._children: list[_Child] = []

    def ask(self, key: int, channel: int, conversation: dict[str, Any]) -> None:
        """Render ``ChatFields.for_template()`` when its turn comes. ``channel`` is the connection of the client."""
        self._waiting.setdefault(channel, deque()).append(_Chat(key, channel, conversation))

    def cancel(self, key: int) -> None:
        """Drop the conversation of this key, or its result. A rendering that has begun goes on to its end."""
        for channel, queue in list(self._waiting.items()):
            self._waiting[channel] = deque(chat for chat in queue if chat.key != key)
            if not self._waiting[channel]:
                del self._waiting[channel]
        for child in self._children:
            if child.chat is not None and child.chat.key == key:
                child.chat = None

    @property
    def busy(self) -> bool:
        """Return whether ``collect`` has something to do, now or soon."""
        return bool(self._waiting) or any(child.at_work or child.gone for child in self._children)

    @property
    def descriptors(self) -> list[int]:
        """Return descriptors that become readable when ``collect`` has results."""
        return [child.descriptor for child in self._children if child.at_work and not child.gone]

    def collect(self) -> list[Outcome]:
        """Return the results that are ready, and start what can be started. Does not block."""
        now = time.monotonic()
        done: list[Outcome] = []
        for child in list(self._children):
            child.look(now)
            if child.answer is not None:
                if child.chat is not None:
                    done.append((child.chat.key, self._text_of(child.answer)))
                if "last" in child.answer:
                    child.end()
                child.chat, child.answer = None, None
            if child.gone and child.wait(0.0):
                self._children.remove(child)
                if (chat := child.chat) is not None:
                    why = child.why()
                    if why.code is ErrorCode.HELPER_FAILED and chat.tries < MOST_TRIES:
                        # This conversation has already had its turn, so it goes before all others.
                        queue = self._waiting.pop(chat.channel, deque())
                        queue.appendleft(chat)
                        self._waiting = {chat.channel: queue, **self._waiting}
                    else:
                        done.append((chat.key, why))
        done += self._give_out(now)
        return done

    def _give_out(self, now: float) -> list[Outcome]:
        while self._waiting:
            alive = [child for child in self._children if not child.gone]
            free = next((child for child in alive if not child.at_work), None)
            soon = any(not child.ready or now - child.since < PATIENCE_S for child in alive)
            if free is None and (soon or len(self._children) >= MOST_CHILDREN):
                return []
            channel, queue = next(iter(self._waiting.items()))
            chat = queue.popleft()
            del self._waiting[channel]
            if queue:
                self._waiting[channel] = queue  # behind the other connections
            try:
                if free is None:
                    self._children.append(free := _Child(now))
                which = bool(chat.conversation["tools"])
                fixed = {**self._fixed, "template": self._sources[which], "form": self._forms[which]}
                free.give(chat, msgpack.packb({**fixed, **chat.conversation}), now)
            except OSError as e:
                if free is not None:
                    free.chat = None
                    free.end()
                return [(chat.key, _failed(f"cannot be started ({e.strerror or type(e).__name__})"))]
        idle = [child for child in self._children if not child.at_work and not child.gone]
        for child in idle[1:]:
            child.end()
        return []

    def _text_of(self, answer: dict[str, Any]) -> str | WireError:
        if "text" in answer:
            return str(answer["text"], "utf-8")
        if "size" in answer:
            return RequestError(
                f"the rendered messages have more than {self._limit} bytes, which is the most that can fit the context",
                field="messages",
                code=ErrorCode.CONTEXT_OVERFLOW,
            )
        return RequestError(str(answer["error"]), field=str(answer.get("field", "messages")))

    def close(self) -> None:
        """End the processes, and wait for that."""
        for child in self._children:
            child.end()
            child.wait()
        self._children.clear()
        self._waiting.clear()


class _Child(HelperProcess):
    """One template child. It is given one conversation at a time, possibly before it is ``ready``.

    A conversation and its text lie in a file in memory that both processes have open. Only the lengths go through the
    link. A socket holds less, so a long conversation would have to be written in pieces, between steps.
    Raises OSError if no process can be started.
    """

    def __init__(self, now: float) -> None:
        self.chat: _Chat | None = None
        """The conversation that was given last, until its answer is taken; None if its answer is not wanted."""
        self.answer: dict[str, Any] | None = None
        self.at_work = False
        self.ready = False
        self.gone = False
        self.since = now
        """The time at which the process was started, was ready, or was given its present conversation (monotonic
        seconds)."""
        self._fault = ""
        self._mailbox = os.memfd_create("conversation")
        try:
            # -S: the child gets the worker's import path, so it need not search for it again.
            super().__init__(
                [sys.executable, "-S", "-P", _PROGRAM, str(self._mailbox)],
                helper_environment(PYTHONPATH=os.pathsep.join([*filter(None, sys.path), _ROOT])),
                passed=(self._mailbox,), apart=False, errors=None,
            )  # fmt: skip
        except OSError:
            os.close(self._mailbox)
            raise

    def wait(self, within_s: float | None = None) -> bool:
        if not super().wait(within_s):
            return False
        if self._mailbox >= 0:
            os.close(self._mailbox)
            self._mailbox = -1
        return True

    def give(self, chat: _Chat, request: bytes, now: float) -> None:
        """Hand over a conversation, packed as ``request``. Raises OSError."""
        self.chat, self.at_work, self.answer = chat, True, None
        chat.tries += 1
        if self.ready:
            self.since = now
        os.ftruncate(self._mailbox, 0)
        os.pwrite(self._mailbox, request, 0)
        self.send(len(request).to_bytes(8, "little"))

    def look(self, now: float) -> None:
        """Read what the process has sent, and kill the process if it is late."""
        if self.gone:
            return
        try:
            head = self.receive()
        except (EOFError, ValueError):
            self.gone = True
            self.kill()
            return
        if head is None:
            patience = LEASE_S if self.ready else START_S
            if self.at_work and now - self.since > patience:
                self._fault = "stands still" if self.ready else "does not start"
                self.end()
        elif not self.ready:
            self.ready, self.since = True, now
            self.look(now)
        else:
            self._read_answer(min(int.from_bytes(head, "little"), _LONGEST_ANSWER))

    def _read_answer(self, length: int) -> None:
        """Read the answer. Accept nothing but a valid map: a template may have broken out of the sandbox."""
        packed = os.pread(self._mailbox, length, 0)
        os.ftruncate(self._mailbox, 0)
        try:
            answer = msgpack.unpackb(packed)
            if not isinstance(answer, dict) or not isinstance(answer.get("text", b""), bytes):
                raise ValueError("no answer")
            if not answer.keys() & {"text", "size", "error", "forms"}:
                raise ValueError("no answer")
            answer.get("text", b"").decode()
        except (ValueError, msgpack.UnpackException):
            self._fault = "answers nonsense"
            self.end()
        else:
            self.answer, self.at_work = answer, False

    def end(self) -> None:
        self.kill()
        self.gone = True

    def why(self) -> WireError:
        """Return the error for the request of a process that has ended without an answer."""
        code = self.code or 0
        if self._fault in ("stands still", "does not start"):
            return _failed(self._fault)
        if self._fault:
            return WireError(ErrorCode.INTERNAL, f"the process that renders chats {self._fault}")
        if code == -signal.SIGPROF:
            return RequestError(
                f"the model's chat template takes longer than {RENDER_S:g} s of processor time to render these "
                "messages",
                field="messages",
            )
        if code >= 0 or -code in _CRASHES:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            return WireError(ErrorCode.INTERNAL, f"the process that renders chats {how}")
        return _failed(f"was ended by signal {-code}")


def probe_template(
    template: ChatTemplate, alive: Callable[[], None] = lambda: None
) -> tuple[TemplateForm, TemplateForm]:
    """Return what a model's template can take, for conversations without tools and with tools. Blocks for a moment.

    alive  is called at least every tenth of a second

    Raises ChildProcessError if the process that renders chats cannot be started, or is killed twice.
    """
    sources = [template.source, *([template.tool_source] if template.tool_source else [])]
    request = {"templates": sources, "special_tokens": dict(template.special_tokens), "seconds": PROBES_S}
    for _ in range(MOST_TRIES):
        child = _Child(time.monotonic())
        try:
            child.give(_Chat(0, 0, {}), msgpack.packb(request), time.monotonic())
            while child.answer is None and not child.gone:
                alive()
                select.select([child.descriptor], [], [], 0.1)
                child.look(time.monotonic())
            if child.answer is not None:
                forms = [TemplateForm.from_wire(form) for form in child.answer["forms"]]
                return forms[0], forms[-1]
            child.wait()
            why = child.why()
        except (KeyError, IndexError, TypeError, ValueError):
            why = WireError(ErrorCode.INTERNAL, "it answers nonsense")
        finally:
            child.end()
            child.wait()
        if why.code is not ErrorCode.HELPER_FAILED:
            late = child.code == -signal.SIGPROF
            error = f"it takes longer than {PROBES_S:g} s of processor time for a few words" if late else why.message
            return (failed := TemplateForm(error=error)), failed
    raise ChildProcessError(why.message)


def _failed(how: str) -> WireError:
    """Return the error for a request whose process failed for a reason that has nothing to do with the request."""
    message = f"the process that renders chats {how}: send the request again"
    return WireError(ErrorCode.HELPER_FAILED, message, retry_after_ms=RETRY_MS)
