"""Delivered text never contains a banned string. When one is found, the engine goes back to the token that began it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model_worker.engines.banned import MOST_IN_A_ROW, BannedStrings, BanVerdict, fold
from protocol.messages import FinishReason

PIECES = ["", "a", "b", "c", "ab", "bc", "A", "ca", " ", "abc", "cab"]


@dataclass
class Answer:
    """The output of ``generate``. ``ids`` are the kept tokens; ``steps`` counts draws, ``returns`` the ways back."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    delivered: int = 0
    reason: str | None = None
    steps: int = 0
    returns: int = 0


def generate(
    judge: BannedStrings, draw: Callable[[Sequence[int], frozenset[int]], int | None], limit: int, pieces: list[str]
) -> Answer:
    """Generate an answer. ``draw`` returns a token, -1 for an end token, or None if no token may be drawn."""
    answer = Answer()

    def take(verdict: BanVerdict) -> bool:
        """Apply a verdict. Return whether the answer ends."""
        answer.text += verdict.text
        answer.delivered += verdict.tokens
        assert answer.delivered <= len(answer.ids)
        if verdict.back_to is not None:
            assert verdict.tokens == 0
            assert verdict.text == ""
            assert answer.delivered <= verdict.back_to < len(answer.ids)
            answer.returns += 1
            del answer.ids[verdict.back_to :]
            assert judge.position == len(answer.ids)
            assert judge.blocked
        if verdict.ended:
            answer.reason = verdict.ended
            del answer.ids[answer.delivered :]
        return bool(verdict.ended)

    while True:
        assert judge.position == len(answer.ids)
        token = draw(answer.ids, judge.blocked)
        answer.steps += 1
        if token is None:
            take(judge.give_up())
            return answer
        if token >= 0:
            assert token not in judge.blocked
            answer.ids.append(token)
            verdict = judge.push(token, pieces[token])
            if take(verdict):
                return answer
            if verdict.back_to is not None or len(answer.ids) < limit:
                continue
        verdict = judge.finish()
        if take(verdict):
            return answer
        if verdict.back_to is None:
            assert answer.delivered == len(answer.ids)
            answer.reason = "end" if token < 0 else "length"
            return answer


def script(*wishes: Sequence[int]) -> Callable[[Sequence[int], frozenset[int]], int | None]:
    """Return a draw function that takes the first wish of each position that is not blocked, and then ends."""

    def draw(ids: Sequence[int], blocked: frozenset[int]) -> int | None:
        if len(ids) == len(wishes):
            return -1
        return next((token for token in wishes[len(ids)] if token not in blocked), None)

    return draw


def say(banned: Sequence[str], words: Sequence[Sequence[str]], *, limit: int = 99, **options: object) -> Answer:
    """Return the answer of a model that wants these texts at each position, the likeliest first."""
    pieces = sorted({word for wishes in words for word in wishes})
    judge = BannedStrings(banned, limit=limit, **options)  # type: ignore[arg-type]
    return generate(judge, script(*[[pieces.index(w) for w in wishes] for wishes in words]), limit, pieces)


def test_without_a_hit_all_is_delivered_at_once() -> None:
    judge = BannedStrings(["xyz"], limit=9)
    assert judge.push(1, "hello") == BanVerdict(1, "hello")
    assert judge.push(2, " world") == BanVerdict(1, " world")
    assert judge.finish() == BanVerdict()


def test_what_may_begin_a_banned_string_waits_with_its_whole_token() -> None:
    judge = BannedStrings(["bad word"], limit=9)
    assert judge.push(1, "a b") == BanVerdict()
    assert judge.push(2, "ad ") == BanVerdict()
    assert judge.push(3, "day") == BanVerdict(3, "a bad day")
    assert judge.push(4, " ba") == BanVerdict()
    assert judge.finish("\ufffd") == BanVerdict(1, " ba\ufffd")


def test_the_way_back_leads_to_the_token_where_the_string_began() -> None:
    answer = say(["bad word"], [["it"], [" is a"], [" ba", " good"], ["d w"], ["ord", "ish"]])
    assert (answer.text, answer.reason) == ("it is a goodd word", "end")  # the model continues freely
    judge = BannedStrings(["bad word"], limit=9)
    judge.push(1, "it")
    judge.push(2, " is a")
    assert [judge.push(3, " ba"), judge.push(4, "d w")] == [BanVerdict(), BanVerdict()]
    assert judge.push(5, "ord!") == BanVerdict(back_to=2)
    assert (judge.position, judge.blocked) == (2, {3})
    assert judge.push(6, " good") == BanVerdict(1, " good")
    assert judge.blocked == frozenset()


def test_hits_at_the_same_place_add_up() -> None:
    answer = say(["one", "two", "three"], [["I say "], ["one", "two", "three", "four"], ["."]])
    assert (answer.text, answer.returns, answer.reason) == ("I say four.", 3, "end")


