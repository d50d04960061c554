"""The benchmarks of many streams and of long runs make an even load, and judge its figures correctly."""

import os
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import flood_engine, scale, soak
from benchmarks.flood_engine import FloodEngine, Taken
from benchmarks.paced_engine import PacedEngine
from model_worker.engine import Finished, Job, NewTokens
from protocol.process.worker_spec import EngineSpec
from protocol.request import SamplingParams


def test_the_paced_engine_gives_every_job_as_many_tokens_in_turn() -> None:
    options = {"rate": 2000, "turn": 1, "of": 2, "context": 1000}
    engine = PacedEngine(EngineSpec("m", "x", ".", "cpu", None, 8, options))
    engine.load(lambda *_: None)
    for number in range(1, 6):
        engine.submit(Job(number, (1, 2), 7 if number == 5 else 900, SamplingParams()))
    events = engine.step()
    assert [event.job for event in events] == [1, 2, 3, 4, 5], "first tokens come at once"
    slots = []
    for turn in range(50):
        if turn == 40:
            engine.cancel(2)
        (event,) = engine.step()
        assert isinstance(event, NewTokens | Finished)
        # A token may come late in its slot of 1 ms, so only the slots can be compared, not the times between tokens.
        slots.append((int(event.text) - 500_000 + 1_000) // 1_000_000)
        events.append(event)
    tokens = Counter(event.job for event in events)
    assert tokens[5] == 7
    assert tokens[1] - tokens[3] in (0, 1)
    assert all(a < b for a, b in pairwise(slots)), "two workers share 2000 tokens a second"
    assert isinstance(next(event for event in reversed(events) if event.job == 5), Finished)


@pytest.mark.parametrize("kind", ["one", "all"])
def test_the_flood_gives_every_job_what_it_asked_for_and_is_never_ahead_by_more_than_its_window(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flood_engine, "WAIT_S", 0.0)
    seed = int(os.environ.get("TEST_SEED", random.getrandbits(32)))
    print(f"TEST_SEED={seed}")
    draw, window = random.Random(seed), 5
    engine = FloodEngine(EngineSpec("m", "", "/", options={"taken": str(tmp_path / "taken"), "window": window}))
    taken = Taken(str(tmp_path / "taken"))
    asked: dict[int, int] = {}
    made: Counter[int] = Counter()
    ended: set[int] = set()
    for step in range(4000):
        chance = draw.random()
        if chance < 0.02 and step < 3000:
            number = len(asked) + 1
            asked[number] = draw.randrange(1, 60)
            engine.submit(Job(number, tuple(kind.encode()), asked[number], SamplingParams()))
        elif chance < 0.03 and len(ended) < len(asked):
            number = draw.choice([number for number in asked if number not in ended])
            engine.cancel(number)
            ended.add(number)
        elif chance < 0.3:
            taken.steps = max([taken.steps, *(made[number] for number in asked if number not in ended)])
        events = engine.step()
        assert kind == "all" or len(events) <= 1
        for event in events:
            assert isinstance(event, NewTokens | Finished)
            assert event.job not in ended
            assert (event.token_ids, event.text) == (flood_engine.TOKEN, flood_engine.TEXT)
            made[event.job] += 1
            assert made[event.job] <= min(asked[event.job], taken.steps + window)
            assert isinstance(event, Finished) == (made[event.job] == asked[event.job])
            if isinstance(event, Finished):
                ended.add(event.job)
        assert engine.stats().active == len(asked) - len(ended)
    assert len(asked) > 10
    assert len(ended) == len(asked), "nobody was forgotten"


@pytest.mark.parametrize("size", scale.SIZES, ids=str)
def test_streams_are_spread_evenly_over_connections_and_workers(size: scale.Size) -> None:
    asked = scale.wanted(size)
    assert len(asked) == size.streams
    for column, count in ((0, size.connections), (1, size.workers)):
        shares = Counter(request[column] for request in asked)
        assert len(shares) == count
        assert max(shares.values()) - min(shares.values()) <= 1
    made = scale.models(size, 2000)
    assert set(made) == {request[1] for request in asked}
    assert all(entry["max_batch_size"] * size.workers >= size.streams for entry in made.values())


def test_growth_is_judged_between_sizes_that_differ_in_streams() -> None:
    def figures(cpu: float) -> scale.Figures:
        return scale.Figures(cpu, 2 * cpu, 3 * cpu, 2000.0)

    found = {scale.REFERENCE: [figures(1e-4), figures(2e-4)], scale.MIDDLE: [figures(1.3e-4), figures(2.6e-4)]}
    memory = {scale.MIDDLE: [scale.MemoryFigures(40_000.0, 8000.0), scale.MemoryFigures(40_000.0, 9000.0)]}
    results = {result.name: result for result in scale.results_of(found, memory)}
    growth = results["1,000 streams over 10: CPU of a token"]
    assert growth.value == pytest.approx(1.3)
    assert growth.meets is False
    assert results[f"{scale.MIDDLE}: memory of a stream"].meets is False, "the worst round counts"
    assert scale.REFERENCE.workers == scale.MIDDLE.workers


def test_tenths_of_a_long_run() -> None:
    samples = [(0.1 * i, float(i // 100)) for i in range(1000)]
    assert soak.medians(samples, 100.0) == [float(part) for part in range(10)]
    with pytest.raises(ValueError, match="nothing was measured in part 2 of 10"):
        soak.medians([sample for sample in samples if not 10 <= sample[0] < 20], 100.0)
    assert soak.an_hour([(float(i), 5 + i / 360) for i in range(100)], 100.0) == pytest.approx(10.0)


def test_requests_that_ended_otherwise_are_counted() -> None:
    reported = {"short": {"as it ought to": 5, "with another answer": 1}, "bad": {"left out": 2, "overloaded: x": 3}}
    assert [result.value for result in soak.counted(reported)] == [5, 4, 2]
    assert soak.counted(reported)[1].meets is False
