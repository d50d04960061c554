"""Answers reason before their constraint begins, for as long as their budget allows, whatever the logits are."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from model_worker.engine import Engine, Layout
from model_worker.engines import build_engine
from protocol.messages import FinishReason
from protocol.request import SamplingParams
from tests.engines.conftest import ENGINES, demo_spec, need_gpu
from tests.engines.driver import Driver, Outcome, answer
from tests.engines.exllamav2_cpu.harness import Harness

PROMPT = "sort: d b a c ->"
START, END = "<think>", "</think>"
INSIDE = Layout(reasoning=(START, END), place="inside", waits=True)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 999}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = ("json_schema", json.dumps(PERSON))


@pytest.fixture(scope="module", params=[*ENGINES, "exllamav2 on the CPU", "queued ahead", "draft", "ngram"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param in ("transformers", "transformers-cuda", "exllamav2"):
        need_gpu(request.param)
        made: Any = build_engine(demo_spec(request.param, "letters"))
        made.load(lambda *_: None)
    else:
        speculate = request.param if request.param in ("draft", "ngram") else None
        ahead = request.param == "queued ahead"
        made = Harness(pages=32, context=2048, batch=8, speculate=speculate, queues_ahead=ahead)
        made = made.engine
    yield made
    made.close()


def asked(engine: Engine, seed: int, layout: Layout, size: int = 600, **fields: Any) -> Outcome:
    return answer(engine, PROMPT, size, SamplingParams(temperature=1.0, seed=seed), layout=layout, **fields)


def halves(outcome: Outcome) -> tuple[str, str]:
    """Return the reasoning and the rest of an answer's text."""
    reasoning, marker, rest = outcome.text.partition(END)
    assert marker, outcome.text
    return reasoning, rest


@pytest.mark.long
@pytest.mark.parametrize("budget", [0, 1, 7, 40])
def test_the_reasoning_ends_when_its_budget_is_used_up(engine: Engine, budget: int) -> None:
    for seed in range(3):
        told = asked(engine, seed, replace(INSIDE, budget=budget), size=200)
        if END not in told.text:  # the model has ended its answer before
            assert told.reason == FinishReason.STOP
            assert len(told.ids) <= budget
            continue
        reasoning, _ = halves(told)
        decoded = engine.decode(told.ids[:budget])
        assert reasoning.strip() == decoded.strip()


@pytest.mark.long
def test_the_constraint_begins_behind_the_reasoning(engine: Engine) -> None:
    for seed in range(4):
        told = asked(engine, seed, replace(INSIDE, budget=20), constraint=SCHEMA)
        assert told.reason == FinishReason.STOP, told.text
        reasoning, rest = halves(told)
        jsonschema.validate(json.loads(rest), PERSON)
        assert reasoning, "the model has reasoned without the constraint"


def test_an_answer_with_a_constraint_does_not_end_within_the_reasoning(engine: Engine) -> None:
    eos = sorted(engine._tokenizer.eos_ids)  # type: ignore[attr-defined]
    for seed in range(3):
        told = asked(engine, seed, replace(INSIDE, budget=30), constraint=SCHEMA, size=400)
        jsonschema.validate(json.loads(halves(told)[1]), PERSON)
        assert not set(told.ids[:-1]).intersection(eos)


def test_a_prompt_that_ends_before_or_behind_the_reasoning(engine: Engine) -> None:
    for place in ("before", "behind"):
        told = asked(engine, 3, replace(INSIDE, place=place, budget=15), constraint=SCHEMA)
        begun, _, rest = told.text.rpartition(END)
        assert place == "before" or not begun
        jsonschema.validate(json.loads(rest), PERSON)


@pytest.mark.long
def test_a_resumed_answer_goes_on_in_its_reasoning_or_behind_it(engine: Engine) -> None:
    layout = replace(INSIDE, budget=12)
    whole = asked(engine, 5, layout, constraint=SCHEMA)
    for kept in (1, 6, 11, 12, 13, 15, len(whole.ids) - 3):
        ids = tuple(whole.ids[:kept])
        again = asked(engine, 5, layout, constraint=SCHEMA, resumed_ids=ids)
        assert (*ids, *again.ids) == tuple(whole.ids), kept
        assert whole.text.endswith(again.text)


@pytest.mark.long
def test_answers_beside_one_that_waits(engine: Engine) -> None:
    """A row whose constraint wakes up is drawn again. The others are not."""
    driver = Driver(engine)
    plain = [driver.submit(PROMPT, 120, SamplingParams(temperature=1.0, seed=seed)) for seed in (11, 12)]
    gated = [
        driver.submit(
            PROMPT, 400, SamplingParams(temperature=1.0, seed=seed), constraint=SCHEMA,
            layout=replace(INSIDE, budget=budget),
        )
        for seed, budget in ((1, 3), (2, 9), (3, 30))
    ]  # fmt: skip
    driver.run()
    for told in gated:
        jsonschema.validate(json.loads(halves(told)[1]), PERSON)
    for seed, told in zip((11, 12), plain, strict=True):
        assert told.ids == answer(engine, PROMPT, 120, SamplingParams(temperature=1.0, seed=seed)).ids
