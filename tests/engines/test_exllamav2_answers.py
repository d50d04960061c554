"""Token healing and banned strings work in engine exllamav2, also on shared pages and with speculation."""

import random
from typing import Any

import numpy as np
import pytest

from model_worker.engines.banned import Healing
from protocol.errors import RequestError
from protocol.request import SamplingParams
from tests.engines.driver import Outcome
from tests.engines.exllamav2_cpu.harness import PAGE, VOCAB, Harness
from tests.engines.exllamav2_cpu.oracle import OracleLogits

pytestmark = pytest.mark.usefixtures("decoding")

SPECULATION = [None, "ngram", "draft"]


def pieces(h: Harness) -> list[str]:
    result: list[str] = h.engine._loaded.tokenizer.get_id_to_piece_list(True)
    return result


def greedy_without(h: Harness, prompt: list[int], size: int, banned: list[str]) -> list[int]:
    """Compute the greedy answer without banned strings by trying: after a hit, go back to the token that began it."""
    ids: list[int] = []
    blocked: dict[int, set[int]] = {}
    while len(ids) < size:
        scores = h.logits(np.array(prompt + ids))
        scores[list(blocked.get(len(ids), ()))] = -np.inf
        ids.append(int(scores.argmax()))
        texts = [h.engine.decode(ids[:n]) for n in range(len(ids) + 1)]
        found = [at for string in banned if (at := texts[-1].lower().find(string.lower())) >= 0]
        if found:
            back = next(n for n in range(len(ids)) if len(texts[n + 1]) > min(found))
            blocked.setdefault(back, set()).add(ids[back])
            for later in [n for n in blocked if n > back]:
                del blocked[later]
            del ids[back:]
    return ids


def letters_of(h: Harness, prompt: list[int], size: int) -> str:
    return h.engine.decode(h.logits.expected(prompt, size))


@pytest.mark.long
@pytest.mark.parametrize("speculate", SPECULATION)
@pytest.mark.parametrize("seed", range(6))
def test_banned_strings_are_led_away_from(speculate: str | None, seed: int) -> None:
    rng = random.Random(seed)
    h = Harness(OracleLogits(VOCAB, habit=rng.choice([0.0, 0.5])), speculate=speculate)
    prompt = h.random_ids(rng, rng.choice([3, PAGE - 10, PAGE - 3, 2 * PAGE - 20]))  # a page ends inside the answer
    text = letters_of(h, prompt, 60)
    banned: list[str] = []
    while not banned:
        at = rng.randrange(5, len(text) - 8)
        banned = [text[at : at + rng.randrange(1, 5)].upper(), text[at + 6 : at + 8]]
        banned = [string for string in banned if string.strip() and "\ufffd" not in string]
    others = [h.submit([*prompt, 50 + n], 40) for n in range(2)]  # these share its pages
    outcome = h.submit(prompt, 60, banned_strings=tuple(banned), top_logprobs=0)
    h.driver.run()
    assert outcome.ids == greedy_without(h, prompt, 60, banned)
    assert outcome.text == h.engine.decode(outcome.ids)
    assert not any(string.lower() in outcome.text.lower() for string in banned)
    assert [one.token_id for one in h.logprobs(outcome)] == outcome.ids
    for other in others:
        assert other.ids == h.expected(other)
    h.driver.assert_idle()


@pytest.mark.parametrize("speculate", SPECULATION)
@pytest.mark.parametrize("banned", [(), ("never",)])
def test_a_loop_ends_the_answer_at_its_last_token(speculate: str | None, banned: tuple[str, ...]) -> None:
    h = Harness(OracleLogits(VOCAB), speculate=speculate)
    prompt = h.random_ids(random.Random(3), 20)
    looping = SamplingParams(temperature=0, allowed_tokens=(50,))
    outcome = h.submit(prompt, 90, looping, banned_strings=banned, stop_on_loop=20, top_logprobs=0)
    other = h.submit([*prompt, 7], 40, stop_on_loop=12)
    h.driver.run()
    assert outcome.reason == "loop"
    assert outcome.ids[:20] == [50] * 20
    assert banned or len(outcome.ids) == 20, "tokens that were speculated behind the loop are left out"
    assert outcome.text == h.engine.decode(outcome.ids)
    assert other.ids == h.expected(other)
    h.driver.assert_idle()


def test_answers_that_go_back_follow_from_their_seed() -> None:
    h, prompt = Harness(), list(range(40, 60))
    hot = SamplingParams(temperature=1.5, seed=7, frequency_penalty=0.5, mirostat_mode=2, repetition_penalty=1.1)
    banned = ("e", "a", "t")
    first = h.answer(prompt, 60, hot, banned_strings=banned)
    assert h.answer(prompt, 60, hot, banned_strings=banned).ids == first.ids
    assert h.answer(prompt, 60, hot.but(seed=8), banned_strings=banned).ids != first.ids
    assert not set("eat") & set(first.text.lower())


def test_the_state_of_the_draws_is_carried_over() -> None:
    h = Harness()
    hot = SamplingParams(temperature=1.5, seed=7, mirostat_mode=2)
    outcome = h.submit(list(range(40, 60)), 60, hot, banned_strings=("e", "a", "t"))
    answer = h.engine._answers[outcome.job.id]
    first, surprise = answer.handle, None
    went_back = 0
    while outcome.finished is None:
        before = answer.handle
        h.driver.step()
        if answer.handle is not before:
            went_back += 1
            surprise = before.gen_settings.mirostat_mu
            assert answer.handle.gen_settings.mirostat_mu == surprise
        assert answer.handle.draws is first.draws
        assert answer.handle.returns == went_back
    assert went_back
    assert surprise is not None


