"""The tasks of the chat model ``agent``, and the right answer to a conversation with tools.

The last user message asks for one of these, in one sentence or several:

* ``What is the weather in Paris and Rome?``: a call for each place, of the tool ``get_weather``: a topic's tool has its
  name. The place becomes the tool's first parameter. ``What is the weather like in Paris?``, ``Tell me the weather in
  Paris.`` and, without more, ``weather in Paris`` are asked in the same way.
* ``Call multiply with a=3, b=12.``: exactly this call. The schema decides whether a value is a number or a string.
* ``Call find_user with name=Ann, then get_weather with city=the result.``: one call after the other.
* ``Count to 12.``: the numbers, in the reasoning and in the answer. This makes answers of any length.
* a greeting, thanks, and anything else: one fixed sentence each.

A message that begins with ``Please`` is answered with ``Gladly.`` before the calls. As soon as each call has its
result, the answer tells the results: ``The weather in Paris is sunny.`` Every answer begins with reasoning.

Without any tools, a question for a tool gets the answer that there is none. A question for a tool that is missing among
others is no task of the model: so small a model does not notice, and calls another one, or one that there is not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tools.demo_models.agent_chat import Message, Tool, body_text

HELLO: Final = "Hello! I call the tools that you offer me."
WELCOME: Final = "You are welcome!"
FALLBACK: Final = "I can only call tools and count."
GREETINGS: Final = ("Hello!", "Hello", "Hi!", "Hi", "Good morning!", "Good evening!")
THANKS: Final = ("Thank you!", "Thanks!", "Thank you very much!")
RESULT: Final = "the result"
"""The value that stands for the result of the call before."""

_LOOKUP: Final = re.compile(
    r"(?:What is the|(?:Please tell|Tell) me the) (?P<topic>[a-z]+(?: [a-z]+)?)(?: like)? (?P<word>in|of|for|at) "
    r"(?P<values>[^?.=]+)[?.]"
)
_BARE: Final = re.compile(r"(?P<topic>[a-z]+(?: [a-z]+)?) (?P<word>in|of|for|at) (?P<values>[^?.=]+)")
_CALL: Final = re.compile(r"(?:Please call|Call) (\w+(?: with .+?)?(?:, then \w+(?: with .+?)?)*)\.")
_ONE_CALL: Final = re.compile(r"(\w+)(?: with (.+))?")
_COUNT: Final = re.compile(r"Count to (\d{1,2})\.")
_SENTENCE: Final = re.compile(r"(?<=[?.]) ")


@dataclass(frozen=True)
class Answer:
    """What the assistant says next: reasoning, text and calls, each a pair (name, arguments)."""

    reasoning: str
    content: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()

    def text(self, thinking: bool = True) -> str:
        """Return the answer as the model writes it, without its end-of-turn token."""
        body = body_text(self.content, self.calls)
        return f"<think>\n{self.reasoning}\n</think>\n\n{body}" if thinking else body


@dataclass(frozen=True)
class Lookup:
    """A question for the ``topic`` of one or more values. ``word`` is the preposition between them."""

    topic: str
    word: str
    values: tuple[str, ...]
    joined: str

    def asked(self) -> str:
        return f"the {self.topic} {self.word} {self.joined}"


Named = tuple[str, tuple[tuple[str, str], ...]]
"""A call that the user spelled out: the tool's name, and pairs of parameter and value."""


