"""Token healing applies to the right prompts, allows the right tokens, and delivers the right part of the first one."""

import random

import pytest

from model_worker.engines.banned import Healer
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.tokenizer import Tokenizer
from model_worker.text import Pieces, TextStream
from tools.demo_models import directory

WORDS = Pieces([None, " wor", " world", " word", "wor", "d", "ld", " ", " w"])
BEAR = "🐻".encode()
BYTES = Pieces([None, "a", BEAR[:2], BEAR[2:3], BEAR[3:], BEAR[2:], "🐻", "🐻a"])


def test_the_first_token_begins_with_the_one_dropped() -> None:
    healing = Healer(WORDS).heal([0, 5, 1])
    assert healing is not None
    assert (healing.prompt_ids, healing.dropped, healing.known) == ((0, 5), 1, " wor")
    assert healing.allowed == (1, 2, 3)
    assert [healing.rest(t) for t in (" wor", " world", " word")] == ["", "ld", "d"]


def test_a_token_that_is_alone_is_drawn_again() -> None:
    healing = Healer(WORDS).heal([0, 6])
    assert healing is not None
    assert healing.allowed == (6,)


@pytest.mark.parametrize("prompt", [[1], [1, 0], [1, 99], [1, -1]])
def test_prompts_that_stay_as_they_are(prompt: list[int]) -> None:
    assert Healer(WORDS).heal(prompt) is None


def test_a_byte_of_a_fallback_is_not_healed() -> None:
    pieces = Pieces([None, "A", b"A", b"\xf0"], byte_runs=True)
    assert Healer(pieces).heal([1, 2]) is None
    assert Healer(pieces).heal([2, 1]) is not None


def test_characters_in_several_tokens() -> None:
    healer = Healer(BYTES)
    completed = healer.heal([1, 2, 5])
    assert completed is not None
    assert (completed.prompt_ids, completed.allowed, completed.known) == ((1, 2), (5,), "🐻")
    begun = healer.heal([1, 2])
    assert begun is not None
    assert begun.allowed == (2, 6, 7)
    assert (begun.known, begun.rest("🐻a")) == ("", "🐻a"), "the client had half of it, which is no text"
    within = healer.heal([1, 2, 3])
    assert within is not None
    assert (within.allowed, within.known) == ((3, 5), "")


@pytest.mark.parametrize("model", ["letters", "stories"])
def test_any_prompt_of_a_model_that_is_shipped(model: str) -> None:
    """The text of every allowed token begins with the text of the dropped token."""
    tokenizer = Tokenizer(ModelDir(str(directory(model))))
    assert tokenizer.pieces is not None
    healer = Healer(tokenizer.pieces)
    rng = random.Random(5)
    ids = tokenizer.encode("Once upon a time Čeněk 🐻 and さくら counted: 10 11 12 13 -> sort: d b a c\n\n  x")
    texts = [piece.encode() if isinstance(piece, str) else piece for piece in tokenizer.pieces.table]
    for cut in range(2, len(ids) + 1):
        healing = healer.heal(ids[:cut])
        assert healing is not None
        assert healing.dropped in healing.allowed
        dropped = texts[healing.dropped]
        assert dropped
        assert set(healing.allowed) == {i for i, text in enumerate(texts) if text and text.startswith(dropped)}
        for token in rng.sample(healing.allowed, min(20, len(healing.allowed))):
            text, _ = TextStream(tokenizer.pieces, healing.prompt_ids).push(token)
            assert text.startswith(healing.known)
            assert healing.known + healing.rest(text) == text
