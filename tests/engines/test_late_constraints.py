"""An answer that needs its constraint later begins before the constraint is compiled. The constraint still binds it."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from model_worker.engine import Job, Layout
from model_worker.engines.constraints import MOST_LATE, Constraints
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.tokenizer import Tokenizer
from protocol.request import SamplingParams
from tests.serving import WITHIN
from tools.demo_models import directory

TOKENIZER = Tokenizer(ModelDir(str(directory("letters"))))
END = 2
CALLS = (
    "tools",
    json.dumps(
        {
            "format": "hermes",
            "tools": [{"name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}],
            "required": False,
            "parallel": True,
        }
    ),
)
THINK = ("<think>", "</think>")
LAYOUTS = {
    "in the reasoning": Layout(reasoning=THINK, place="inside", calls=("<tool_call>",), stops=True, waits=True),
    "before a possible reasoning": Layout(reasoning=THINK, place="before", calls=("<tool_call>",), waits=True),
    "in the text": Layout(calls=("<tool_call>",)),
}


@pytest.fixture
def constraints() -> Iterator[Constraints]:
    assert TOKENIZER.pieces is not None
    made = Constraints(TOKENIZER.pieces, TOKENIZER.vocab_size, [END], TOKENIZER)
    made.add(job(0, Layout()))  # makes the constraint known
    while not made.ready(0.1):
        pass
    yield made
    made._compiler._quick.hold(frozenset())
    made.close()


def job(number: int, layout: Layout, **fields: Any) -> Job:
    return Job(number, (1,), 64, SamplingParams(), constraint=CALLS, lazy=bool(layout.calls), layout=layout, **fields)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_job_starts_before_its_constraint_and_waits_for_it_at_the_call(
    constraints: Constraints, layout: Layout
) -> None:
    held = constraints._compiler._quick
    held.hold(frozenset({0}))
    constraints.add(job(1, layout))
    ((started, make),) = constraints.ready()
    constraint = make()
    assert started.id == 1
    for token in TOKENIZER.encode_rendered("so </think>" if layout.place == "inside" else "so "):
        assert constraint.allowed[token]
        constraint.push(token)
    release = threading.Timer(0.05, held.hold, [frozenset()])
    release.start()
    for token in TOKENIZER.encode_rendered('<tool_call>\n{"name": "f", "arguments": {'):
        assert constraint.allowed[token]
        constraint.push(token)
    release.join(WITHIN)
    (wrong,) = TOKENIZER.encode_rendered("x")
    assert not constraint.allowed[wrong]
    for token in TOKENIZER.encode_rendered("}}\n</tool_call>"):
        assert constraint.allowed[token]
        constraint.push(token)
    assert constraint.accepting


def test_a_job_that_needs_its_constraint_at_once_waits(constraints: Constraints) -> None:
    constraints._compiler._quick.hold(frozenset({0}))
    constraints.add(job(1, Layout()))
    constraints.add(job(2, LAYOUTS["in the text"], resumed_ids=(5,)))
    assert constraints.ready() == []


def test_few_jobs_start_without_their_constraints(constraints: Constraints) -> None:
    """A step may have to wait for all of them."""
    constraints._compiler._quick.hold(frozenset({0}))
    for number in range(MOST_LATE + 3):
        constraints.add(job(number, LAYOUTS["in the text"]))
    assert len(constraints.ready()) == MOST_LATE
    assert constraints.ready() == []
    constraints._compiler._quick.hold(frozenset())
    started = 0
    while started < 3:
        started += len(constraints.ready(WITHIN))
    assert len(constraints) == 0
