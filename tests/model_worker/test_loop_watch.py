"""An answer ends at the first token with which it loops, by the definition of ``loop_watch``, and at no other one."""

import random

import pytest

from model_worker.text import REPEATS, LoopWatch


def loops(ids: list[int], length: int) -> bool:
    """Return whether the last tokens loop. The definition, computed slowly."""
    last = ids[-length:]
    return len(last) == length and any(last[p:] == last[:-p] for p in range(1, length // REPEATS + 1))


def test_every_token_is_judged_as_the_definition_says() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    found = 0
    for _ in range(60):
        length, ids = chance.randint(12, 60), list[int]()
        watch = LoopWatch(length)
        while len(ids) < 400:
            block = [chance.randint(0, 3) for _ in range(chance.randint(1, 25))]
            repeated = (block * 60)[: chance.randint(1, 120)] if chance.random() < 0.3 else block[:6]
            for token in repeated:
                ids.append(token)
                looped = watch.push(token)
                assert looped == loops(ids, length), (length, ids)
                found += looped
    assert found > 100


@pytest.mark.parametrize("length", [12, 13, 100, 4096])
def test_the_longest_block_counts_and_a_longer_one_does_not(length: int) -> None:
    block = length // REPEATS
    watch = LoopWatch(length)
    ends = [watch.push(number % block) for number in range(length + 5)]
    assert ends == [False] * (length - 1) + [True] * 6
    watch = LoopWatch(length)
    assert not any(watch.push(number % (block + 1)) for number in range(3 * length))


def test_blanks_of_the_vocabulary_are_tokens_like_others() -> None:
    watch = LoopWatch(12)
    assert [watch.push(0) for _ in range(12)] == [False] * 11 + [True]