def test_the_way_back_beyond_an_earlier_one_forgets_what_was_blocked_behind_other_tokens() -> None:
    judge = BannedStrings(["ab", "cdx", "cde"], limit=9)
    assert judge.push(0, "c") == BanVerdict()
    assert judge.push(1, "d") == BanVerdict()
    assert judge.push(2, "ab") == BanVerdict(back_to=2)
    assert judge.blocked == {2}
    assert judge.push(3, "x") == BanVerdict(back_to=0)
    assert judge.push(4, "C") == BanVerdict()
    assert judge.push(1, "d") == BanVerdict()
    assert judge.blocked == frozenset(), "another token stands before it now"
    assert judge.push(3, "E") == BanVerdict(back_to=0)
    assert judge.blocked == {0, 4}


def test_what_was_delivered_may_begin_a_banned_string_after_a_return() -> None:
    """The A is delivered when "ca" follows. After the return another token follows, with which A begins the string."""
    answer = say(["ab", "cax"], [["A"], ["ca", "bc", "ok"], ["x"]])
    assert (answer.text, answer.reason) == ("Aokx", "end")
    answer = say(["cax"], [["A"], ["ca", "bc"], ["x"], ["!"]], stops=["Ab"])
    assert (answer.text, answer.reason) == ("", "stop"), "text before a stop string is all that is delivered"


def test_a_list_that_begins_with_every_letter_does_not_stall_the_stream() -> None:
    judge = BannedStrings([f"{letter}zzz" for letter in "abcdefghijklmnopqrstuvwxyz "], limit=99)
    assert [judge.push(i, f" word{chr(97 + i)}").tokens for i in range(20)] == [0] + [1] * 19


@pytest.mark.parametrize(
    ("banned", "text"),
    [("BAD", "bad"), ("bad", "BaD"), ("straße", "STRAßE"), ("ΟΔΟΣ", "οδος"), ("Čeněk", "ČENĚK"), ("İx", "İX")],
)
def test_case_does_not_matter(banned: str, text: str) -> None:
    for cut in range(1, len(text)):
        answer = say([banned], [["<"], [text[:cut], "ok"], [text[cut:]]])
        assert answer.text == "<ok" + text[cut:]


@given(st.text())
def test_folding_keeps_every_character_in_its_place(text: str) -> None:
    assert len(fold(text)) == len(text)
    assert fold(text) == "".join(map(fold, text))
    assert fold(fold(text)) == fold(text)


def test_a_character_in_several_tokens_is_gone_back_to_whole() -> None:
    judge = BannedStrings(["🐻"], limit=9)
    assert judge.push(1, "a ") == BanVerdict(1, "a ")
    assert [judge.push(2, ""), judge.push(3, "")] == [BanVerdict(), BanVerdict()]
    assert judge.push(4, "🐻") == BanVerdict(back_to=1)
    assert judge.blocked == {2}
    judge = BannedStrings(["b"], limit=9)
    judge.push(2, "")
    assert judge.push(3, "éb") == BanVerdict(back_to=1), "the character before it is not at fault"


def test_a_character_that_is_not_banned_comes_with_its_tokens() -> None:
    judge = BannedStrings(["🐻"], limit=9)
    assert [judge.push(2, ""), judge.push(3, "")] == [BanVerdict(), BanVerdict()]
    assert judge.push(4, "🦊") == BanVerdict(3, "🦊")
    judge.push(5, "")
    assert judge.finish("\ufffd") == BanVerdict(1, "\ufffd")


def test_a_healed_token_without_text_is_no_part_of_a_character() -> None:
    for healed, back in ((True, 1), (False, 0)):
        judge = BannedStrings(["bad"], limit=9, healed=healed)
        assert judge.push(7, "") == BanVerdict()
        assert judge.push(8, "bad") == BanVerdict(back_to=back)


def test_stop_strings_cut_the_text_first() -> None:
    assert say(["bcd"], [["a"], ["b"], ["c"], ["d"]], stops=["bc"]).text == "a"
    answer = say(["bc"], [["a"], ["b", "x"], ["cd"]], stops=["cd"])
    assert (answer.text, answer.reason, answer.returns) == ("ab", "stop", 0), "no more than b would be delivered"
    answer = say(["bc"], [["a"], ["b", "x"], ["c"], ["e"]], stops=["cd"])
    assert (answer.text, answer.reason, answer.returns) == ("axce", "end", 1), "c waits for the stop string to fail"
    answer = say(["b"], [["a"], ["b", "x"], ["c"]], stops=["xc"])
    assert (answer.text, answer.reason, len(answer.ids)) == ("a", "stop", 3)


