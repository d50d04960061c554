"""Find out what a chat template can take, by rendering small conversations with it.

Every conversation has words that stand nowhere else. A form of a conversation works if the template renders all of its
words, in their order. Runs in the template's own process.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from model_worker.rendering import ARGUMENTS, NINE, NULL_CONTENTS, REASONING, Message, TemplateForm

Draw = Callable[..., str | None]
"""Renders: (messages, tools=None, end=True), where ``end`` asks for the beginning of the assistant's turn. Returns None
if the template fails."""
LONGEST_CALL: Final = 1 << 14
"""Characters of the text of a call, and of the end of a turn, that are kept."""
NAME: Final = "look_up_qz7"
"""The tool that the probes call."""
VALUES: Final[dict[str, Any]] = {"place_qz": "Oslo Qz7", "deep_qz": {"on_qz": True}}
"""The arguments of the probes' call. The inner value shows whether a template writes Python instead of JSON."""
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"place_qz": {"type": "string"}, "deep_qz": {"type": "object"}},
    "required": ["place_qz", "deep_qz"],
}
"""The schema of the probes' call."""
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "other_qz5",
        "description": "Say what Qz5 is.",
        "parameters": {
            "type": "object",
            "properties": {
                "topic_qz5": {"type": "string", "description": "Words Qz5."},
                "most_qz5": {"type": "integer"},
            },
            "required": ["topic_qz5"],
        },
    },
}
"""A tool that is offered, and that no probe calls."""
_TALKING: Final = ("system", "user", "assistant", "tool")
_IDS: Final = (("call_qz70001", "call_qz70002"), ("qz7000001", "qz7000002"))
_U, _U2, _S, _S2 = "Question qz1.", "Question qz2.", "Rule qz3.", "Rule qz4."
_A, _A2, _R, _R2, _T = "Answer qz5.", "Answer qz6.", "Result qz7.", "Result qz8.", "Thought qz9."


def probe(draw: Draw) -> TemplateForm:
    """Return what a template can take."""
    form = _probe(draw)
    if form.error:  # templates for tools alone may need a list of them
        with_list = _probe(lambda messages, tools=None, end=True: draw(messages, tools or [], end))
        form = form if with_list.error else replace(with_list, tools_list=True)
    return form


def _probe(draw: Draw) -> TemplateForm:
    form: dict[str, Any] = {}
    parts = tuple(role for role in _TALKING if _wants_parts(draw, role))

    def shows(words: Sequence[str], messages: Sequence[Message], tools: Any = None, end: bool = True) -> bool:
        return stands(draw(_in_parts(messages, parts), tools, end), words)

    form["parts"] = parts
    plain = (_said("user", _U), _said("assistant", _A), _said("user", _U2))
    if not (shows([_U, _A, _U2], plain) or shows([_U], plain[:1])):
        return TemplateForm(error="it shows no user's words")
    form["system"] = system = shows([_S], [_said("system", _S), plain[0]])
    form["several_systems"] = shows([_S, _S2, _U], [_said("system", _S), _said("system", _S2), plain[0]])
    form["developer"] = shows([_S, _U], [_said("developer", _S), plain[0]])
    for role, key in (("system", "system_within"), ("developer", "developer_within")):
        late = _said(role, _S2)
        begin = [_said("system", _S)] if system else []
        form[key] = (role == "system" or form["developer"]) and all(
            shows(words, [*begin, *turns])
            for words, turns in (
                ([_U, _A, _S2, _U2], [*plain[:2], late, plain[2]]),
                ([_U, _A, _U2, _S2], [*plain, late]),
            )
        )
    form["merged"] = tuple(
        role
        for role, words, turns in (
            ("user", [_U, _U2], [plain[0], plain[2]]),
            ("assistant", [_U, _A, _A2, _U2], [*plain[:2], _said("assistant", _A2), plain[2]]),
        )
        if not shows(words, turns)
    )
    form["tools"] = next(
        (
            way
            for way, tool in (("wrapped", TOOL), ("bare", TOOL["function"]))
            if shows(["other_qz5"], plain[:1], [tool]) and shows(["topic_qz5"], plain[:1], [tool])
        ),
        "",
    )
    form["turn_ends"] = _turn_ends(draw, parts)
    tools = {"wrapped": [TOOL], "bare": [TOOL["function"]]}.get(form["tools"])
    return TemplateForm(**form, **_calls(shows, lambda *given: draw(_in_parts(given[0], parts), *given[1:]), tools))


