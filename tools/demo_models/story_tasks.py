"""The tasks of the chat model ``stories``: requests made from a seed, and the right answer to a conversation.

The answer follows from the last user message and the messages before it:

* ``Tell me a story about Mia the fox.``, also with `` and a key`` before the full stop: a story of 100 to 210 tokens.
  The animal is one of ``ANIMALS``, the thing one of ``THINGS``, the name one of ``NAMES`` or made up as in ``_name``;
  other names are spelled wrongly now and then.
* ``What was the fox's name?``, ``What did Mia find?``, ``Who helped Mia?``: answered from the stories told before.
* ``Who are you?``: answered from a system message ``You are Luna, a storyteller.``
* a greeting, thanks, and anything else: one fixed sentence each.
"""

import random
import re
from collections.abc import Sequence

from tools.demo_models import story_tables as tables

Message = dict[str, str]
"""A chat message: ``role`` (system, user or assistant) and ``content``."""

HELLO = "Hello! 👋 Ask me for a story, like this: Tell me a story about Mia the fox."
WELCOME = "You are welcome! 😊 Would you like another story?"
FALLBACK = "Sorry, I only tell stories. Ask me like this: Tell me a story about Mia the fox."
NOT_YET = "I have not told you that story yet."

_STORY = re.compile(r"Tell me a story about (\w+) the ([a-z ]+?)(?: and a ([a-z]+))?\.")
_NAME_OF = re.compile(r"What was the ([a-z ]+)'s name\?")
_FOUND = re.compile(r"What did (\w+) find\?")
_HELPED = re.compile(r"Who helped (\w+)\?")
_STORYTELLER = re.compile(r"You are (\w+), a storyteller\.")


def story_request(name: str, animal: str, thing: str | None = None) -> str:
    """Return the user message that asks for a story."""
    return f"Tell me a story about {name} the {animal}{f' and a {thing}' if thing else ''}."


def chat_answer(messages: Sequence[Message]) -> str:
    """Return the right answer to a conversation whose last message is the user's, without EOS.

    If several stories have the same hero, the newest one counts. Earlier answers are assumed to be right.
    """
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("the last message must be the user's")
    asked = messages[-1]["content"]
    if asked in tables.GREETINGS:
        return HELLO
    if asked in tables.THANKS:
        return WELCOME
    if asked == "Who are you?":
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        match = _STORYTELLER.match(system)
        return f"I am {match[1]}, a storyteller." if match else "I am a storyteller."
    if story := _asked_story(asked):
        return _tell(*story)
    return _follow_up(
        asked, [told for m in messages[:-1] if m["role"] == "user" and (told := _asked_story(m["content"]))]
    )


def story_answer(message: str) -> str:
    """Return the right answer to one user message without history: a story, if the message asks for one."""
    return chat_answer([{"role": "user", "content": message}])


