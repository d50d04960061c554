"""Harmony, the format of gpt-oss: an answer is messages, each with a header that names its channel.

<|channel|>analysis<|message|>REASONING<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
<|start|>assistant<|channel|>final<|message|>TEXT<|return|>

The prompt ends with <|start|>assistant. The chat template names the receiver before the channel, so models do that,
too.
"""

from collections.abc import Sequence
from typing import Final

from protocol.answer_formats.rules import CallGrammar, NotOffered, Rules, Section, WantedTool, escaped
from protocol.answer_formats.source import Found, ReadCalls, Source, Steps, ignore

REASONING: Final = ("<|channel|>analysis<|message|>", "<|end|>")
LEAD: Final = "<|start|>assistant"
HEAD: Final = "<|channel|>final<|message|>"
_TO: Final = "to=functions."
BEGINS: Final = (f"<|channel|>commentary {_TO}", f"{LEAD} {_TO}", f"<|channel|>analysis {_TO}")
OPENING: Final = _TO[0]
"""Without a reasoning, an answer may begin with the receiver."""
TOKENS: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
ENDS: Final = ("<|call|>", "<|return|>")
HEADERS: Final = (
    LEAD, HEAD, "<|channel|>final <|constrain|>json<|message|>", "<|channel|>final <|constrain|>JSON<|message|>",
    "<|channel|>commentary<|message|>", "<|end|>", *ENDS,
)  # fmt: skip
_MESSAGE: Final = "<|message|>"
_CHANNEL: Final = "<|channel|>commentary"
_NO_NAME: Final = "<> \n{"


def read(source: Source, calls: ReadCalls, marker: str) -> Steps[Found]:
    """Read a call: its name, the rest of its header, and its arguments."""
    if not marker:
        yield from source.blanks()
        if not (yield from source.literal(_TO)):
            return Found.NOTHING
    name = yield from source.word(_NO_NAME)
    if name is None:
        return Found.NOTHING
    for part in (_CHANNEL, " ", "<|constrain|>", "json", " ", "code"):
        yield from source.literal(part)
    if not (yield from source.literal(_MESSAGE)):
        return Found.NOTHING
    yield from source.blanks()
    if (yield from source.peek()) != "{":
        return Found.NOTHING
    is_known = name in calls.tools
    if is_known:
        calls.start(name)
    if (yield from source.json(calls.arguments if is_known else ignore)):
        if is_known:
            calls.end()
        yield from source.closing(ENDS[0])
    return Found.CALL if is_known else Found.TEXT


def rules(rules: Rules, tools: Sequence[WantedTool]) -> CallGrammar:
    """Write the grammar of calls."""
    for tool in tools:
        if not tool.name or set(_NO_NAME).intersection(tool.name):
            raise NotOffered(f"tools: the name {tool.name[:64]!r} cannot be written in this model's format")
    kind, message = f"({escaped(' <|constrain|>json')}| json)?", escaped(_MESSAGE)

    def section(before: str, channel: str) -> Section:
        calls = (f"/{before}{escaped(tool.name + channel)}{kind}{message}/ {tool.json()}" for tool in tools)
        return Section(f'{rules.any_of(calls)} "{ENDS[0]}"?')

    usual, receiver_first = section("", ""), section("", _CHANNEL)
    names = "|".join(escaped(tool.name) for tool in tools)
    return CallGrammar(
        [usual, receiver_first, usual],
        opened=section(f" ?{escaped(_TO)}", _CHANNEL),
        looks=f"[ \\t\\r\\n]*{escaped(_TO)}({names})[<> \\n{{]",
        between=LEAD,
    )