def stands(text: str | None, words: Iterable[str]) -> bool:
    """Return whether a text has all words, in their order."""
    if text is None:
        return False
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return False
        at += len(word)
    return True


def _calls(shows: Callable[..., bool], draw: Draw, tools: Any) -> dict[str, Any]:
    """Return the fields of Form that are about calls."""
    ways = [
        (ids, arguments, content)
        for ids in _IDS
        for arguments in ARGUMENTS
        for content in NULL_CONTENTS
        if _shows_call(draw, ids[0], arguments, content, tools)
    ]
    results = bool(ways)
    if not ways:  # the template shows no results, or no calls
        ways = [
            (_IDS[0], arguments, content)
            for arguments in ARGUMENTS
            for content in NULL_CONTENTS
            if _shows_call(draw, _IDS[0][0], arguments, content, tools, result=False)
        ]
        call = _calling([_IDS[0][0]], "text", "empty")
        results = any(
            shows([_U, _R], [_said("user", _U), before, _result(_R, _IDS[0][0])], tools)
            for before in (call, _said("assistant", _A))
        )
    if not ways:
        return {"calls": False, "results": results, "reasoning": _reasoning(shows, None, tools)}
    ids = ways[0][0]
    ways = [way for way in ways if way[0] == ids]
    arguments = tuple(one for one in ARGUMENTS if any(way[1] == one for way in ways))
    contents = tuple(one for one in NULL_CONTENTS if all((ids, way, one) in ways for way in arguments))
    if not contents:
        arguments, contents = ways[0][1:2], tuple(way[2] for way in ways if way[1] == ways[0][1])
    if "map" in arguments:
        arguments = tuple(one for one in arguments if one != "flat")
    way, content = arguments[-1], contents[0]
    user, first = _said("user", _U), _calling(ids[:1], way, content)
    end = [_result(_R, ids[0])] if results else []
    with_text = {**first, "content": _A}
    split = [user, _said("assistant", _A), first, *end]
    reasoning = _reasoning(shows, first, tools, end)
    reasoned = {**with_text, **dict.fromkeys(filter(None, ("thinking", REASONING[0], reasoning)), _T)}
    both = _calling(ids, way, content)
    return {
        "calls": True,
        "results": results,
        "nine": NINE.fullmatch(ids[0]) is not None,
        "arguments": arguments,
        "null_contents": contents,
        "parallel": shows(
            [_U, NAME, "Oslo Qz7", NAME, "Bergen Qz8", *([_R, _R2] if results else [])],
            [user, both, *end, *([_result(_R2, ids[1])] if results else [])],
            tools,
        ),
        "text_beside_calls": shows([_U, _A], [user, with_text, *end], tools)
        and shows([_U, NAME], [user, with_text, *end], tools),
        "reasons_beside": shows([_U, _A], [user, reasoned, *end], tools)
        and shows([_U, NAME], [user, reasoned, *end], tools),
        "split": shows([_U, _A, NAME], split, tools),
        "user_after_result": not results or shows([_U, NAME, _R, _U2], [user, first, *end, _said("user", _U2)], tools),
        "reasoning": reasoning,
        "call": _call_text(draw, [user, first], tools),
    }