def render_chat(messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
    """Return a conversation as the chat template of ``stories`` renders it, BOS included, without a template engine."""
    text = "<s>" + "".join(f"<|{m['role']}|>{m['content'].strip()}<|end|>" for m in messages)
    return text + "<|assistant|>" if add_generation_prompt else text


def story_requests(n: int = 64, seed: int = 0) -> list[tuple[str, str]]:
    """Return ``n`` pairs (user message, story), all different. A quarter of names are made up. Half ask for a thing.

    A story has 100 to 210 tokens. Its name, animal, friend and thing show which request it answers.
    """
    rng = random.Random(f"stories {seed}")
    found: dict[str, str] = {}
    while len(found) < n:
        asked = _random_request(rng)
        found.setdefault(asked, story_answer(asked))
    return list(found.items())


def chat_conversations(
    n: int = 16, seed: int = 0, stories: tuple[int, int] = (1, 3)
) -> list[tuple[list[Message], str]]:
    """Return ``n`` pairs (conversation, answer): first stories, then a question about one of them or the storyteller.

    stories  least and most stories of a conversation. One with three stories has about 500 tokens
    """
    rng = random.Random(f"chats {seed}")
    found = []
    for _ in range(n):
        messages, heroes = _system(rng, 0.5), _heroes(rng, rng.randint(*stories))
        for name, animal, thing in heroes:
            _say(messages, story_request(name, animal, thing))
            messages.append({"role": "assistant", "content": chat_answer(messages)})
        asked = "Who are you?" if rng.random() < 0.15 else _question(rng, *rng.choice(heroes)[:2])
        _say(messages, asked)
        found.append((messages, chat_answer(messages)))
    return found


def training_conversation(rng: random.Random) -> list[Message]:
    """Return a conversation for the training text: one to a dozen turns, with the right answers."""
    messages = _system(rng, 0.35)
    many = rng.random()
    heroes = _heroes(rng, 1 if many < 0.55 else rng.randint(2, 4) if many < 0.97 else rng.randint(5, 7), 0.5)
    told: list[tuple[str, str, str | None]] = []
    turns = 1 if many < 0.3 else len(heroes) * 3 + rng.randint(1, 4)
    for _ in range(turns):
        draw = rng.random()
        if heroes and (draw < 0.8 if turns == 1 else draw < (0.4 if told else 0.7)):
            told.append(heroes.pop())
            _say(messages, story_request(*told[-1]))
        elif draw < 0.92:
            name, animal = rng.choice(told)[:2] if told and rng.random() < 0.9 else _heroes(rng, 1, 0.5)[0][:2]
            _say(messages, _question(rng, name, animal))
        else:
            _say(messages, _small_talk(rng))
        messages.append({"role": "assistant", "content": chat_answer(messages)})
    return messages


def _tell(name: str, animal: str, thing: str | None) -> str:
    about = tables.ANIMALS[animal]
    words = about._asdict() | {"name": name, "animal": animal, "thing": thing or about.thing}
    return tables.PLOTS[about.plot].format(**words)


def _asked_story(message: str) -> tuple[str, str, str | None] | None:
    match = _STORY.fullmatch(message)
    if not match or match[2] not in tables.ANIMALS or (match[3] and match[3] not in tables.THINGS):
        return None
    return match[1], match[2], match[3]


def _follow_up(asked: str, told: Sequence[tuple[str, str, str | None]]) -> str:
    named, found, helped = (pattern.fullmatch(asked) for pattern in (_NAME_OF, _FOUND, _HELPED))
    if not (named or found or helped):
        return FALLBACK
    for name, animal, thing in reversed(told):
        about = tables.ANIMALS[animal]
        if named and named[1] == animal:
            return f"The {animal}'s name was {name}."
        if found and found[1] == name:
            return f"{name} found a {thing or about.thing}."
        if helped and helped[1] == name:
            return f"{about.friend} helped {name}."
    return NOT_YET


def _say(messages: list[Message], text: str) -> None:
    messages.append({"role": "user", "content": text})


def _question(rng: random.Random, name: str, animal: str) -> str:
    return rng.choice((f"What was the {animal}'s name?", f"What did {name} find?", f"Who helped {name}?"))


def _small_talk(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(tables.GREETINGS)
    if kind < 0.45:
        return rng.choice(tables.THANKS)
    if kind < 0.7:
        return "Who are you?"
    return rng.choice(tables.OFF_TOPIC).format(word=rng.choice(tables.OFF_TOPIC_WORDS), name=_name(rng))


def _system(rng: random.Random, share: float) -> list[Message]:
    if rng.random() >= share:
        return []
    text = rng.choice(tables.SYSTEM_PROMPTS)
    if rng.random() < 0.6:
        text = f"You are {_name(rng)}, a storyteller." + (f" {text}" if rng.random() < 0.3 else "")
    return [{"role": "system", "content": text}]


def _heroes(rng: random.Random, n: int, made_up: float = 0.25) -> list[tuple[str, str, str | None]]:
    names: list[str] = []
    while len(names) < n:
        if (name := _name(rng, made_up)) not in names:
            names.append(name)
    things = [rng.choice(tables.THINGS) if rng.random() < 0.5 else None for _ in names]
    return list(zip(names, rng.sample(list(tables.ANIMALS), n), things, strict=True))


def _random_request(rng: random.Random) -> str:
    return story_request(*_heroes(rng, 1)[0])


def _name(rng: random.Random, made_up: float = 0.25) -> str:
    """Return a name from the table, or a made-up name of syllables, some with accents, some in another script."""
    if rng.random() >= made_up:
        return rng.choice(tables.NAMES)
    kind = rng.random()
    if kind < 0.08:
        return "".join(chr(rng.randint(0x3042, 0x3093)) for _ in range(rng.randint(2, 4)))
    if kind < 0.16:
        return chr(rng.randint(0x410, 0x42F)) + "".join(
            chr(rng.randint(0x430, 0x44F)) for _ in range(rng.randint(2, 5))
        )
    vowels = "aeiou" if kind < 0.6 else "aeiouáàâäåæéèêëíîïóôöøúûüý"
    consonants = "bdfghklmnprstvwz" if kind < 0.8 else "bdfghklmnprstvwzçčďğłñňřśšťžźß"
    syllables = "".join(rng.choice(consonants) + rng.choice(vowels) for _ in range(rng.randint(1, 3)))
    start = rng.choice("BDFGHKLMNPRSTVZ") + rng.choice(vowels)
    return start + syllables + (rng.choice("nrslx") if rng.random() < 0.4 else "")