def test_text_held_for_a_stop_string_may_be_banned_at_the_end() -> None:
    answer = say(["b"], [["a"], ["bc", "x"]], stops=["bcd"])
    assert (answer.text, answer.reason, answer.returns) == ("ax", "end", 1)
    answer = say(["b"], [["a"], ["bc", "x"]], stops=["bcd"], limit=2)
    assert (answer.text, answer.reason, answer.returns) == ("ax", "length", 1)


def test_stop_strings_are_not_looked_for_in_the_first_tokens() -> None:
    answer = say(["z"], [["a"], ["b"], ["a"], ["c"]], stops=["a"], minimum=2)
    assert (answer.text, len(answer.ids), answer.reason) == ("ab", 3, "stop")
    answer = say(["z"], [["ha"], ["a"]], stops=["a"], healed=True)
    assert (answer.text, len(answer.ids), answer.reason) == ("h", 1, "stop")
    answer = say(["z"], [["h"], ["a"], ["b"], ["a"], ["c"]], stops=["a"], minimum=2, healed=True)
    assert (answer.text, len(answer.ids), answer.reason) == ("hab", 4, "stop")


def test_the_last_token_allowed_may_complete_a_banned_string() -> None:
    answer = say(["bad"], [["a "], ["ba", "go"], ["d", "t"]], limit=3)
    assert (answer.text, answer.reason, len(answer.ids)) == ("a god", "length", 3)


def test_held_text_comes_at_the_end() -> None:
    answer = say(["bad word"], [["a "], ["bad"]])
    assert (answer.text, answer.reason) == ("a bad", "end")


def test_where_no_token_is_left_the_answer_ends_and_says_so() -> None:
    answer = say(["bad", "worse"], [["very "], ["bad", "worse"]])
    assert (answer.text, answer.reason, answer.returns) == ("very ", FinishReason.BANNED, 2)


def test_returns_without_progress_are_bounded() -> None:
    judge = BannedStrings(["a"], limit=1 << 30)
    tokens = iter(range(1 << 20))
    answer = generate(judge, lambda ids, blocked: next(tokens), 1 << 30, ["a"] * (1 << 20))
    assert (answer.text, answer.reason, answer.returns) == ("", FinishReason.BANNED, MOST_IN_A_ROW)


def test_returns_are_bounded_in_all() -> None:
    judge = BannedStrings(["a"], limit=50)
    tokens = iter(range(1 << 20))
    pieces = ["ok" if i % 60 == 59 else "a" for i in range(1 << 12)]
    answer = generate(judge, lambda ids, blocked: next(tokens), 50, pieces)
    assert answer.reason == FinishReason.BANNED
    assert answer.returns == 50 + MOST_IN_A_ROW
    assert answer.text == "ok" * (answer.delivered)


STRINGS = st.text("abcA ", min_size=1, max_size=4)


@given(
    banned=st.lists(STRINGS, max_size=3),
    stops=st.lists(STRINGS, max_size=2),
    limit=st.integers(1, 30),
    minimum=st.integers(0, 5),
    seed=st.integers(0, 1 << 32),
)
@example(banned=["ab"], stops=["bc"], limit=30, minimum=0, seed=0)
def test_no_answer_holds_a_banned_string(
    banned: list[str], stops: list[str], limit: int, minimum: int, seed: int
) -> None:
    minimum = min(minimum, limit)

    def draw(ids: Sequence[int], blocked: frozenset[int]) -> int | None:
        """Draw the same token after the same tokens, as a greedy model does."""
        wishes = list(range(-1 if len(ids) >= minimum else 0, len(PIECES)))
        random.Random(f"{seed} {ids}").shuffle(wishes)
        return next((token for token in wishes if token not in blocked), None)

    judge = BannedStrings(banned, stops, minimum=minimum, limit=limit)
    answer = generate(judge, draw, limit, PIECES)
    whole = "".join(PIECES[i] for i in answer.ids)
    for string in banned:
        assert fold(string) not in fold(answer.text)
    assert len(answer.ids) == answer.delivered <= limit
    assert answer.steps <= (limit + MOST_IN_A_ROW + 1) * (limit + 1)
    looked_at = "".join(PIECES[i] for i in answer.ids[minimum:])
    if answer.reason == "stop":
        assert whole.startswith(answer.text)
        assert any(whole[len(answer.text) :].startswith(stop) for stop in stops)
        assert len(answer.ids) > minimum
    else:
        assert answer.text == whole
        assert not any(stop in looked_at for stop in stops)
        assert answer.reason != "length" or len(answer.ids) == limit
    if not answer.returns and answer.reason != FinishReason.BANNED:  # the answer is as without banned strings
        plain = generate(BannedStrings([], stops, minimum=minimum, limit=limit), draw, limit, PIECES)
        assert (plain.text, plain.ids, plain.reason) == (answer.text, answer.ids, answer.reason)