def agent_answer(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Answer:
    """Return the right answer to a conversation whose last message is the user's or a tool's.

    The results that count are those behind the last user message, in the order of the calls. Raises ValueError if tools
    are offered, but not the one that the user wants.
    """
    asked = max(i for i, message in enumerate(messages) if message["role"] == "user")
    text = messages[asked]["content"]
    results = [message["content"] for message in messages[asked + 1 :] if message["role"] == "tool"]
    if lookups := read_lookups(text):
        return _look_up(lookups, tools, results, text.startswith("Please "))
    if chains := read_calls(text):
        return _call(chains, tools, results, text.startswith("Please "))
    if match := _COUNT.fullmatch(text):
        numbers = " ".join(str(number) for number in range(1, int(match[1]) + 1))
        return Answer(f"I count: {numbers}.", numbers)
    if text in GREETINGS:
        return Answer("The user greets me.", HELLO)
    if text in THANKS:
        return Answer("The user thanks me.", WELCOME)
    return Answer("The user wants what I cannot do.", FALLBACK)


def read_lookups(text: str) -> list[Lookup]:
    """Return the lookups that a message asks for; none if one of its sentences is something else."""
    if match := _BARE.fullmatch(text):
        return [_lookup(match)]
    matches = [_LOOKUP.fullmatch(sentence) for sentence in _SENTENCE.split(text)]
    return [_lookup(match) for match in matches if match] if all(matches) else []


def read_calls(text: str) -> list[list[Named]]:
    """Return the calls that a message spells out: for each sentence the calls that follow one another."""
    matches = [_CALL.fullmatch(sentence) for sentence in _SENTENCE.split(text)]
    return [[_named(link) for link in match[1].split(", then ")] for match in matches if match] if all(matches) else []


def tool_name(topic: str) -> str:
    """Return the name of the tool that looks a topic up."""
    return f"get_{topic.replace(' ', '_')}"


def properties_of(tool: Tool) -> dict[str, Any]:
    """Return the schemas of a tool's parameters by name."""
    properties: dict[str, Any] = tool["function"].get("parameters", {}).get("properties", {})
    return properties


def _lookup(match: re.Match[str]) -> Lookup:
    return Lookup(
        match["topic"].removesuffix(" like"),
        match["word"],
        tuple(re.split(r", | and ", match["values"])),
        match["values"],
    )


def _named(link: str) -> Named:
    match = _ONE_CALL.fullmatch(link)
    if not match:
        raise ValueError(f"not a call: {link!r}")
    pairs = [pair.partition("=") for pair in match[2].split(", ")] if match[2] else []
    return match[1], tuple((name, value) for name, _, value in pairs)


def _look_up(lookups: list[Lookup], tools: Sequence[Tool], results: list[str], gladly: bool) -> Answer:
    wanted, calls, told = [], [], []
    for lookup in lookups:
        if not tools:
            return Answer(
                f"The user wants {lookup.asked()}. No tool gives it.", f"I have no tool for {lookup.asked()}."
            )
        name = tool_name(lookup.topic)
        tool = next((tool for tool in tools if tool["function"]["name"] == name), None)
        if tool is None:
            raise ValueError(f"no tool is called {name}")
        wanted.append(f"The user wants {lookup.asked()}. The tool {name} gives it.")
        parameter, schema = next(iter(properties_of(tool).items()))
        for value in lookup.values:
            calls.append((name, {parameter: _typed(value, schema)}))
            told.append(f"The {lookup.topic} {lookup.word} {value} is ")
    return _next([calls], told, results, " ".join(wanted), gladly)


def _call(chains: list[list[Named]], tools: Sequence[Tool], results: list[str], gladly: bool) -> Answer:
    """Return the answer to spelled-out calls. Sentences make parallel calls; a chain makes one call after another."""
    named = [link for chain in chains for link in chain]
    names = [name for name, _ in named]
    offered = {tool["function"]["name"]: tool for tool in tools}
    for name in names:
        if not tools:
            return Answer(
                f"The user wants me to call {name}. There is no such tool.", f"I have no tool that is called {name}."
            )
        if name not in offered:
            raise ValueError(f"no tool is called {name}")
    calls: list[tuple[str, dict[str, Any]]] = []
    for i, (name, pairs) in enumerate(named):
        before = results[i - 1] if 0 < i <= len(results) else RESULT
        properties = properties_of(offered[name])
        calls.append(
            (name, {key: _typed(before if value == RESULT else value, properties[key]) for key, value in pairs})
        )
    chained = len(chains) == 1
    return _next(
        [[call] for call in calls] if chained else [calls],
        [f"The result of {name} is " for name in names],
        results,
        f"The user wants me to call {(', then ' if chained else ' and ').join(names)}.",
        gladly,
    )


def _next(
    groups: list[list[tuple[str, dict[str, Any]]]], told: list[str], results: list[str], wanted: str, gladly: bool
) -> Answer:
    """Return the calls of the first group that lacks results, or the results of all groups as sentences."""
    done = len(results)
    for group in groups:
        if done < len(group):
            content = "Gladly." if gladly and not results else ""
            return Answer(f"Next, I call {group[done][0]}." if results else wanted, content, tuple(group[done:]))
        done -= len(group)
    sentences = [f"{start}{result}." for start, result in zip(told, results, strict=False)]
    return Answer("Every tool has answered.", " ".join(sentences))


def _typed(value: str, schema: dict[str, Any]) -> Any:
    """Return the value as the type that the schema of the parameter asks for."""
    match schema.get("type"):
        case "integer":
            return int(value)
        case "number":
            return float(value) if "." in value else int(value)
        case "boolean":
            return value == "true"
    return value
