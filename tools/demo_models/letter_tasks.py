"""The tasks of the model ``letters``: prompts made from a seed, and the right answer computed from a prompt alone.

The prompts are plain, without a chat template. Each answer begins with a space and is followed by EOS::

    sort: d b a c ->           a b c d                      2 to 12 different letters
    count: 7 8 9 ->            10 11 12 13 14 15 16 17      the next 8 terms
    count to 12: 7 8 9 ->      10 11 12                     up to the number asked for, at most 999

A prompt may begin with one line ``note: `` and words. They do not change the answer, and make prompts of any length.
"""

import random
import re
from collections.abc import Callable

TERMS = 8
"""Number of terms in the answer to ``count:``."""

_NOTE_WORDS = (
    "river stone cloud apple chair paper water light green house table music garden winter summer window yellow bridge "
    "market silver forest letter number kitchen morning evening letters little quiet simple early later under above "
    "between always never often again round"
)
NOTE_WORDS = tuple(_NOTE_WORDS.split())

_SORT = re.compile(r"sort:((?: [a-z])+) ->")
_COUNT = re.compile(r"count: \d+ \d+ (\d+) ->")
_COUNT_TO = re.compile(r"count to (\d+): \d+ \d+ (\d+) ->")


def letters_answer(prompt: str) -> str:
    """Return the right answer to a prompt, with the leading space and without EOS. Raises ValueError for other text."""
    task = prompt.rpartition("\n")[2]
    if match := _SORT.fullmatch(task):
        return "".join(f" {letter}" for letter in sorted(match[1].split()))
    if match := _COUNT.fullmatch(task):
        last = int(match[1])
        return "".join(f" {number}" for number in range(last + 1, last + 1 + TERMS))
    if match := _COUNT_TO.fullmatch(task):
        return "".join(f" {number}" for number in range(int(match[2]) + 1, int(match[1]) + 1))
    raise ValueError(f"not a prompt of letters: {prompt!r}")


def sort_prompt(rng: random.Random, shortest: int = 3, longest: int = 10) -> str:
    """Return a prompt ``sort:`` with ``shortest`` to ``longest`` different letters in any order."""
    letters = rng.sample("abcdefghijklmnopqrstuvwxyz", rng.randint(shortest, longest))
    return f"sort: {' '.join(letters)} ->"


def count_prompt(rng: random.Random) -> str:
    """Return a prompt ``count:`` with three numbers in a row."""
    start = _start(rng, 999 - 2 - TERMS)
    return f"count: {start} {start + 1} {start + 2} ->"


def count_to_prompt(rng: random.Random, fewest: int = 1, most: int = 30, lowest: int = 1) -> str:
    """Return a prompt ``count to`` whose answer has ``fewest`` to ``most`` terms. It begins at ``lowest`` or above."""
    terms = rng.randint(fewest, most)
    start = max(lowest, _start(rng, 999 - 2 - terms))
    return f"count to {start + 2 + terms}: {start} {start + 1} {start + 2} ->"


def note(rng: random.Random, words: int) -> str:
    """Return one line of ``words`` words without meaning, with its newline."""
    return f"note: {' '.join(rng.choices(NOTE_WORDS, k=words))}\n"


def letters_prompts(n: int = 64, seed: int = 0) -> list[tuple[str, str]]:
    """Return ``n`` pairs (prompt, answer), all different: half are sort, a third count, and the others count to.

    Prompts have 9 to 30 tokens, answers 4 to 60; sorts have 3 to 10 letters, ``count to`` 4 to 20 terms.
    """

    def one(rng: random.Random) -> str:
        draw = rng.random()
        if draw < 0.5:
            return sort_prompt(rng)
        return count_prompt(rng) if draw < 0.83 else count_to_prompt(rng, 4, 20)

    return _different(n, seed, one)


def letters_long_answers(n: int = 8, seed: int = 0, terms: tuple[int, int] = (60, 240)) -> list[tuple[str, str]]:
    """Return ``n`` pairs (prompt, answer) with long answers: ``terms`` numbers, one token for each digit.

    With the default, an answer has 120 to 720 tokens. The training text has answers of at most 400 terms.
    """
    return _different(n, seed, lambda rng: count_to_prompt(rng, *terms, lowest=10))


def letters_long_prompts(
    n: int = 8, seed: int = 0, words: tuple[int, int] = (100, 400), shared: bool = False
) -> list[tuple[str, str]]:
    """Return ``n`` pairs (prompt, answer). Each prompt begins with a note of ``words`` words, about a token each.

    With ``shared`` all prompts begin with the same note, so that their first tokens are the same.
    """
    rng = random.Random(f"note {seed}")
    first = note(rng, rng.randint(*words))
    prompts = [prompt for prompt, _ in letters_prompts(n, seed)]
    noted = [(first if shared else note(rng, rng.randint(*words))) + prompt for prompt in prompts]
    return [(prompt, letters_answer(prompt)) for prompt in noted]


def training_prompt(rng: random.Random) -> str:
    """Return a prompt for the training text: of any kind, a seventh of them with a note, of which some are long."""
    draw = rng.random()
    if draw < 0.45:
        prompt = sort_prompt(rng, 2, 12)
    elif draw < 0.70:
        prompt = count_prompt(rng)
    elif draw < 0.93:
        prompt = count_to_prompt(rng)
    else:
        prompt = count_to_prompt(rng, 30, 400)
    draw = rng.random()
    if draw < 0.03:
        return note(rng, rng.randint(40, 700)) + prompt
    return note(rng, rng.randint(1, 40)) + prompt if draw < 0.15 else prompt


def _start(rng: random.Random, highest: int) -> int:
    """Return a first number. One, two and three digits are about equally frequent. Some numbers are just below 100."""
    if rng.random() < 0.1:
        return min(highest, rng.randint(75, 99))
    return rng.randint(1, min(highest, rng.choice((9, 99, 999))))


def _different(n: int, seed: int, one: Callable[[random.Random], str]) -> list[tuple[str, str]]:
    rng = random.Random(f"letters {seed}")
    found: dict[str, str] = {}
    for _ in range(100 * n + 1000):
        if len(found) == n:
            break
        prompt = one(rng)
        found.setdefault(letters_answer(prompt), prompt)
    else:
        raise ValueError(f"there are not {n} different prompts of this kind")
    return [(prompt, answer) for answer, prompt in found.items()]
