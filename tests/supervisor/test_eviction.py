"""Eviction chooses the cheapest set of idle models, and never a busy one."""

import random
from collections.abc import Sequence

from supervisor.placement import eviction
from supervisor.placement.eviction import EXACT_UP_TO, Eviction, EvictionCandidate, NoRoom

GIB = 1 << 30


def idle(worker: str, gib: int, *, gpu: int = 0, **facts: float) -> EvictionCandidate:
    return EvictionCandidate(worker, {gpu: gib * GIB}, **facts)  # type: ignore[arg-type]


def choose(
    missing: dict[int, int], candidates: Sequence[EvictionCandidate], *, one_suffices: bool = False
) -> tuple[str, ...] | NoRoom:
    """Return the names of those that are unloaded. None of them can sleep."""
    chosen = eviction.choose(missing, candidates, one_suffices=one_suffices)
    assert isinstance(chosen, NoRoom) or not any(one.sleeps for one in chosen)
    return chosen if isinstance(chosen, NoRoom) else tuple(one.worker for one in chosen)


def test_one_that_is_enough_is_better_than_two() -> None:
    small, other, large = idle("small", 10, load_s=5), idle("other", 10, load_s=5), idle("large", 20, load_s=8)
    assert choose({0: 20 * GIB}, [small, other, large]) == ("large",)
    assert choose({0: 25 * GIB}, [small, other, large]) == ("small", "large")


def test_the_cheapest_goes_and_the_longest_idle_of_equals() -> None:
    assert choose({0: GIB}, [idle("a", 9, load_s=60), idle("b", 9, load_s=3)]) == ("b",)
    assert choose({0: GIB}, [idle("a", 9, idle_s=5), idle("b", 9, idle_s=500)]) == ("b",)
    two_cheap = [idle("a", 5, load_s=2), idle("b", 5, load_s=2), idle("c", 10, load_s=30)]
    assert choose({0: 10 * GIB}, two_cheap) == ("a", "b")


def test_a_higher_priority_goes_last_whatever_it_costs() -> None:
    dear, cheap = idle("dear", 9, load_s=600), idle("cheap", 9, load_s=1, priority=1)
    assert choose({0: GIB}, [dear, cheap]) == ("dear",)


def test_busy_ones_are_waited_for_if_that_helps() -> None:
    busy = idle("busy", 20, busy=True)
    assert choose({0: 10 * GIB}, [busy]) is NoRoom.WAIT
    assert choose({0: 30 * GIB}, [busy]) is NoRoom.NEVER
    assert choose({0: 30 * GIB}, [busy, idle("idle", 10)]) is NoRoom.WAIT
    assert choose({0: 10 * GIB}, [busy, idle("idle", 10)]) == ("idle",)
    assert choose({0: 10 * GIB}, []) is NoRoom.NEVER


def test_only_the_gpus_that_are_too_full_count() -> None:
    there, elsewhere = idle("there", 10, gpu=1), idle("elsewhere", 50, gpu=0)
    assert choose({1: 10 * GIB}, [elsewhere, there]) == ("there",)
    assert choose({0: GIB, 1: GIB}, [elsewhere, there]) == ("elsewhere", "there")
    assert choose({0: GIB, 1: 60 * GIB}, [elsewhere, there]) is NoRoom.NEVER
    assert choose({0: GIB, 1: 60 * GIB}, [elsewhere, there], one_suffices=True) == ("elsewhere",)


def test_of_many_none_goes_that_need_not() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(200):
        count = chance.randint(1, EXACT_UP_TO + 8)
        candidates = [
            idle(str(i), chance.randint(1, 20), load_s=chance.randint(1, 60), priority=chance.randint(0, 2))
            for i in range(count)
        ]
        wanted = chance.randint(1, 200) * GIB
        chosen = choose({0: wanted}, candidates)
        sizes = {candidate.worker: candidate.held[0] for candidate in candidates}
        if isinstance(chosen, NoRoom):
            assert chosen is NoRoom.NEVER
            assert sum(sizes.values()) < wanted
        else:
            freed = sum(sizes[worker] for worker in chosen)
            assert freed >= wanted
            assert all(freed - sizes[worker] < wanted for worker in chosen)


# ---- sleep


def sleeper(worker: str, gib: int, *, host: int = 10, asleep: bool = False, **facts: float) -> EvictionCandidate:
    """A worker that holds 1 GiB while it sleeps, and wakes in a second."""
    held = {0: (1 if asleep else gib) * GIB}
    slept = None if asleep else {0: (gib - 1) * GIB}
    return EvictionCandidate(
        worker, held, slept=slept, wake_s=1.0, host_bytes=0 if asleep else host * GIB, load_s=30, **facts
    )  # type: ignore[arg-type]


def test_who_can_sleep_is_not_unloaded() -> None:
    assert eviction.choose({0: 8 * GIB}, [sleeper("a", 10)], host_room=10 * GIB) == (Eviction("a", sleeps=True),)
    pair = [idle("plain", 10, load_s=5), sleeper("a", 10)]
    assert eviction.choose({0: 8 * GIB}, pair, host_room=10 * GIB) == (Eviction("a", sleeps=True),)
    assert eviction.choose({0: 15 * GIB}, pair, host_room=10 * GIB) == (Eviction("plain"), Eviction("a", sleeps=True))


def test_without_host_memory_it_is_unloaded() -> None:
    assert eviction.choose({0: 8 * GIB}, [sleeper("a", 10)], host_room=9 * GIB) == (Eviction("a"),)
    pair = [sleeper("a", 10), sleeper("b", 10)]
    assert eviction.choose({0: 18 * GIB}, pair, host_room=20 * GIB) == (
        Eviction("a", sleeps=True),
        Eviction("b", sleeps=True),
    )
    assert eviction.choose({0: 18 * GIB}, pair, host_room=10 * GIB) == (Eviction("a"), Eviction("b"))


def test_what_a_sleeper_still_holds_is_had_by_unloading_it() -> None:
    assert eviction.choose({0: 10 * GIB}, [sleeper("a", 10)], host_room=10 * GIB) == (Eviction("a"),)
    both = [sleeper("a", 10), sleeper("old", 10, asleep=True)]
    assert eviction.choose({0: 10 * GIB}, both, host_room=10 * GIB) == (Eviction("a", sleeps=True), Eviction("old"))


def test_of_many_sleepers_host_memory_is_never_exceeded_and_enough_becomes_free() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(200):
        some = [
            sleeper(str(i), chance.randint(2, 20), host=chance.randint(1, 20), asleep=chance.random() < 0.3)
            for i in range(chance.randint(1, EXACT_UP_TO + 8))
        ]
        wanted, room = chance.randint(1, 150) * GIB, chance.randint(0, 60) * GIB
        chosen = eviction.choose({0: wanted}, some, host_room=room)
        by_name = {one.worker: one for one in some}
        if isinstance(chosen, NoRoom):
            assert chosen is NoRoom.NEVER
            assert sum(one.held[0] for one in some) < wanted
            continue
        slept = [by_name[one.worker] for one in chosen if one.sleeps]
        assert sum(one.host_bytes for one in slept) <= room
        freed = sum((one.slept or {})[0] for one in slept)
        assert freed + sum(by_name[one.worker].held[0] for one in chosen if not one.sleeps) >= wanted
