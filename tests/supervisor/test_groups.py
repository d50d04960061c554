"""Of each group at most so many models are loaded or being loaded. Starts take turns, and none waits for ever."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from supervisor.config.server import GroupConfig
from supervisor.placement.eviction import (
    EvictionCandidate,
    NoRoom,
    choose,
    choose_leavers,
    describe,
    missing_places,
    places_of,
    share_group,
    surplus,
)
from tests.supervisor.test_config import CUSTOM, load, problems

CODERS = {"coders": GroupConfig(models=["a", "b", "c"], loaded=1)}


def holder(
    model: str,
    groups: dict[str, GroupConfig],
    *,
    busy: bool = False,
    may_leave: bool = True,
    leaving: bool = False,
    priority: int = 0,
    idle_s: float = 0.0,
) -> EvictionCandidate:
    """Return a model that has a place in each of its groups."""
    held = places_of(model, groups) if may_leave or leaving else {}
    return EvictionCandidate(model, held, busy=busy or leaving, leaves=leaving, priority=priority, idle_s=idle_s)


def test_the_longest_idle_model_of_the_lowest_priority_leaves() -> None:
    groups = {"g": GroupConfig(models=["a", "b", "c", "d"], loaded=3)}
    missing = missing_places("d", groups, ["a", "b", "c", "else"])
    assert missing == {"g": 1}
    holders = [
        holder("a", groups, idle_s=5),
        holder("b", groups, idle_s=50),
        holder("c", groups, idle_s=500, priority=1),
        holder("else", groups),
    ]
    assert choose_leavers(missing, holders) == ("b",)
    assert describe(missing, groups) == "group g: 3 at once"
    assert missing_places("a", groups, ["a", "b", "c"]) == {}, "a further worker of a loaded model needs no place"
    assert missing_places("else", groups, ["a", "b", "c"]) == {}


def test_busy_models_are_waited_for_and_models_that_stay_are_not() -> None:
    missing = missing_places("b", CODERS, ["a"])
    assert choose_leavers(missing, [holder("a", CODERS, busy=True)]) is NoRoom.WAIT
    assert choose_leavers(missing, [holder("a", CODERS, may_leave=False, leaving=True)]) is NoRoom.WAIT
    assert choose_leavers(missing, [holder("a", CODERS, may_leave=False)]) is NoRoom.NEVER


def test_a_model_of_two_groups_needs_a_place_in_both() -> None:
    groups = {"one": GroupConfig(models=["big", "x"]), "two": GroupConfig(models=["big", "y"])}
    missing = missing_places("big", groups, ["x", "y"])
    assert missing == {"one": 1, "two": 1}
    assert set(choose_leavers(missing, [holder("x", groups), holder("y", groups)])) == {"x", "y"}  # type: ignore[arg-type]
    assert choose_leavers(missing, [holder("x", groups), holder("y", groups, busy=True)]) is NoRoom.WAIT, (
        "none leaves in vain"
    )
    assert missing_places("y", groups, ["x"]) == {}
    assert share_group("x", "big", groups)
    assert not share_group("x", "y", groups)


def test_a_lowered_limit_is_a_surplus_of_models_that_do_not_leave_yet() -> None:
    assert surplus(CODERS, [holder("a", CODERS), holder("b", CODERS), holder("c", CODERS, leaving=True)]) == {
        "coders": 1
    }
    assert surplus(CODERS, [holder("a", CODERS), holder("b", CODERS, leaving=True)]) == {}


@dataclass
class Box:
    """A supervisor in miniature: the rules of ``Start`` with time as a counter, one GPU, and models of given sizes.

    A start takes its places first, then its memory, and is refused after ``PATIENCE`` turns of waiting.
    """

    groups: dict[str, GroupConfig]
    sizes: dict[str, int]
    room: int
    priorities: dict[str, int]
    now: int = 0
    waiting: list[str] = field(default_factory=list)
    placed: set[str] = field(default_factory=set)
    since: dict[str, int] = field(default_factory=dict)
    loading: dict[str, int] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)
    busy: dict[str, int] = field(default_factory=dict)
    leaving: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)

    PATIENCE = 12

    @property
    def holding(self) -> set[str]:
        return {*self.placed, *self.loading, *self.ready, *self.leaving}

    def holders(self) -> list[EvictionCandidate]:
        return [
            holder(
                m,
                self.groups,
                busy=m not in self.ready or m in self.busy,
                leaving=m in self.leaving,
                priority=self.priorities[m],
                idle_s=self.now - self.ready.get(m, self.now),
            )
            for m in sorted(self.holding)
        ]

    def ask(self, model: str) -> None:
        if model in self.ready:
            self.busy[model] = self.now + 3
        elif model not in self.waiting and model not in self.loading and model not in self.leaving:
            self.waiting.append(model)
            self.since[model] = self.now

    def turn(self) -> None:
        self.now += 1
        for m in [m for m, until in self.loading.items() if until <= self.now]:
            del self.loading[m]
            self.ready[m], self.busy[m] = self.now, self.now + 3
            self.served.append(m)
        for m in [m for m, until in self.busy.items() if until <= self.now]:
            del self.busy[m]
            self.ready[m] = self.now
        for m in [m for m, until in self.leaving.items() if until <= self.now]:
            del self.leaving[m]
        for m in list(self.waiting):
            if m in self.placed or not self._overtakes(m):
                self._try(m)

    def _overtakes(self, model: str) -> bool:
        earlier = self.waiting[: self.waiting.index(model)]
        return any(m not in self.placed and share_group(m, model, self.groups) for m in earlier)

    def _try(self, model: str) -> None:
        if model not in self.placed:
            missing = missing_places(model, self.groups, self.holding)
            if missing:
                chosen = choose_leavers(missing, self.holders())
                self._leave_or_wait(model, chosen, one_loads=bool(self.placed or self.loading))
                return
            self.placed.add(model)
            self.since[model] = self.now
        held = {m: self.sizes[m] for m in {*self.loading, *self.ready, *self.leaving}}
        short = sum(held.values()) + self.sizes[model] - self.room
        if short > 0:
            candidates = [
                EvictionCandidate(m, {0: size}, busy=m not in self.ready or m in self.busy, idle_s=float(self.now))
                for m, size in held.items()
            ]
            chosen = choose({0: short}, candidates)
            names = chosen if isinstance(chosen, NoRoom) else tuple(eviction.worker for eviction in chosen)
            self._leave_or_wait(model, names, one_loads=bool(self.loading))
            return
        self.waiting.remove(model)
        self.placed.discard(model)
        self.loading[model] = self.now + 2

    def _leave_or_wait(self, model: str, chosen: tuple[str, ...] | NoRoom, *, one_loads: bool) -> None:
        if not isinstance(chosen, NoRoom):
            for m in chosen:
                assert m in self.ready
                assert m not in self.busy, "a model that answers is never unloaded"
                del self.ready[m]
                self.leaving[m] = self.now + 1
            return
        if one_loads:
            self.since[model] = self.now
        if chosen is NoRoom.NEVER or self.now - self.since[model] >= self.PATIENCE:
            self.waiting.remove(model)
            self.placed.discard(model)
            self.refused.append(model)


def test_random_orders_never_break_a_limit_and_never_stand_still() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(150):
        names = [f"m{i}" for i in range(chance.randint(2, 7))]
        groups = {
            f"g{i}": GroupConfig(
                models=chance.sample(names, chance.randint(1, len(names))), loaded=chance.randint(1, 3)
            )
            for i in range(chance.randint(1, 3))
        }
        sizes = {m: chance.randint(1, 4) for m in names}
        box = Box(groups, sizes, room=chance.randint(4, 9), priorities={m: chance.randint(0, 2) for m in names})
        for _ in range(80):
            if chance.random() < 0.5:
                box.ask(chance.choice(names))
            box.turn()
            for group in groups.values():
                assert len(box.holding & {*group.models}) <= group.loaded
            assert sum(sizes[m] for m in {*box.loading, *box.ready, *box.leaving}) <= box.room
        turns = 0
        while box.waiting:  # nobody asks any more, so every model that waits becomes ready: none is refused
            before = len(box.refused)
            box.turn()
            turns += 1
            assert turns < 200, f"{box.waiting} wait for ever"
            assert len(box.refused) == before or turns < Box.PATIENCE


def test_a_start_that_waits_is_not_overtaken() -> None:
    box = Box(CODERS, dict.fromkeys("abc", 1), room=9, priorities=dict.fromkeys("abc", 0))
    for _ in range(60):
        for model in "abc":  # each model is asked for again as soon as it has been unloaded
            if model not in box.ready:
                box.ask(model)
        box.turn()
    order = "".join(box.served)
    assert order.startswith("abcabcabc"), order
    assert box.refused == []


def grouped(group: dict[str, object], **models: dict[str, object]) -> str:
    entries = {name: {"model_dir": ".", "engine": CUSTOM, **keys} for name, keys in models.items()}
    return yaml.safe_dump({"models": entries, "groups": {"g": group}})


@pytest.mark.parametrize(
    ("group", "models", "message"),
    [
        ({"models": ["a", "bb"]}, {"a": {}, "b": {}}, "'bb': no model of this file has that name; did you mean 'b'?"),
        ({"models": ["a", "a"]}, {"a": {"lazy": True}}, "which the group has already; remove one"),
        ({"models": []}, {"a": {}}, "names no model"),
        ({"models": ["a", "b"]}, {"a": {}, "b": {"lazy": True}}, "a would never be unloaded for b: make them lazy"),
        ({"models": ["a", "b"]}, {"a": {}, "b": {}}, "none of a, b would ever be unloaded"),
        (
            {"models": ["a", "b"]},
            {"a": {"lazy": True, "pinned": True}, "b": {"lazy": True}},
            "a would never be unloaded for b",
        ),
        (
            {"models": ["a", "b"]},
            {"a": {"lazy": True, "autostart": True}, "b": {"lazy": True, "autostart": True}},
            "a, b start with the supervisor: remove autostart",
        ),
        ({"models": ["a"], "loaded": 0}, {"a": {}}, "from 1 to 1000"),
        ({"models": ["a"], "load": 1}, {"a": {}}, "did you mean 'loaded'?"),
    ],
)
def test_groups_whose_models_could_never_be_loaded_are_refused(
    tmp_path: Path, group: dict[str, object], models: dict[str, dict[str, object]], message: str
) -> None:
    found = problems(tmp_path, grouped(group, **models))
    assert len(found) == 1
    assert message in found[0]
    assert "groups.g" in found[0]


def test_a_group_of_lazy_models_and_of_models_that_people_start_is_accepted(tmp_path: Path) -> None:
    text = grouped({"models": ["a", "b"]}, a={"lazy": True}, b={"autostart": False})
    config = load(tmp_path, text)
    assert config.groups["g"] == GroupConfig(models=["a", "b"], loaded=1)
