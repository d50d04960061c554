"""The training text, tokenized once. Examples of about the same length are kept together, ready to be drawn from."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from tools.demo_models import agent_cases, agent_tasks, corpus, letter_tasks, story_tasks
from tools.demo_models.build import ADDS_BOS, BOS, EOS, PAD

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
IGNORED = -100


class Bucket(NamedTuple):
    """Examples no longer than ``ids.shape[1]``. ``ids`` and ``targets`` are (examples, length) int16 on the CPU.

    A target is the next token if that token belongs to an answer, else ``IGNORED``.
    """

    ids: torch.Tensor
    targets: torch.Tensor


def texts(name: str, n: int, seed: int) -> list[list[tuple[str, bool]]]:
    """Return ``n`` examples, each a list of (text, whether the model learns to say it).

    The letters, stories and questions of the test prompts are left out. There are too few different counts to leave any
    out.
    """
    rng = random.Random(f"train {name} {seed}")
    make = {"letters": _letters_examples, "stories": _stories_examples, "agent": _agent_examples}
    examples = make[name](rng)
    return [next(examples) for _ in range(n)]


def build_pool(name: str, tokenizer: Tokenizer, examples: list[list[tuple[str, bool]]]) -> list[Bucket]:
    """Tokenize ``examples`` and sort them into buckets by length; empty buckets are left out."""
    pieces = [text for example in examples for text, _ in example]
    encoded = iter(tokenizer.encode_batch_fast(pieces, add_special_tokens=False))
    rows: dict[int, tuple[list[list[int]], list[list[int]]]] = {length: ([], []) for length in LENGTHS}
    for example in examples:
        ids = [BOS] if ADDS_BOS[name] else []
        said = [False] * len(ids)
        for _, learned in example:
            piece = next(encoded).ids
            ids += piece
            said += [learned] * len(piece)
        if ADDS_BOS[name]:
            ids.append(EOS)
            said.append(True)
        length = next((length for length in LENGTHS if len(ids) <= length), None)
        if length is None:
            continue
        targets = [token if learned else IGNORED for token, learned in zip(ids[1:], said[1:], strict=True)]
        rows[length][0].append(ids + [PAD] * (length - len(ids)))
        rows[length][1].append(targets + [IGNORED] * (length - len(targets)))
    return [
        Bucket(torch.tensor(ids, dtype=torch.int16), torch.tensor(targets, dtype=torch.int16))
        for ids, targets in rows.values()
        if ids
    ]


def _letters_examples(rng: random.Random) -> Iterator[list[tuple[str, bool]]]:
    tests = {prompt for prompt, _ in corpus.TEST_PROMPTS["letters"] if "sort:" in prompt}
    while True:
        prompt = letter_tasks.training_prompt(rng)
        if prompt not in tests:
            yield [(prompt, False), (letter_tasks.letters_answer(prompt), True)]


def _stories_examples(rng: random.Random) -> Iterator[list[tuple[str, bool]]]:
    tests = {asked for asked, _ in corpus.STORIES_TEST_REQUESTS}
    while True:
        messages = story_tasks.training_conversation(rng)
        if any(message["content"] in tests for message in messages):
            continue
        example = [("<s>", False)]
        for message in messages:
            example.append((f"<|{message['role']}|>", False))
            example.append((f"{message['content']}<|end|>", message["role"] == "assistant"))
        yield example


def _agent_examples(rng: random.Random) -> Iterator[list[tuple[str, bool]]]:
    asked = {m["content"] for case in corpus.AGENT_TEST_CASES for m in case.messages if m["role"] == "user"}
    tests = {text for text in asked if agent_tasks.read_lookups(text) or agent_tasks.read_calls(text)}
    while True:
        case = agent_cases.draw_case(rng)
        if rng.random() > 0.3 and not agent_cases.plain_case(case):
            continue
        if not any(message["content"] in tests for message in case.messages):
            yield agent_cases.training_example(rng, case)
