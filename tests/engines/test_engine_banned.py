"""Banned strings work on every engine."""

import pytest

from model_worker.engine import Engine
from protocol.request import SamplingParams
from tests.engines.driver import Driver, answer
from tests.engines.test_engine_options import ANSWER, COUNT, PROMPT, greedy, need, story
from tools.demo_models.corpus import (
    LETTERS_TEST_PROMPTS,
)


@pytest.mark.parametrize(
    ("banned", "kept"),
    [
        (["12"], " 10 11"),
        (["12", "13", "99"], " 10 11"),
        ([" 10 11 12"], ""),
        (["0 11 12 1"], ""),
        (["17"], " 10 11 12 13 14 15 16"),
        ([" 1"], ""),
    ],
)
def test_banned_strings_do_not_come(letters: Engine, banned: list[str], kept: str) -> None:
    need(letters, "banned_strings")
    outcome = answer(letters, PROMPT, 60, banned_strings=tuple(banned))
    assert not any(string in outcome.text for string in banned)
    assert outcome.text.startswith(kept)
    assert outcome.text != ANSWER
    assert outcome.reason in ("stop", "length")
    assert outcome.text == letters.decode(outcome.ids)


@pytest.mark.long
def test_what_is_banned_but_does_not_come_changes_nothing(letters: Engine, stories: Engine) -> None:
    need(letters, "banned_strings", "logprobs")
    plain = answer(letters, COUNT, 300)
    outcome = answer(letters, COUNT, 300, banned_strings=("a", "10 12", "0 0", "  "), top_logprobs=0)
    assert (outcome.ids, outcome.text, outcome.reason) == (plain.ids, plain.text, plain.reason)
    assert len(outcome.deltas) > len(plain.deltas) / 3, "it is a stream"
    prompt, text = story(stories)
    outcome = answer(stories, prompt, 400, banned_strings=("shivers", "testament to", "🐻"))
    assert outcome.text == text
    assert not any("\ufffd" in delta for delta in outcome.deltas)


def test_text_that_may_be_banned_comes_at_the_end(letters: Engine) -> None:
    need(letters, "banned_strings")
    outcome = answer(letters, PROMPT, banned_strings=("16 17 18",), stop=["17 18"])
    assert (outcome.text, outcome.reason) == (ANSWER, "stop")
    size = len(outcome.ids) - 3
    cut = answer(letters, PROMPT, size, banned_strings=("16 17",))
    assert (cut.ids, cut.reason) == (outcome.ids[:size], "length")


@pytest.mark.parametrize("banned", ["MIA", "the FOX", "🦊", "Once"])
def test_case_and_characters_of_many_tokens(stories: Engine, banned: str) -> None:
    need(stories, "banned_strings")
    prompt, _ = story(stories)
    outcome = answer(stories, prompt, 120, banned_strings=(banned,))
    assert banned.casefold() not in outcome.text.casefold()
    assert outcome.text
    assert stories.decode(outcome.ids).rstrip("\ufffd") == outcome.text.rstrip("\ufffd")


def test_a_banned_string_that_the_last_token_completes(letters: Engine) -> None:
    need(letters, "banned_strings")
    ids = answer(letters, PROMPT).ids
    size = next(n for n in range(len(ids)) if "13" in letters.decode(ids[:n]))
    outcome = answer(letters, PROMPT, size, banned_strings=("13",))
    assert "13" not in outcome.text
    assert outcome.reason == "stop" or len(outcome.ids) == size
    assert outcome.text.startswith(" 10 11 12")


def test_banned_strings_meet_stop_strings(letters: Engine) -> None:
    need(letters, "banned_strings")
    outcome = answer(letters, PROMPT, banned_strings=("13 14",), stop=["13"])
    assert (outcome.text, outcome.reason) == (" 10 11 12 ", "stop"), "what a stop string cuts off bans nothing"
    assert outcome.finished is not None
    assert outcome.finished.stop_string == "13"


def test_going_back_does_not_disturb_others(letters: Engine) -> None:
    need(letters, "banned_strings")
    driver = Driver(letters)
    prompts = LETTERS_TEST_PROMPTS[2:6]
    kept = [driver.submit(prompt) for prompt, _ in prompts]
    guarded = [driver.submit(PROMPT, 60, banned_strings=(banned,)) for banned in ("11", "12 13", "15")]
    driver.step()
    driver.cancel(driver.submit(PROMPT, 60, banned_strings=("10",)))
    kept += [driver.submit(prompt) for prompt, _ in prompts]
    doomed = driver.submit(PROMPT, 60, banned_strings=("10", " 1"))
    for _ in range(4):
        driver.step()
    if doomed.finished is None:
        driver.cancel(doomed)
    driver.run()
    assert [outcome.text for outcome in kept] == [text for _, text in prompts] * 2
    for outcome in guarded:
        assert outcome.text == answer(letters, PROMPT, 60, banned_strings=outcome.job.banned_strings).text
    driver.assert_idle()


def test_where_every_way_on_is_banned_the_answer_ends(letters: Engine) -> None:
    need(letters, "banned_strings", "allowed_tokens")
    ids = answer(letters, PROMPT).ids
    outcome = answer(letters, PROMPT, 20, greedy(allowed_tokens=(ids[0],)), banned_strings=(" 1 1",))
    assert (outcome.ids, outcome.reason) == ([], "banned_strings"), "the string begins with the first token"
    nothing = answer(letters, PROMPT, 20, greedy(allowed_tokens=tuple(ids[:3])), banned_strings=("1", "0"))
    assert (nothing.text, nothing.ids, nothing.reason) == ("", [], "banned_strings")
    Driver(letters).assert_idle()


def test_a_healed_token_may_be_gone_back_to(letters: Engine) -> None:
    need(letters, "banned_strings", "token_healing")
    outcome = answer(letters, PROMPT + " ", 30, banned_strings=("10 11",), token_healing=True)
    assert "10 11" not in outcome.text
    assert not outcome.text.startswith("10"), "it is the healed token in which the string began"


def test_seeds_reproduce_answers_that_went_back(letters: Engine) -> None:
    need(letters, "banned_strings", "presence_penalty")
    hot = SamplingParams(temperature=3.0, seed=11, presence_penalty=0.5)
    banned = tuple("123456789")
    first = answer(letters, PROMPT, 24, hot, banned_strings=banned)
    letters.reset()
    assert answer(letters, PROMPT, 24, hot, banned_strings=banned).ids == first.ids
    assert not set(first.text) & set(banned)