def test_an_answer_with_no_way_on_ends_and_says_why() -> None:
    h = Harness()
    token = next(i for i, piece in enumerate(pieces(h)) if piece == "a")
    only = SamplingParams(temperature=0, allowed_tokens=(token,))
    outcome = h.answer([50, 51], 20, only, banned_strings=("aaa",))
    assert (outcome.text, outcome.ids, outcome.reason) == ("", [], "banned_strings")  # it began with the first
    outcome = h.answer([50, 51], 20, only, banned_strings=("aaa",), stop=("aa",))
    assert (outcome.text, outcome.reason) == ("", "stop")
    h.driver.assert_idle()


@pytest.mark.parametrize("speculate", SPECULATION)
def test_limits_hold_for_answers_that_go_back(speculate: str | None) -> None:
    h, prompt = Harness(OracleLogits(VOCAB, eos_every=1), speculate=speculate), list(range(40, 60))
    outcome = h.answer(prompt, 40, min_new_tokens=12, banned_strings=("e",))
    assert len(outcome.ids) == 13
    assert outcome.reason == "stop"
    h = Harness(speculate=speculate)
    for size in (1, 2, 5, 30):
        outcome = h.answer(prompt, size, banned_strings=("e", "a"))
        assert len(outcome.ids) == size
        assert outcome.reason == "length"
        assert not set("ea") & set(outcome.text.lower())
    h.driver.assert_idle()


def test_stop_strings_cut_first() -> None:
    h, prompt = Harness(), list(range(40, 60))
    text = letters_of(h, prompt, 30)
    stop, banned = text[6:8], text[8:10]
    outcome = h.answer(prompt, 30, stop=(stop,), banned_strings=(banned,))
    assert outcome.text == text[: text.index(stop)]
    assert outcome.reason == "stop"
    assert outcome.finished is not None
    assert outcome.finished.stop_string == stop


def test_going_back_is_first_in_line_and_cancelling_it_frees_everything() -> None:
    h, prompt = Harness(pages=4, batch=1), list(range(40, 60))
    outcome = h.submit(prompt, 300, banned_strings=("e",))
    waiting = [h.submit([60 + n, *prompt], 20) for n in range(3)]
    for _ in range(40):
        h.driver.step()
        assert all(o.finished is None for o in waiting)
    h.driver.cancel(outcome)
    h.driver.run()
    for other in waiting:
        assert other.ids == h.expected(other)
    h.driver.assert_idle()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_random_answers_that_go_back(seed: int) -> None:
    rng = random.Random(seed)
    h = Harness(
        OracleLogits(VOCAB, eos_every=rng.choice([0, 60]), habit=rng.choice([0, 0.5, 0.9])), pages=12,
        speculate=rng.choice(SPECULATION), batch=3,
    )  # fmt: skip
    texts = [h.random_ids(rng, rng.randrange(1, 600)) for _ in range(3)]
    jobs: list[Outcome] = []
    for _ in range(25):
        prompt = rng.choice(texts)[: rng.randrange(1, 600)]
        if rng.random() < 0.6:
            jobs.append(h.submit(prompt, rng.randrange(1, 120), banned_strings=tuple(rng.sample("aeiou 123", 2))))
        else:
            jobs.append(h.submit(prompt, rng.randrange(1, 120)))
        for _ in range(rng.randrange(25)):
            h.driver.step()
        if rng.random() < 0.2:
            gone = jobs.pop(rng.randrange(len(jobs)))
            if gone.finished is None:
                h.driver.cancel(gone)
    h.driver.run()
    for outcome in jobs:
        banned = outcome.job.banned_strings
        assert not any(string in outcome.text.lower() for string in banned)
        if not banned:
            assert outcome.ids == h.expected(outcome)
        texts.append([*outcome.job.prompt_ids, *outcome.ids])
    h.driver.assert_idle()


# healing


def healing_of(h: Harness, ids: list[int]) -> Healing:
    healing = h.engine._healer.heal(ids) if h.engine._healer else None
    assert healing is not None
    return healing


@pytest.mark.parametrize("speculate", SPECULATION)
@pytest.mark.parametrize("fields", [{}, {"banned_strings": ("\u00a7",)}, {"min_new_tokens": 3}])
def test_the_last_token_is_drawn_anew(speculate: str | None, fields: dict[str, Any]) -> None:
    h = Harness(speculate=speculate)
    spelled = [i for i in range(VOCAB) if h.engine.decode([i]).strip("\ufffd")]
    for seed in range(5):
        rng = random.Random(seed)
        prompt = [rng.choice(spelled) for _ in range(rng.choice([2, 5, PAGE + 1, PAGE + 2]))]
        healing = healing_of(h, prompt)
        scores = h.logits(np.array(healing.prompt_ids))
        first = max(healing.allowed, key=lambda i: scores[i])
        outcome = h.answer(prompt, 20, token_healing=True, top_logprobs=0, **fields)
        assert outcome.ids == h.logits.expected([*healing.prompt_ids, first], 20)
        assert [one.token_id for one in h.logprobs(outcome)] == outcome.ids
        assert len(outcome.ids) == 20
        assert outcome.text == h.engine.decode([first, *outcome.ids]).removeprefix(h.engine.decode(prompt[-1:]))
    h.driver.assert_idle()


def test_healing_that_has_nothing_to_draw_from_is_refused() -> None:
    h = Harness()
    prompt = [50, 60]
    banned = tuple(healing_of(h, prompt).allowed)
    with pytest.raises(RequestError) as e:
        h.submit(prompt, 5, SamplingParams(banned_tokens=banned), token_healing=True)
    assert e.value.field == "token_healing"
    h.driver.assert_idle()
    one = h.answer([50], 5, token_healing=True)  # healing would leave an empty prompt
    assert one.ids == h.expected(one)
