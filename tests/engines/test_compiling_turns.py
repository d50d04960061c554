"""Constraints are compiled in a fair order.

These tests stop the process that tries constraints until all constraints are asked for, so that the order is certain.
"""

import json
from collections.abc import Iterator

import psutil
import pytest

import model_worker.engines.constraint_compiler as helping
from model_worker.engines.constraint_compiler import MOST_AHEAD, ConstraintCompiler, Turns
from model_worker.engines.constraints import Constraint, Constraints
from protocol.errors import ErrorCode, WireError
from tests.engines.test_constraint_helper import answered, helpers
from tests.engines.test_constraints import END, LETTERS, VOCAB, a_job
from tests.serving import WITHIN, wait_until


@pytest.fixture
def constraints(monkeypatch: pytest.MonkeyPatch) -> Iterator[Constraints]:
    monkeypatch.setattr(helping, "LEASE_S", WITHIN)
    assert LETTERS is not None
    made = Constraints(LETTERS, VOCAB, [END])
    answered(made, ("regex", "warm"))
    yield made
    for helper in helpers():
        helper.resume()
    made.close()
    assert not helpers()


def stop() -> psutil.Process:
    """Stop the helper process, and return it."""
    (helper,) = helpers()
    helper.suspend()
    return helper


def costly(number: int) -> tuple[str, str]:
    """Return a schema that takes about 0.1 s to compile and is not refused."""
    return "json_schema", json.dumps({"enum": [{"a": [n, number]} for n in range(1000)]})


class Ahead:
    """Constraints that are compiled ahead of their jobs, and the order in which they are done."""

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints
        self.seconds: dict[int, float] = {}

    def ask(self, job: int, party: int, constraint: tuple[str, str]) -> None:
        self.constraints.compile_ahead(job, party, *constraint)

    def wait(self, count: int) -> list[int]:
        """Wait until ``count`` constraints are compiled. Return their jobs in the order of completion."""

        def look() -> bool:
            for job, seconds in self.constraints.compiled_ahead():
                assert job not in self.seconds
                self.seconds[job] = seconds
            return len(self.seconds) >= count

        wait_until(look, what=f"{count} compilations")
        return list(self.seconds)


def test_parties_take_turns() -> None:
    turns: Turns[str] = Turns()
    for task in ("a1", "a2", "a3"):
        turns.put(1, task)
    assert turns.take() == (1, "a1")
    turns.put(2, "b1")
    turns.put(2, "b2")
    turns.put(3, "c1")
    assert turns.take({1}) == (2, "b1"), "who is held is left out"
    assert [turns.take() for _ in range(5)] == [(3, "c1"), (1, "a2"), (2, "b2"), (1, "a3"), None]


def test_a_known_constraint_does_not_wait_behind_unknown_ones(constraints: Constraints) -> None:
    known = costly(0)
    assert isinstance(answered(constraints, known), Constraint)
    helper = stop()
    ahead = Ahead(constraints)
    for number in range(10, 20):
        ahead.ask(number, 1, ("regex", f"unknown{number}"))
    for constraint in (("regex", "warm"), known):
        assert isinstance(answered(constraints, constraint), Constraint)
        ahead.ask(100, 1, constraint)
        assert ahead.wait(1) == [100]
        constraints.forget(100)
        ahead.seconds.clear()
    assert helper.status() == psutil.STATUS_STOPPED, "and none of the unknown ones has been tried"
    helper.resume()
    assert sorted(ahead.wait(10)) == list(range(10, 20))


