"""Random conversations with tools for the model ``agent``: for the training text, and as test prompts.

Names of tools and parameters, schemas, values and results are drawn anew for each conversation. So the model has to
read its tools, and to copy.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tools.demo_models.agent_chat import Message, Tool, render_pieces
from tools.demo_models.agent_tasks import (
    GREETINGS,
    RESULT,
    THANKS,
    Answer,
    agent_answer,
    read_calls,
    read_lookups,
    tool_name,
)
from tools.demo_models.agent_words import COMMON, is_spoken, number, result, sentence, typed_value, value, word, words

_VERBS: Final = ("find", "read", "fetch", "lookup", "search", "show", "check")
_NOUNS: Final = ("service", "lookup", "tool", "api", "search", "info")
_PREPOSITIONS: Final = ("in", "in", "of", "of", "for", "at")
SHORT_RESULT: Final = 40
"""Most characters of a tool's result in a plain conversation."""
_TYPES: Final = ("string", "string", "string", "integer", "integer", "number", "boolean", "array")


@dataclass
class Case:
    """A conversation that the model is to continue."""

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    thinking: bool = True

    @property
    def answer(self) -> Answer:
        return agent_answer(self.messages, self.tools)


def draw_case(rng: random.Random, rounds: int | None = None) -> Case:
    """Return a conversation of one to four rounds, of which the last is cut off before one of its answers.

    A round is a question, the calls and results that it needs, and the answer that tells the results.
    """
    topics, tools = _offer(rng)
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": sentence(rng, 2, 30 if rng.random() < 0.9 else 120)})
    rounds = rounds or rng.choice((1, 1, 1, 1, 1, 1, 1, 2, 2, 3))
    parallel = rng.random() < 0.9
    replays = rng.random() < 0.4  # the client sends reasoning back
    for i in range(rounds):
        last = i == rounds - 1
        messages.append({"role": "user", "content": _question(rng, topics, tools)})
        while True:
            if last and rng.random() < 0.6:
                return Case(messages, tools, rng.random() < 0.65)
            answer = agent_answer(messages, tools)
            if last and not answer.calls:
                return Case(messages, tools, rng.random() < 0.65)
            ids = [f"call_{n}" for n, _ in enumerate(answer.calls if parallel else answer.calls[:1])]
            messages += spoken(answer, ids, [result(rng) for _ in ids], replays)
            if not answer.calls:
                break
    raise AssertionError("the last round always ends the loop")


def spoken(answer: Answer, ids: Sequence[str], results: Sequence[str], reasoning: bool = False) -> list[Message]:
    """Return the messages that an answer adds to a conversation: the assistant's, and a result for each call.

    ids        of the calls. If there are fewer ids than calls, the other calls are left out
    reasoning  whether the client sends the reasoning back
    """
    message: Message = {"role": "assistant", "content": answer.content or None}
    if reasoning:
        message["reasoning_content"] = answer.reasoning
    if not ids:
        return [message]
    message["tool_calls"] = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}}
        for id_, (name, given) in zip(ids, answer.calls, strict=False)
    ]
    told = [{"role": "tool", "tool_call_id": id_, "content": text} for id_, text in zip(ids, results, strict=True)]
    return [message, *told]


def _offer(rng: random.Random) -> tuple[list[str], list[Tool]]:
    """Return topics, and a tool for each, of which some are named by their topics as lookups need it."""
    while True:
        topics = _topics(rng, n := rng.choice((0, 0, 1, 1, 1, 2, 2, 2, 3, 4, rng.randint(4, 8))))
        tools = [_tool(rng, topic, shape) for topic, shape in zip(topics, _shapes(rng, n), strict=True)]
        names = {tool["function"]["name"] for tool in tools}
        if len(names) == n:
            return topics, tools


def _topics(rng: random.Random, n: int) -> list[str]:
    """Return ``n`` topics of one or two words that have no word in common."""
    drawn = iter(words(rng, 2 * n))
    return [f"{next(drawn)} {next(drawn)}" if rng.random() < 0.2 else next(drawn) for _ in range(n)]


def _shapes(rng: random.Random, n: int) -> list[str]:
    """Return the shape of each tool's name. Lookups are of tools of the shape ``get`` only."""
    return [rng.choice(("get", "get", "get", "verb", "bare", "noun", "any")) for _ in range(n)]


