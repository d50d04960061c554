"""Describe the messages between clients and the supervisor, and the verbs of CALL."""

import inspect
from dataclasses import fields
from typing import Any, get_type_hints

from protocol import bodies
from protocol.attribute_docs import attribute_docs
from protocol.chat import ChatMessage
from protocol.embedding import EmbedRequest, RerankRequest
from protocol.messages import (
    CLIENT_TO_SUPERVISOR,
    MESSAGE_CLASSES,
    SUPERVISOR_TO_CLIENT,
    VERSION,
    EventEntry,
    EventFlag,
    Events,
    FinishReason,
    Generate,
    Kind,
)
from protocol.results import result_of
from protocol.values import hints_of
from protocol.verbs import VERBS, Right
from supervisor.logs.events import EventKind
from supervisor.workers.life import WorkerState
from tools.docs.markdown import GENERATED, table, text
from tools.docs.wire_maps import KEY_HEADER, described, inner_maps, listed, map_section, section_base, type_name

ELEMENT_HEADER = ("element", "type", "meaning")
ALL_MESSAGES = (
    "In every message `request` is the number of the request, and `call` that of the call. `body` is a bin that holds "
    "one msgpack map, if nothing else is said. Integers outside of maps are u64. A key is always there, unless its "
    "type says *optional*. The ending of a name may be its unit: `_s`, `_ms`, `_bytes`, `_tokens`."
)
ALL_VERBS = "A parameter may be left out if its type says *optional*."
ELSEWHERE = {
    Kind.CALL: "The verbs, their parameters and their results are in [Verbs of CALL](#verbs-of-call).",
}
"""Text for a kind whose body is described in another section."""


def messages() -> str:
    """Return the sections about all messages, and the maps that they hold."""
    parts = [GENERATED.format(source="protocol/messages.py and protocol/bodies.py"), ALL_MESSAGES]
    parts += ["### Messages of the client", *(_message(kind) for kind in sorted(CLIENT_TO_SUPERVISOR))]
    only = sorted(SUPERVISOR_TO_CLIENT - CLIENT_TO_SUPERVISOR)
    parts += ["### Messages of the supervisor", *(_message(kind) for kind in only)]
    parts += ["### Maps in the bodies", _models()]
    maps = inner_maps(bodies.WelcomeBody, bodies.ErrorBody, bodies.ReplyBody, *_EVENT_MAPS)
    parts += [map_section(map_type, "####") for map_type in maps if map_type is not bodies.Model]
    return "\n\n".join(parts) + "\n"


def verbs() -> str:
    """Return the table of verbs, and a section about each."""
    results = [result_of(verb) for verb in VERBS.values()]
    bases = {section_base(result) for result in results}
    shared = {result for result in results if get_type_hints(result) and (results.count(result) > 1 or result in bases)}
    parts = [ALL_VERBS]
    for name, verb in VERBS.items():
        result = result_of(verb)
        returned = f"{type_name(result)}." if result in shared else described(result)
        parts += [f"#### Verb `{name}`", verb.purpose, _under("Parameters", described(verb.params))]
        parts += [_under("Result", returned)]
    known = (bodies.Model, bodies.Failure)
    maps = dict.fromkeys(inner for verb in VERBS.values() for inner in inner_maps(verb.params, result_of(verb)))
    maps |= dict.fromkeys(shared)
    parts += [map_section(map_type, "####") for map_type in maps if map_type not in known]
    kinds = attribute_docs(EventKind)
    parts += ["Kinds of events:", table(("kind", "meaning"), [(f"`{k}`", text(kinds[k.name])) for k in EventKind])]
    note = GENERATED.format(source="protocol/verbs.py, protocol/results.py, supervisor/logs/events.py")
    return "\n\n".join([note, _rights(), *parts]) + "\n"


def _rights() -> str:
    """Return the table of the rights that verbs need."""
    verbs_of: dict[tuple[str, str], list[str]] = {}
    for name, verb in VERBS.items():
        rights = [right for right in Right if right in verb.rights]
        needed = "any" if len(rights) == len(Right) else " or ".join(f"`{right}`" for right in rights)
        place = needed, "`admin`" if verb.order else "`front` or `admin`"
        verbs_of.setdefault(place, []).append(f"[`{name}`](#verb-{name})")
    rows = [(*place, ", ".join(names)) for place, names in verbs_of.items()]
    return table(("right over TCP", "socket over ipc", "verbs"), rows)


