"""Break answers off and resume them, on every engine of the tests and on exllamav2's own Python with an oracle."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from model_worker.engine import Engine
from protocol.request import SamplingParams
from tests.engines.conftest import ENGINES
from tests.engines.driver import GREEDY, Driver, Outcome, answer
from tools.demo_models.corpus import (
    LETTERS_TEST_LONG_PROMPTS,
    LETTERS_TEST_PROMPTS,
    STORIES_TEST_REQUESTS,
    render_chat,
)

ORACLES = ["oracle", "oracle-ngram", "oracle-draft"]
SCENES = [*ENGINES, *ORACLES]
MOST_BREAKS = 20

Break = tuple[int, str]
"""(number of delivered ids, all text delivered with them)"""


@dataclass
class Scene:
    """Two engines of one model and prompts for them, as ids.

    engine    the engine that resumes an answer
    begun_by  the engine that begins an answer, one token at a time: ``engine``, or its twin that does not speculate
    prompts   prompts with answers that end by themselves after about 5 to 50 tokens
    long      prompts longer than a chunk (256 tokens). One is longer than two chunks with most of its answer
    spelled   a scene with answers in which characters span tokens; None: this scene
    decided   whether a token is computed exactly alike in a prompt and one by one, so that even close draws are equal
    """

    engine: Engine
    begun_by: Engine
    prompts: list[list[int]]
    long: list[list[int]] = field(default_factory=list)
    spelled: "Scene | None" = None
    decided: bool = True

    def need(self, *names: str) -> None:
        missing = set(names) - self.engine.capabilities.offered
        if missing:
            pytest.skip(f"not offered by this engine: {', '.join(sorted(missing))}")

    def need_decided(self) -> None:
        if not self.decided:
            pytest.skip("on a GPU a token computed in a prompt may differ in its last bits from one computed alone")

    def reset(self) -> None:
        self.engine.reset()
        self.begun_by.reset()

    def check_breaks(
        self, prompt: list[int], size: int = 60, sampling: SamplingParams = GREEDY, **fields: Any
    ) -> Outcome:
        """Break an answer off at many places, resume it, and compare. Return the undisturbed answer.

        The resumed answers are computed in one batch with a second undisturbed one, beginning with an empty cache.
        """
        self.reset()
        whole = answer(self.begun_by, prompt, size, sampling, **fields)
        self.reset()
        driver = Driver(self.engine)
        same = driver.submit(prompt, size, sampling, **fields)
        broken = [
            (done, delivered, driver.submit(prompt, size, sampling, **fields, resumed_ids=tuple(whole.ids[:done])))
            for done, delivered in breaks_of(whole)
        ]
        assert broken, "the answer can be broken off"
        driver.run()
        check_rest(whole, 0, "", same)
        for done, delivered, rest in broken:
            check_rest(whole, done, delivered, rest)
        driver.assert_idle()
        return whole


def build_scene(name: str, load: Callable[[str, str], Engine]) -> Scene:
    """Return the scene of an engine. ``load`` is the fixture with that name."""
    if name in ORACLES:
        return _oracle_scene(name)
    letters, stories = load(name, "letters"), load(name, "stories")
    conversations = [
        stories.encode(render_chat([{"role": "user", "content": asked}])) for asked, _ in STORIES_TEST_REQUESTS[:2]
    ]
    return Scene(
        letters,
        letters,
        [letters.encode(prompt) for prompt, _ in LETTERS_TEST_PROMPTS[:4]],
        [letters.encode(LETTERS_TEST_LONG_PROMPTS[number][0]) for number in (5, 8)],
        Scene(stories, stories, conversations),
        decided=name == "transformers",
    )


def _oracle_scene(name: str) -> Scene:
    from tests.engines.exllamav2_cpu.harness import PAGE, Harness
    from tests.engines.exllamav2_cpu.oracle import OracleLogits

    _, _, speculate = name.partition("-")
    logits = OracleLogits(448, eos_every=40)
    draft = OracleLogits(448, eos_every=40, habit=0.8)  # the draft is often right, but not always
    plain = Harness(logits, pages=24, context=8 * PAGE)
    h = Harness(logits, pages=24, context=8 * PAGE, speculate=speculate, draft=draft) if speculate else plain
    rng = random.Random(5)
    prompts: list[list[int]] = []
    while len(prompts) < 4:  # the answer of the last one crosses a page boundary
        ids = h.random_ids(rng, 6 if len(prompts) < 3 else PAGE - 3)
        if 12 <= len(h.logits.expected(ids, 60, ends=h.eos_ids)) <= 50:
            prompts.append(ids)
    # the tokens of letters are bytes, so random answers have incomplete characters, and "spelled" is this scene
    return Scene(h.engine, plain.engine, prompts, [h.random_ids(rng, size) for size in (PAGE + 40, 2 * PAGE + 20)])


def breaks_of(outcome: Outcome) -> list[Break]:
    """Return the places where the answer can be broken off: after each of its deltas, at most MOST_BREAKS places.

    Places after a token that brought no text yet come first, as far as there is room.
    """
    texts, so_far = [], ""
    for delta in outcome.deltas:
        so_far += delta
        texts.append(so_far)
    places = range(len(texts))
    if len(places) > MOST_BREAKS:
        held = [n for n in places if not outcome.deltas[n]]
        spread = {*places[:3], *places[-3:], *places[:: len(places) // 8 + 1]}
        places = sorted({*held[: MOST_BREAKS - len(spread)], *spread})  # type: ignore[assignment]
    return [(outcome.sizes[n], texts[n]) for n in places]


def check_rest(whole: Outcome, done: int, message: str, rest: Outcome) -> None:
    """Check the rest of an answer that was resumed after ``done`` tokens and their text."""
    assert whole.finished is not None
    assert rest.finished is not None
    at = f"gone on with behind {done} of {len(whole.ids)} tokens"
    assert rest.ids == whole.ids[done:], at
    assert message + rest.text == whole.text, at
    assert rest.reason == whole.reason, at
    assert rest.finished.completion_tokens == whole.finished.completion_tokens, at
    assert rest.finished.prompt_tokens == whole.finished.prompt_tokens, at
    assert len(rest.logprobs) == (0 if whole.job.top_logprobs is None else len(rest.ids)), at
    for told_then, told_now in zip(whole.logprobs[done:], rest.logprobs, strict=True):
        assert told_now.logprob == pytest.approx(told_then.logprob, abs=0.05), at
        assert len(told_now.top) == len(told_then.top), at