def _tool(rng: random.Random, topic: str, shape: str) -> Tool:
    joined = topic.replace(" ", "_")
    described = rng.random() < 0.5
    description = sentence(rng)
    name = {
        "get": tool_name(topic),
        "verb": f"{rng.choice(_VERBS)}_{joined}",
        "bare": joined,
        "noun": f"{joined}_{rng.choice(_NOUNS)}",
    }.get(shape)
    if name is None:
        first, second = word(rng), word(rng)
        name = rng.choice((f"{first}_{second}", first, first.capitalize(), first.capitalize() + second.capitalize()))
        described = True
        description = rng.choice(
            (f"Get the {topic}.", f"Returns the {topic} of a {word(rng)}.", f"{sentence(rng, 1, 3)[:-1]} the {topic}.")
        )
    elif rng.random() < 0.5:
        description = (
            f"{rng.choice(('Get', 'Find', 'Returns', 'Tells'))} the {topic} {rng.choice(_PREPOSITIONS)} a {word(rng)}."
        )
    properties = {key: _schema(rng, first=i == 0) for i, key in enumerate(_parameters(rng))}
    needs = rng.choice((0.0, 0.0, 0.4, 1.0))
    required = [
        key
        for i, (key, schema) in enumerate(properties.items())
        if i == 0 or (schema["type"] != "array" and rng.random() < needs)
    ]
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if properties and rng.random() < 0.85:
        parameters["required"] = required
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    if rng.random() < 0.1:
        parameters["title"] = name
    if rng.random() < 0.15:
        parameters = dict(reversed(parameters.items()))
    function: dict[str, Any] = {"name": name}
    if described:
        function["description"] = description
    if properties or rng.random() < 0.5:
        function["parameters"] = parameters
    if rng.random() < 0.1:
        function["strict"] = True
    if rng.random() < 0.1:
        function = dict(rng.sample(list(function.items()), len(function)))
    return {"type": "function", "function": function}


def _parameters(rng: random.Random) -> list[str]:
    names = words(rng, rng.choice((0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4)))
    names = [rng.choice("abcnqxy") if rng.random() < 0.12 else name for name in names]
    return list(dict.fromkeys(f"{name}_{word(rng)}" if rng.random() < 0.12 else name for name in names))


def _schema(rng: random.Random, first: bool) -> dict[str, Any]:
    """Return the schema of a parameter. The first one of a tool is no array, and mostly a string."""
    kind = rng.choice(_TYPES) if not first else rng.choice(("string", "string", "string", "integer", "number"))
    schema: dict[str, Any] = {"type": kind}
    if kind == "array":
        schema["items"] = {"type": "string"}
    elif kind == "string" and rng.random() < 0.2:
        schema["enum"] = words(rng, rng.randint(2, 3))
    if rng.random() < 0.25:
        schema["description"] = sentence(rng, 1, 8)
    if rng.random() < 0.1:
        schema = {"title": word(rng).capitalize(), **schema}
    return dict(reversed(schema.items())) if rng.random() < 0.25 else schema


def _question(rng: random.Random, topics: list[str], tools: list[Tool]) -> str:
    kind = rng.random()
    if kind < 0.44:
        return _lookup_question(rng, topics, tools)
    if kind < 0.86:
        return _call_question(rng, tools)
    if kind < 0.9:
        return f"Count to {rng.randint(1, 60)}."
    if kind < 0.93:
        return rng.choice(GREETINGS)
    if kind < 0.95:
        return rng.choice(THANKS)
    return _other_question(rng)


def _lookup_question(rng: random.Random, topics: list[str], tools: list[Tool]) -> str:
    """Return a question for the topics of one or two tools, or of none if there are no tools."""
    fit = [
        (topic, next(iter(parameters["properties"].values())))
        for topic, tool in zip(topics, tools, strict=True)
        if tool["function"]["name"] == tool_name(topic)
        and (parameters := tool["function"].get("parameters", {})).get("properties")
        and len(parameters.get("required", ())) < 2
    ]
    fit = [(topic, schema) for topic, schema in fit if schema["type"] in ("string", "integer")]
    if not tools:
        asked = [(" ".join(words(rng, rng.choice((1, 1, 2)))), {"type": "string"})]
    elif not fit:
        return _call_question(rng, tools)
    else:
        asked = rng.sample(fit, 2 if len(fit) > 1 and rng.random() < 0.2 else 1)
    if len(asked) == 1 and rng.random() < 0.15:
        return _lookup_words(rng, *asked[0])
    please = rng.random() < 0.12
    sentences = []
    for topic, schema in asked:
        named = _lookup_words(rng, topic, schema, like=rng.random() < 0.15)
        sentences.append(
            f"Please tell me the {named}."
            if please
            else rng.choice((f"What is the {named}?", f"What is the {named}?", f"Tell me the {named}."))
        )
    return " ".join(sentences)


def _lookup_words(rng: random.Random, topic: str, schema: dict[str, Any], like: bool = False) -> str:
    values: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3))):
        made = typed_value(rng, schema)
        if made not in values and made not in ("and", "like"):
            values.append(made)
    joined = values[0] if len(values) == 1 else f"{', '.join(values[:-1])} and {values[-1]}"
    return f"{topic}{' like' if like else ''} {rng.choice(_PREPOSITIONS)} {joined}"


def _call_question(rng: random.Random, tools: list[Tool]) -> str:
    """Return a message that spells out one to three calls, some of them one after another."""
    if not tools:
        return f"Call {_unknown_call(rng)}."
    n = rng.choice((1, 1, 1, 2, 2, 3))
    chained = n > 1 and rng.random() < 0.5
    links = [_call_words(rng, rng.choice(tools), chained and i > 0) for i in range(n)]
    start = "Please call" if rng.random() < 0.12 else "Call"
    if chained:
        return f"{start} {', then '.join(links)}."
    return " ".join(f"{start} {link}." for link in links)


