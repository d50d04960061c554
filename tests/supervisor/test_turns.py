"""Models that cannot be loaded together take turns: none starves, and none leaves when it has just been loaded."""

import random
from dataclasses import dataclass, field
from math import inf

import pytest

from protocol.codec import unpack_body
from protocol.errors import ErrorCode, WireError
from protocol.messages import Generate
from protocol.verbs import Right
from supervisor.keys.rights import OWNER, Identity
from supervisor.placement import eviction as turns
from supervisor.placement.eviction import BusyWait, EvictionCandidate, NoRoom, behind, choose, stays_s, who_yields
from supervisor.placement.gpus import Gpu
from supervisor.placement.memory import WorkerMemory
from supervisor.placement.policy import Holding
from supervisor.requests.scheduler import Scheduler
from supervisor.requests.table import awaited_text
from tests.supervisor.test_scheduler import DOWN, FINISHED, NOW, deliver, frame, messages

LOOK_S = 0.25


def busy(worker: str, size: int, *, gpu: int = 0, **facts: float) -> EvictionCandidate:
    return EvictionCandidate(worker, {gpu: size}, busy=True, **facts)  # type: ignore[arg-type]


def test_the_fewest_of_the_lowest_priority_yield() -> None:
    a, b, c = busy("a", 10), busy("b", 10), busy("c", 20)
    assert who_yields({0: 20}, [a, b, c]) == ("c",)
    assert who_yields({0: 25}, [a, b, c]) == ("a", "c")
    assert who_yields({0: 20}, [a, b, busy("c", 20, priority=1)]) == ("a", "b")
    assert who_yields({0: 10, 1: 10}, [a, busy("d", 10, gpu=1)], one_suffices=True) == ("a",)
    assert who_yields({0: 10, 1: 10}, [a, busy("d", 10, gpu=1)]) == ("a", "d")
    assert who_yields({0: 50}, [a, b, c]) == ()


def test_one_that_need_not_yield_keeps_the_others_from_yielding_in_vain() -> None:
    a, new, loading = busy("a", 10), busy("new", 10, stays_s=2.0), busy("loading", 10, stays_s=inf)
    assert who_yields({0: 10}, [new, loading, a]) == ("a",)
    assert who_yields({0: 20}, [new, loading, a]) == ()
    gone = EvictionCandidate("gone", {0: 10}, busy=True, leaves=True, stays_s=inf)
    assert who_yields({0: 20}, [gone, a]) == ("a",), "one that leaves anyway needs no order"
    assert who_yields({0: 20}, [EvictionCandidate("idle", {0: 10}), a]) == ("a",)


def test_the_next_look_chooses_the_same_again() -> None:
    a, b = busy("a", 10, idle_s=9.0), busy("b", 10)
    assert who_yields({0: 10}, [a, b]) == ("a",)
    assert who_yields({0: 10}, [a, EvictionCandidate("b", {0: 10}, busy=True, yields=True)]) == ("b",)
    finished = EvictionCandidate("b", {0: 10}, yields=True)
    assert who_yields({0: 20}, [a, finished]) == ("a", "b"), "one that has finished takes no new requests meanwhile"


def test_a_model_stays_for_seconds_and_for_twice_its_load() -> None:
    assert [stays_s(up_s, 1.0) for up_s in (0.0, 4.0, 5.0, 99.0)] == [5.0, 1.0, 0.0, 0.0]
    assert stays_s(10.0, 60.0) == 110.0


def test_the_wait_ends_when_nobody_waits_or_nobody_finishes() -> None:
    a = [busy("a", 10)]
    turn = BusyWait(100.0)
    assert turn.look(100.0, {0: 10}, a) == ()
    assert turn.look(100.0 + turns.YIELD_AFTER_S, {0: 10}, a) == ("a",)
    assert turn.look(100.0 + turns.DRAIN_WAIT_S - 1, {0: 10}, a) == ("a",)
    assert turn.look(110.0 + turns.DRAIN_WAIT_S, {0: 10}, a) is None
    unwanted = BusyWait(100.0)
    assert unwanted.look(100.0, {0: 10}, a, wanted=False) == ()
    assert unwanted.look(159.0, {0: 10}, a, wanted=False) == (), "no model yields for a request that is gone"
    assert unwanted.look(161.0, {0: 10}, a, wanted=False) is None
    patient = BusyWait(100.0)
    for now in range(100, 1000, 50):
        assert patient.look(now, {0: 10}, [busy("a", 10, stays_s=1.0)]) == (), "it waits for one that has to yield"