def _message(kind: Kind) -> str:
    message: Any = MESSAGE_CLASSES[kind]
    elements = [element for element in fields(message) if element.name != "kind"]
    layout = ", ".join([str(VERSION), str(int(kind)), *(element.name for element in elements)])
    direction = "either side" if kind in CLIENT_TO_SUPERVISOR & SUPERVISOR_TO_CLIENT else ""
    heading = f"#### {kind.name}\n\n`[{layout}]`" + (f" ({direction})" if direction else "")
    docs, hints = attribute_docs(message), get_type_hints(message)
    body_of_vectors: Any = {Kind.EMBED: EmbedRequest, Kind.RERANK: RerankRequest}.get(kind)
    rows = [(e.name, _element_type(hints[e.name]), docs[e.name]) for e in elements if e.name in docs]
    rows = rows if body_of_vectors is None else []
    parts = [heading, text(inspect.cleandoc(message.__doc__)), *filter(None, [listed(ELEMENT_HEADER, rows)])]
    if message is Events:
        parts += _events()
    elif message is Generate:
        parts += _generate()
    elif body_of_vectors is not None:
        parts.append(_under("Body", table(KEY_HEADER, _keys_of(body_of_vectors))))
    elif kind in ELSEWHERE:
        parts.append(ELSEWHERE[kind])
    elif body := getattr(bodies, f"{message.__name__}Body", None):
        parts.append(_under("Body", described(body)))
    return "\n\n".join(parts)


def _generate() -> list[str]:
    return [
        "[Options of a request](http-api.md#options-of-a-request) has the keys of the body and, under *How the request "
        "is served*, those of the route. There, a text is a string, a list an array, bytes a bin. A number is an "
        "integer or a float. The keys of `logit_bias` are strings of digits.",
        "A message in `messages`:",
        table(KEY_HEADER, _keys_of(ChatMessage)),
    ]


def _keys_of(map_type: Any) -> list[tuple[str, str, str]]:
    hints, docs = hints_of(map_type), attribute_docs(map_type)
    return [
        (f"`{name}`", type_name(hint) + (", optional" if hasattr(map_type, name) else ""), text(docs[name]))
        for name, hint in hints.items()
    ]


def _element_type(hint: Any) -> str:
    return "array of entries" if hint == list[EventEntry] else type_name(hint)


def _events() -> list[str]:
    entry = attribute_docs(EventEntry)
    rows = [(f"`{name}`", text(entry[name])) for name in EventEntry._fields if name in entry]
    flags = attribute_docs(EventFlag)
    reasons = attribute_docs(FinishReason)
    return [
        f"An entry is an array of five integers, `[{', '.join(EventEntry._fields)}]`:",
        table(("element", "meaning"), rows),
        "Flags:",
        table(("bit", "name", "meaning"), [(str(int(bit)), bit.name or "", flags[str(bit.name)]) for bit in EventFlag]),
        *(f"**{name}.** {described(map_type)}" for name, map_type in zip(_EVENT_NAMES, _EVENT_MAPS, strict=True)),
        "Values of `finish_reason`; take one that you do not know for an end like `stop`:",
        table(
            ("value", "meaning"), [(f"`{getattr(FinishReason, name)}`", text(words)) for name, words in reasons.items()]
        ),
    ]  # fmt: skip


_EVENT_MAPS = (bodies.DeltaEvent, bodies.FinishedEvent, bodies.ErrorEvent)
_EVENT_NAMES = ("Map of a delta", "Map of FINISHED", "Map of ERROR")


def _models() -> str:
    docs = attribute_docs(WorkerState)
    rows = [(f"`{state}`", text(docs[state.name])) for state in WorkerState]
    message = "States; take one that you do not know for one that is not `ready`:"
    return "\n\n".join([map_section(bodies.Model, "####"), message, table(("state", "meaning"), rows)])


def _under(heading: str, words: str) -> str:
    """Return words below what they are about, on the same line if they do not begin with a table."""
    return f"{heading}:" + ("\n\n" if words.startswith("|") else " ") + words
