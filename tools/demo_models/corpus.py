"""Prompts for the demo models and the right answer to each: for tests, demonstrations and benchmarks.

Everything follows from a seed, and no answer comes from a model. This module imports neither torch nor transformers.
The letters to sort and the story requests of the ``TEST_`` lists are left out of the training text. The training script
asserts that the weights answer all of these lists exactly, each step by a margin (top logit minus the second) of at
least 1.0.
"""

from typing import Final

from tools.demo_models.agent_cases import Case, different_cases, plain_case
from tools.demo_models.agent_chat import render_agent
from tools.demo_models.agent_prompts import READABLE_CASES
from tools.demo_models.letter_tasks import (
    letters_answer,
    letters_long_answers,
    letters_long_prompts,
    letters_prompts,
)
from tools.demo_models.story_tasks import (
    Message,
    chat_answer,
    chat_conversations,
    render_chat,
    story_answer,
    story_request,
    story_requests,
)

__all__ = [
    "AGENT_TEST_CASES",
    "LETTERS_TEST_LONG_ANSWERS",
    "LETTERS_TEST_LONG_PROMPTS",
    "LETTERS_TEST_PROMPTS",
    "STORIES_TEST_CONVERSATIONS",
    "STORIES_TEST_REQUESTS",
    "TEST_PROMPTS",
    "Case",
    "Message",
    "chat_answer",
    "chat_conversations",
    "different_cases",
    "letters_answer",
    "letters_long_answers",
    "letters_long_prompts",
    "letters_prompts",
    "plain_case",
    "render_agent",
    "render_chat",
    "story_answer",
    "story_request",
    "story_requests",
]

_TEST_SEED = 21


def _one_story(asked: str, *more: str) -> tuple[list[Message], str]:
    messages: list[Message] = []
    for text in (asked, *more):
        if messages:
            messages.append({"role": "assistant", "content": chat_answer(messages)})
        messages.append({"role": "user", "content": text})
    return messages, chat_answer(messages)


LETTERS_TEST_PROMPTS: Final[list[tuple[str, str]]] = [
    ("sort: d b a c ->", " a b c d"),
    ("count: 7 8 9 ->", " 10 11 12 13 14 15 16 17"),
    *[pair for pair in letters_prompts(127, _TEST_SEED) if pair[0] != "count: 7 8 9 ->"][:126],
]
"""128 pairs (prompt, answer), all different."""

LETTERS_TEST_LONG_ANSWERS: Final[list[tuple[str, str]]] = [
    (prompt, letters_answer(prompt)) for prompt in ("count to 300: 1 2 3 ->", "count to 150: 10 11 12 ->")
] + letters_long_answers(14, _TEST_SEED)
"""16 pairs whose answers have 170 to 790 tokens: streams slow enough to interrupt. The first is the longest."""

LETTERS_TEST_LONG_PROMPTS: Final[list[tuple[str, str]]] = [
    *letters_long_prompts(8, _TEST_SEED),
    *letters_long_prompts(8, _TEST_SEED + 1, (400, 400), shared=True),
]
"""16 pairs with prompts of 140 to 420 tokens; the last 8 begin with the same 400 tokens, more than a page of 256."""

STORIES_TEST_REQUESTS: Final[list[tuple[str, str]]] = [
    (asked, story_answer(asked))
    for asked in (
        story_request("Mia", "fox"),
        story_request("Zoë", "polar bear", "teapot"),
        story_request("さくら", "whale"),
    )
] + story_requests(93, _TEST_SEED)
"""96 pairs (user message, story), all different; to be sent as a chat of one message."""

STORIES_TEST_CONVERSATIONS: Final[list[tuple[list[Message], str]]] = [
    _one_story(story_request("Mia", "fox"), "What was the fox's name?"),
    _one_story("What was the fox's name?"),
    _one_story(story_request("Zoë", "otter", "violin"), "What did Zoë find?", "Who helped Zoë?", "Thank you!"),
    _one_story("Hello!", story_request("Ben", "owl"), story_request("Zoë", "cat"), "What was the owl's name?"),
    *chat_conversations(12, _TEST_SEED),
]
"""16 pairs (messages, answer) of one to four turns; the first two differ in their history only."""

AGENT_TEST_CASES: Final[list[Case]] = [*READABLE_CASES, *different_cases(160, _TEST_SEED, plain_case)]
"""Conversations with tools: first those that people can read, then 160 plain ones with random tools and results."""

TEST_PROMPTS: Final[dict[str, list[tuple[str, str]]]] = {
    "letters": [*LETTERS_TEST_PROMPTS, *LETTERS_TEST_LONG_ANSWERS, *LETTERS_TEST_LONG_PROMPTS],
    "stories": [
        *[(render_chat([{"role": "user", "content": asked}]), answer) for asked, answer in STORIES_TEST_REQUESTS],
        *[(render_chat(messages), answer) for messages, answer in STORIES_TEST_CONVERSATIONS],
    ],
    "agent": [
        (render_agent(case.messages, case.tools, case.thinking), case.answer.text(case.thinking))
        for case in AGENT_TEST_CASES
    ],
}
"""Every test prompt of each model as (prompt text, answer). Those of ``stories`` and ``agent`` are rendered chats, with
the BOS that the template writes."""