def test_a_later_start_makes_nothing_leave_where_an_earlier_one_waits() -> None:
    here, there = EvictionCandidate("here", {0: 10}), EvictionCandidate("there", {1: 10})
    assert choose({0: 10, 1: 10}, behind([here, there], {0}), one_suffices=True) == choose({1: 10}, [there])
    assert choose({0: 10}, behind([here, there], {0})) is NoRoom.WAIT
    assert who_yields({0: 10}, behind([busy("here", 10)], {0})) == ()


def test_a_model_that_loads_is_waited_for_although_it_holds_little_yet() -> None:
    """Else the start would be refused for good: even if all others left, there would not be enough room."""
    holding = Holding("a", 11, {0: 50}, loading=True)
    (gpu,) = [Gpu(0, "GPU-0", 80, 5, 75, {11: 5})]
    memory = WorkerMemory(holding=holding)
    assert memory.comes_back([gpu]) == {0: 50}
    memory.woke()
    assert memory.comes_back([gpu]) == {0: 5}, "what it really holds"


@dataclass
class Model:
    """A model of the simulation. Times in seconds."""

    name: str
    gpu: int
    size: int
    load_s: float
    waiting: list[float] = field(default_factory=list)
    """When each request that waits has come."""
    running: list[float] = field(default_factory=list)
    """When each request that runs will end."""
    start: tuple[int, BusyWait] | None = None
    awaited: set[int] = field(default_factory=set)
    yielding: tuple[str, ...] = ()
    ready_at: float | None = None
    """When its load ends or has ended; None if it is not loaded."""
    waits: list[float] = field(default_factory=list)
    loads: int = 0
    asked_to_yield: list[float] = field(default_factory=list)
    """Seconds for which it had been up."""


class Box:
    """Models on GPUs with room for ``sizes``. Each look is what ``fleet.admission`` does four times a second."""

    def __init__(self, sizes: list[int], models: list[Model], chance: random.Random) -> None:
        self.sizes, self.models, self.chance = sizes, {model.name: model for model in models}, chance
        self.now, self.number = 0.0, 0

    def candidates(self, of: Model) -> list[EvictionCandidate]:
        held = {worker for model in self.models.values() for worker in model.yielding}
        made = []
        for model in self.models.values():
            if model is of or model.ready_at is None:
                continue
            up_s = self.now - model.ready_at
            idle = up_s >= 0 and not model.running and (not model.waiting or model.name in held)
            stays = stays_s(up_s, model.load_s) if up_s >= 0 else inf
            made.append(
                EvictionCandidate(
                    model.name, {model.gpu: model.size}, busy=not idle, load_s=model.load_s, stays_s=stays,
                    yields=model.name in held,
                )
            )  # fmt: skip
        return made

    def look(self, model: Model) -> None:
        assert model.start is not None
        number, turn = model.start
        used = sum(m.size for m in self.models.values() if m.gpu == model.gpu and m.ready_at is not None)
        missing = {model.gpu: used + model.size - self.sizes[model.gpu]}
        if missing[model.gpu] > 0:
            earlier = [m for m in self.models.values() if m.start is not None and m.start[0] < number]
            others = behind(self.candidates(model), {gpu for m in earlier for gpu in m.awaited})
            chosen = choose(missing, others)
            if isinstance(chosen, NoRoom):
                assert chosen is NoRoom.WAIT
                before = {worker for m in self.models.values() for worker in m.yielding}
                yielding = turn.look(self.now, missing, others)
                assert yielding is not None, "a request has ended without an answer"
                for name in {*yielding} - before:
                    ready_at = self.models[name].ready_at
                    assert ready_at is not None
                    self.models[name].asked_to_yield.append(self.now - ready_at)
                model.yielding, model.awaited = yielding, {model.gpu}
                return
            for eviction in chosen:
                self.models[eviction.worker].ready_at = None
        model.start, model.yielding, model.awaited = None, (), set()
        model.ready_at, model.loads = self.now + model.load_s, model.loads + 1

    def run(self, seconds: float, clients: int, longest_s: float) -> None:
        """Let ``clients`` of each model ask without a pause for so many seconds, then go on until all have answers."""
        while self.now < seconds or any(m.waiting or m.running for m in self.models.values()):
            self.now += LOOK_S
            for model in self.chance.sample([*self.models.values()], len(self.models)):
                model.running = [end for end in model.running if end > self.now]
                if self.now < seconds and self.chance.random() < 0.9:
                    new = clients - len(model.running) - len(model.waiting)
                    model.waiting += [self.now] * new
                held = any(model.name in m.yielding for m in self.models.values())
                if model.ready_at is not None and model.ready_at <= self.now and not held:
                    model.waits += [self.now - came for came in model.waiting]
                    model.running += [self.now + self.chance.uniform(0.1, longest_s) for _ in model.waiting]
                    model.waiting = []
                if model.waiting and model.ready_at is None and model.start is None:
                    self.number += 1
                    model.start = self.number, BusyWait(self.now)
                if model.start is not None:
                    self.look(model)
            for gpu, size in enumerate(self.sizes):
                used = sum(m.size for m in self.models.values() if m.gpu == gpu and m.ready_at is not None)
                assert used <= size