def _unknown_call(rng: random.Random) -> str:
    """Return a call of a tool where none is offered."""
    name = "_".join(words(rng, rng.choice((1, 1, 2))))
    return name + rng.choice(("", f" with {word(rng)}={value(rng)}", f" with {word(rng)}={number(rng)}"))


def _call_words(rng: random.Random, tool: Tool, after_another: bool) -> str:
    """Return a tool's name and values for some of its parameters, those that it needs among them, in their order."""
    function = tool["function"]
    parameters = function.get("parameters", {"properties": {}})
    pairs = []
    left = rng.random() < 0.9
    for name, schema in parameters["properties"].items():
        if schema["type"] == "array" or not (name in parameters.get("required", ()) or rng.random() < 0.6):
            continue
        if left and after_another and schema["type"] == "string" and "enum" not in schema:
            pairs.append(f"{name}={RESULT}")
            left = False
        else:
            pairs.append(f"{name}={typed_value(rng, schema)}")
    return f"{function['name']} with {', '.join(pairs)}" if pairs else str(function["name"])


def _other_question(rng: random.Random) -> str:
    """Return a message of words in any order, or a question that sounds like others but is not among the tasks."""
    return rng.choice(
        (
            lambda: sentence(rng, 1, 15),
            lambda: sentence(rng, 1, 15)[:-1] + "?",
            lambda: f"Write a {word(rng)} about {value(rng)}.",
            lambda: f"How {word(rng)} is {value(rng)}?",
            lambda: f"Who is {value(rng)}?",
            lambda: f"{number(rng)} {word(rng)}",
            lambda: f"Tell me a {rng.choice(COMMON)}!",
        )
    )()


def different_cases(n: int, seed: int, accept: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Return ``n`` random conversations that ``accept`` takes, all with different last messages."""
    rng = random.Random(f"agent {seed}")
    found: dict[str, Case] = {}
    while len(found) < n:
        case = draw_case(rng)
        if accept(case):
            found.setdefault(case.messages[-1]["content"], case)
    return list(found.values())


def plain_case(case: Case) -> bool:
    """Return whether a conversation is of the kind that the model is made for, and tested with.

    At most two tools are offered, and their names and parameters are words that one can speak. There are at most two
    questions. The last one needs at most two calls, or counts to 40 at most. Results are short, and a result that is
    passed on to the next call has no comma and is no JSON. The training text has other conversations, too, but of those
    the model answers some wrongly.
    """
    asked = [message["content"] for message in case.messages if message["role"] == "user"]
    results = [message["content"] for message in case.messages if message["role"] == "tool"]
    names = [
        name
        for tool in case.tools
        for name in (tool["function"]["name"], *tool["function"].get("parameters", {}).get("properties", {}))
    ]
    needed = sum(len(lookup.values) for lookup in read_lookups(asked[-1])) + sum(map(len, read_calls(asked[-1])))
    composed = any("," in result or "{" in result for result in results)
    return (
        len(case.tools) <= 2
        and all(is_spoken(part.lower()) for name in names for part in re.findall(r"[A-Z]?[a-z]+", name))
        and len(asked) <= 2
        and needed <= 2
        and not re.search(r"Count to (4[1-9]|[5-9]\d)\.", asked[-1])
        and all(len(result) <= SHORT_RESULT for result in results)
        and not (composed and any(RESULT in text for text in asked))
    )


def training_example(rng: random.Random, case: Case) -> list[tuple[str, bool]]:
    """Return a conversation and its answer as pieces of text, each with whether the model learns to say it.

    Earlier answers are learned, too, except for their first words: in the history they begin without reasoning. One
    answer in eight has reasoning that breaks off. It teaches the model to answer after a reasoning budget is used up.
    """
    *before, start = render_pieces(case.messages, case.tools, case.thinking)
    pieces = [piece for text, said in before for piece in (_later_words(text) if said else [(text, False)])]
    pieces.append(start)
    answer = case.answer
    if not case.thinking or rng.random() > 0.125:
        return [*pieces, (f"{answer.text(case.thinking)}<|im_end|>", True)]
    cut = rng.choice(("", "\n", "\n")) + answer.reasoning[: rng.randrange(len(answer.reasoning))]
    cut += rng.choice(("", "\n"))
    return [*pieces, (f"<think>{cut}</think>", False), (f"\n\n{answer.text(False)}<|im_end|>", True)]


def _later_words(said: str) -> list[tuple[str, bool]]:
    """Return an earlier answer, of which the first word or marker is not learned."""
    if said.startswith("<think>"):
        return [(said, True)]
    first = re.match(r"<tool_call>|\w*", said)
    end = first.end() if first else 0
    return [(said[:end], False), (said[end:], True)]
