"""Which pages of the prompt cache are given up: the choice, and what the real generator then finds again."""

import random
from collections.abc import Sequence

import pytest

from benchmarks.prompt_cache import Request, chosen, mixed, share
from benchmarks.prompt_cache import names as text
from model_worker.engines.exllamav2.victims import Followed, Held, victims
from tests.engines.exllamav2_cpu.harness import PAGE, Harness


def held(names: Sequence[bytes], used: int) -> list[Held]:
    return [Held(name, names[number - 1] if number else None, used + number, PAGE) for number, name in enumerate(names)]


def named(pages: list[Held]) -> list[bytes]:
    return [page.name for page in pages]


def test_empty_pages_go_first_then_lost_ones_then_the_oldest_text_from_its_end() -> None:
    old, new, lost = text("old", 3), text("new", 2), text("lost", 3)
    empty = Held(b"empty", None, 99, 0)
    pages = [*held(new, 20), *held(old, 10), *held(lost, 1)[1:], empty]
    order = [b"empty", *lost[1:], *reversed(old), *reversed(new)]
    for count in range(len(order) + 3):
        assert named(victims(pages, (), (), count, newest=False)) == order[:count]
    latest_first = [b"empty", *lost[1:], *reversed(new), *reversed(old)]
    assert named(victims(pages, (), (), 9, newest=True)) == latest_first


def test_what_the_prompt_hits_and_what_leads_to_it_stays() -> None:
    old, new = text("old", 3), text("new", 2)
    pages = [*held(old, 10), *held(new, 20)]
    assert named(victims(pages, (), set(old[:2]), 9, newest=False)) == [old[2], *reversed(new)]
    system = text("x", 1)
    branches = [text("a", 3, ["s"]), text("b", 3, ["s"])]
    pages = [*held(branches[0], 1), *held(branches[1], 10)[1:]]
    assert branches[0][0] == branches[1][0] != system[0]
    assert named(victims(pages, (), (), 2, newest=False)) == [branches[0][2], branches[0][1]]
    assert branches[0][0] == victims(pages, (), (), 9, newest=False)[-1].name, "both stand behind it"


def test_pages_behind_a_page_in_use_can_be_found() -> None:
    names = text("t", 3)
    behind, lost = held(names, 1)[1:], Held(b"lost", b"gone", 50, PAGE)
    assert named(victims([*behind, lost], {names[0]}, (), 3, newest=False)) == [b"lost", names[2], names[1]]


def followed(load: list[Request], cache: Followed) -> float:
    return share(load, [cache.use(*request) for request in load]) / 100


def in_turn(agents: int, pages: int, turns: int) -> list[Request]:
    return [(text(turn % agents, pages), 2) for turn in range(turns)]


def test_the_rule_that_would_have_hit_more_is_used() -> None:
    """Three texts of 117 pages on 256: the oldest first keeps 16 %, the latest first 56 %, which one who knows the
    future would keep, too. A mixed load is no worse off than with the oldest first."""
    load = in_turn(3, 117, 60)
    assert followed(load, Followed(256, newest=False)) < 0.2
    assert followed(load, Followed(256, newest=True)) > 0.55
    assert chosen(load, 256) / 100 > 0.53
    for seed in range(3):
        load = mixed(300, seed)
        oldest, latest = (followed(load, Followed(256, newest=newest)) for newest in (False, True))
        assert oldest > latest
        assert chosen(load, 256) / 100 > oldest - 0.01, f"seed {seed}"


@pytest.mark.usefixtures("decoding")
def test_one_small_request_leaves_the_beginnings_of_two_texts() -> None:
    """The package gives up the first pages of the oldest text, and both texts miss completely at their next turns."""
    h, rng = Harness(pages=10), random.Random(1)
    a, b, c = (h.random_ids(rng, pages * PAGE + 1) for pages in (4, 4, 1))
    for prompt in (a, b, c):
        h.driver.submit(prompt, 5)
        h.driver.run()
    found = []
    for prompt in (a, b):
        again = h.driver.submit(prompt, 5)
        h.driver.run()
        assert again.finished is not None
        found.append(again.finished.cached_tokens)
    assert found[0] >= 3 * PAGE
    assert found[1] >= 3 * PAGE
    h.check()


@pytest.mark.usefixtures("decoding")
def test_agents_in_turn_find_what_the_rule_says() -> None:
    """The generator's share of cached tokens is that of the rule followed with names alone."""
    pages, size, turns = 33, 15, 18
    h, rng = Harness(pages=pages, chunk=4 * PAGE), random.Random(2)
    prompts = [h.random_ids(rng, size * PAGE + 1) for _ in range(3)]
    cached = 0
    for turn in range(turns):
        outcome = h.driver.submit(prompts[turn % 3], 5)
        h.driver.run()
        assert outcome.finished is not None
        cached += outcome.finished.cached_tokens
    expected = chosen([(text(turn % 3, size), 1) for turn in range(turns)], pages) / 100
    assert cached / (turns * (size * PAGE + 1)) == pytest.approx(expected, abs=0.02)
    assert expected > 0.3
    h.check()