@pytest.mark.parametrize("seed", range(20))
def test_no_model_starves_and_none_thrashes_whatever_the_order(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [10] * chance.choice([1, 1, 2])
    models = [
        Model(str(n), chance.randrange(len(sizes)), chance.choice([3, 5, 6, 10]), chance.choice([0.3, 2.0, 9.0]))
        for n in range(chance.randint(2, 6))
    ]
    longest_s = chance.choice([1.0, 8.0])
    box = Box(sizes, models, chance)
    box.run(400.0, chance.choice([1, 2, 5]), longest_s)
    turn_s = max(turns.STAY_S, max(turns.STAY_LOADS * m.load_s for m in models)) + longest_s + max(
        m.load_s for m in models
    )  # fmt: skip
    for model in models:
        assert max(model.waits) <= turns.YIELD_AFTER_S + len(models) * (turn_s + 4 * LOOK_S)
        assert all(up_s >= stays_s(0.0, model.load_s) - LOOK_S for up_s in model.asked_to_yield)


# ---- the workers of a model that yields


def ask(scheduler: Scheduler, request: int, *, model: str = "m", owner: Identity = OWNER, **route: object) -> None:
    scheduler.submit(5, Generate(request, model, route, b"x"), NOW, owner=owner)


def test_a_worker_that_yields_finishes_its_requests_and_gets_no_others() -> None:
    scheduler = Scheduler()
    scheduler.add_model("m")
    scheduler.add_worker("m", "m", DOWN)
    scheduler.accept_new("m")
    scheduler.open("m", 1, 4, NOW)
    ask(scheduler, 1)
    assert not scheduler.has_finished("m")
    scheduler.hold_back("m")
    scheduler.hold_back("m")
    ask(scheduler, 2)
    assert (scheduler.counts("m"), scheduler.has_finished("m")) == ((1, 1), False)
    deliver(scheduler, frame(5, (1, 0, FINISHED)))
    assert (scheduler.counts("m"), scheduler.has_finished("m")) == ((0, 1), True)
    scheduler.go_on("m", NOW)
    assert (scheduler.counts("m"), scheduler.is_held_back("m")) == ((1, 0), False)


def test_whatever_becomes_of_a_worker_ends_its_yielding() -> None:
    error = WireError(ErrorCode.DRAINING, "away")
    for end in ("pause", "rest", "refuse", "gone", "open"):
        scheduler = Scheduler()
        scheduler.add_model("m")
        scheduler.add_worker("m", "m", DOWN)
        scheduler.accept_new("m")
        scheduler.open("m", 1, 4, NOW)
        scheduler.hold_back("m")
        assert scheduler.is_held_back("m")
        match end:
            case "pause":
                scheduler.pause("m", NOW)
            case "rest":
                scheduler.rest("m", NOW)
            case "refuse":
                scheduler.refuse_new("m", error, NOW)
            case "gone":
                scheduler.worker_gone("m", error, NOW)
            case "open":
                scheduler.open("m", 2, 4, NOW)
        assert not scheduler.is_held_back("m"), end


def reports(scheduler: Scheduler) -> list[dict[str, object]]:
    return [unpack_body(message.body) for _, message in messages(scheduler.report_positions())]  # type: ignore[union-attr]


def test_clients_are_told_of_models_that_they_may_use_by_name() -> None:
    scheduler = Scheduler()
    scheduler.add_model("m")
    scheduler.add_worker("m", "m", DOWN)
    scheduler.rest("m", NOW)
    narrow = Identity("narrow", "key of narrow", frozenset({Right.INFER}), models=("m",))
    ask(scheduler, 1, progress=True)
    ask(scheduler, 2, progress=True, owner=narrow)
    ask(scheduler, 3)
    scheduler.waits_for("m", (("hidden", 2), ("other", 0)))
    assert [report["waits_for"] for report in reports(scheduler)] == [
        "hidden to finish 2 requests and other to make room",
        "another model to finish 2 requests and another model to make room",
    ]
    assert not reports(scheduler), "nothing has changed"
    scheduler.waits_for("m", ())
    assert reports(scheduler) == [{"phase": "queued", "queue_position": place} for place in (0, 1)]
    assert awaited_text((("a", 1),)) == "a to finish 1 request"


def test_an_error_that_says_when_to_try_again_can_be_tried_again() -> None:
    assert not WireError(ErrorCode.MODEL_FAILED, "x").retryable
    later = WireError(ErrorCode.MODEL_FAILED, "x", retry_after_ms=10_000)
    assert later.retryable
    assert later.to_wire()["retryable"]