@pytest.fixture
def tried(constraints: Constraints, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list in which the texts of tried constraints are collected, in order."""
    texts: list[str] = []
    attempt = helping.ConstraintHelper.attempt

    def noted(helper: helping.ConstraintHelper, kind: str, text: str) -> tuple[float, WireError | None]:
        texts.append(text)
        return attempt(helper, kind, text)

    monkeypatch.setattr(helping.ConstraintHelper, "attempt", noted)
    return texts


def test_connections_take_turns_in_trials(constraints: Constraints, tried: list[str]) -> None:
    helper = stop()
    ahead = Ahead(constraints)
    for number in range(8):
        ahead.ask(number, 1, ("regex", f"many{number}"))
    ahead.ask(100, 2, ("regex", "one"))
    ahead.ask(101, 3, ("regex", "many7"))  # party 1 asked for it too, but party 3 need not wait for party 1's turn
    helper.resume()
    ahead.wait(10)
    assert tried == ["many0", "one", "many7", *(f"many{number}" for number in range(1, 7))]
    assert isinstance(answered(constraints, ("regex", "one")), Constraint)


def test_one_constraint_is_tried_once_for_all_who_ask(constraints: Constraints, tried: list[str]) -> None:
    helper = stop()
    ahead = Ahead(constraints)
    for number in range(6):
        ahead.ask(number, number % 3, ("regex", "shared+"))
    helper.resume()
    ahead.wait(6)
    assert tried == ["shared+"]
    assert sum(seconds > 0 for seconds in ahead.seconds.values()) == 1, "one of them pays"


def test_what_was_compiled_ahead_is_not_compiled_again(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job(costly(1))
    assert not constraints.is_at_hand(*costly(1))
    ahead = Ahead(constraints)
    ahead.ask(job.id, 1, costly(1))
    ahead.wait(1)
    assert ahead.seconds[job.id] > 0.02, "the trial, and the compilation"

    def not_again(*_: object) -> None:
        raise AssertionError("it is compiled again")

    monkeypatch.setattr(ConstraintCompiler, "_matcher", not_again)
    constraints.add(job)
    ((done, constraint),) = constraints.ready(WITHIN)
    assert done is job
    assert constraint().position == 0
    assert not constraints.is_at_hand(*costly(1)), "the next job of a costly one is compiled ahead, too"


def test_a_party_has_few_costly_constraints_compiled_ahead(constraints: Constraints) -> None:
    """Compiled constraints take memory while their jobs wait for slots. Other parties do not wait for that limit."""
    ahead = Ahead(constraints)
    for number in range(MOST_AHEAD + 2):
        ahead.ask(number, 1, costly(100 + number))
    for number in range(MOST_AHEAD):
        ahead.ask(100 + number, 2, costly(200 + number))
    done = ahead.wait(2 * MOST_AHEAD)
    assert sorted(done) == [*range(MOST_AHEAD), *range(100, 100 + MOST_AHEAD)]
    constraints.forget(0)
    ahead.wait(2 * MOST_AHEAD + 1)
    for job in list(ahead.seconds):
        constraints.forget(job)
    ahead.wait(2 * MOST_AHEAD + 2)


def test_what_is_forgotten_before_its_trial_costs_nothing(constraints: Constraints) -> None:
    helper = stop()
    ahead = Ahead(constraints)
    ahead.ask(1, 1, ("regex", "begun"))
    wait_until(lambda: constraints._ahead[1].future.running(), what="its trial")
    ahead.ask(2, 1, ("regex", "not begun"))
    assert constraints.forget(1), "what has begun goes on, and is told"
    assert not constraints.forget(2)
    helper.resume()
    assert ahead.wait(1) == [1]
    assert not constraints._ahead
    assert not constraints.descriptors
    assert not constraints.is_at_hand("regex", "not begun")


def test_a_failure_of_the_helper_is_told_to_the_job_that_comes_for_its_constraint(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise WireError(ErrorCode.HELPER_FAILED, "stood still")

    job = a_job(("regex", "unlucky"))
    ahead = Ahead(constraints)
    with monkeypatch.context() as patched:
        patched.setattr(helping.ConstraintHelper, "attempt", fails)
        ahead.ask(job.id, 1, ("regex", "unlucky"))
        ahead.wait(1)
    error = answered(constraints, ("regex", "unlucky"))
    assert isinstance(error, WireError)
    assert error.code is ErrorCode.HELPER_FAILED
    assert isinstance(answered(constraints, ("regex", "unlucky")), Constraint), "it is not remembered"