def _shows_call(draw: Draw, id: str, arguments: str, content: str, tools: Any, result: bool = True) -> bool:
    """Return whether a template shows a call in this form, and adds no None or null for the missing text."""
    call = _calling([id], arguments, content)
    end = [_result(_R, id)] if result else []
    text = draw([_said("user", _U), call, *end], tools, result)
    if text is None or not stands(text, [_U, NAME, "Oslo Qz7", *([_R] if result else [])]):
        return False
    written = text[text.rindex(_U) :]
    if json.dumps(VALUES) not in written if arguments == "text" else "'on_qz'" in written or "on_qz" not in written:
        return False
    spoken = draw([_said("user", _U), {**call, "content": _A}, *end], tools, result) or ""
    return len(_NOTHING.findall(written)) <= len(_NOTHING.findall(spoken[spoken.rfind(_U) :]))


_NOTHING: Final = re.compile(r"\b(?:None|null)\b")


def _reasoning(shows: Callable[..., bool], call: Message | None, tools: Any, end: Sequence[Message] = ()) -> str:
    """Return the key in which a template reads the reasoning of a turn that has not ended; "" if it shows none."""
    user = _said("user", _U)
    for key in REASONING:
        if call is not None and shows([_U, _T], [user, {**call, key: _T}, *end], tools):
            return key
        if shows([_U, _T], [user, {**_said("assistant", _A), key: _T}], tools, False):
            return key
    return ""


def _call_text(draw: Draw, messages: Sequence[Message], tools: Any) -> str:
    """Return what a template writes for a call, from the beginning of the assistant's answer, or of its turn."""
    whole = draw(messages, tools, False) or ""
    for end in (True, False):
        before = draw(messages[:1], tools, end)
        if before and whole.startswith(before):
            return whole[len(before) :][:LONGEST_CALL]
    return whole[whole.rfind(_U) + len(_U) :][:LONGEST_CALL] if _U in whole else ""


def _turn_ends(draw: Draw, parts: Sequence[str]) -> tuple[str, ...]:
    """Return what a template writes behind the assistant's words, at the end and before the user's next words."""
    turns = _in_parts([_said("user", _U), _said("assistant", _A), _said("user", _U2)], parts)
    last, within = draw(turns[:2], None, False) or "", draw(turns, None, False) or ""
    ends = [last.rpartition(_A)[2] if _A in last else "", within.rpartition(_A)[2].partition(_U2)[0]]
    return tuple(dict.fromkeys(end[:LONGEST_CALL] for end in ends if end))


def _wants_parts(draw: Draw, role: str) -> bool:
    """Return whether a template shows the content of a role only if it is a list of parts."""
    turns = {
        "system": [_said("system", _S), _said("user", _U)],
        "user": [_said("user", _S)],
        "assistant": [_said("user", _U), _said("assistant", _S)],
        "tool": [_said("user", _U), _calling([_IDS[1][0]], "map", "empty"), _result(_S, _IDS[1][0])],
    }[role]
    if stands(draw(turns), [_S]):
        return False
    return any(stands(draw(_in_parts(turns, roles)), [_S]) for roles in ((role,), _TALKING))


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _in_parts(messages: Sequence[Message], roles: Sequence[str]) -> list[Message]:
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message["role"] in roles and isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _calling(ids: Sequence[str], arguments: str, content: str) -> Message:
    values: list[dict[str, Any]] = [VALUES, {**VALUES, "place_qz": "Bergen Qz8"}]
    if arguments == "flat":
        values = [{key: v if isinstance(v, str) else json.dumps(v) for key, v in value.items()} for value in values]
    calls = [
        {
            "id": id,
            "type": "function",
            "function": {"name": NAME, "arguments": json.dumps(value) if arguments == "text" else value},
        }
        for id, value in zip(ids, values, strict=False)
    ]
    call: Message = {"role": "assistant", "content": "" if content == "empty" else None, "tool_calls": calls}
    if content == "absent":
        del call["content"]
    return call


def _result(text: str, id: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": id}
