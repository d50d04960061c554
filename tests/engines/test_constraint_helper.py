"""When the process that tries constraints is stopped or killed from outside, innocent requests are not refused for it,
and nothing about them is remembered. These tests use real processes and signals."""

import json
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

import model_worker.engines.constraint_compiler as helping
from model_worker.engines.constraints import Constraint, Constraints
from protocol.errors import ErrorCode, WireError
from tests.engines.test_constraints import END, LETTERS, VOCAB, a_job, outcome, push_text
from tests.meddling import Meddler
from tests.serving import WITHIN, is_alive, is_helper, wait_until

PHRASE = ("regex", "(cow|pig) ate")
COSTLY = ("json_schema", json.dumps({"type": "integer", "multipleOf": 1_000_003}))
"""A constraint that takes minutes to compile."""


@pytest.fixture
def constraints() -> Iterator[Constraints]:
    assert LETTERS is not None
    made = Constraints(LETTERS, VOCAB, [END])
    yield made
    made.close()
    assert not helpers()


def helpers() -> list[psutil.Process]:
    """Return the processes that this process has started to try constraints."""
    children = psutil.Process().children()
    return [p for p in children if is_alive(p) and is_helper(p, "constraint child", "constraint_child")]


def answered(constraints: Constraints, constraint: tuple[str, str]) -> Constraint | WireError:
    return outcome(constraints, a_job(constraint))


def test_the_helper_can_be_started_before_the_first_constraint(constraints: Constraints) -> None:
    assert not helpers()
    constraints.begin()
    (helper,) = wait_until(helpers)
    assert isinstance(answered(constraints, PHRASE), Constraint)
    assert helpers() == [helper]


def test_a_helper_that_is_stopped_costs_nobody_a_request(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(constraints, ("regex", "warm"))
    (helper,) = helpers()
    helper.suspend()
    monkeypatch.setattr(helping, "LEASE_S", 3.0)
    assert isinstance(answered(constraints, PHRASE), Constraint), "another process tries it"
    assert not is_alive(helper)
    assert isinstance(answered(constraints, PHRASE), Constraint)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_helper_that_does_not_come_to_start_costs_nobody_a_request(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    if number == signal.SIGSTOP:
        monkeypatch.setattr(helping, "START_S", 10.0)
    with Meddler(helpers, number, most=1) as meddler:
        assert isinstance(answered(constraints, PHRASE), Constraint), "another process tries it"
    assert len(meddler.met) == 1


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_without_a_helper_a_request_is_asked_to_be_sent_again_and_nothing_is_remembered(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    with monkeypatch.context() as patched, Meddler(helpers, number, most=99) as meddler:
        # The test must stop the helper before this time is over, even if the helper starts slowly on a busy machine.
        patched.setattr(helping, "START_S", 5.0 if number == signal.SIGSTOP else 60.0)
        patched.setattr(helping, "LEASE_S", 1.0)
        error = answered(constraints, PHRASE)
    assert len(meddler.met) == 2, "it is tried once more, and not for ever"
    assert isinstance(error, WireError)
    assert (error.code, error.retryable) == (ErrorCode.HELPER_FAILED, True)
    assert error.to_wire()["name"] == "helper_failed"
    assert "cow" not in error.message
    assert isinstance(answered(constraints, PHRASE), Constraint), "the same request is served afterwards"


def test_a_trial_that_is_killed_is_tried_once_more(constraints: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The constraint is finally refused for taking more than a second, and not for the kill."""
    monkeypatch.setattr(helping, "LEASE_S", WITHIN)  # on a busy machine a second of computing takes long
    answered(constraints, ("regex", "warm"))
    (helper,) = helpers()
    with Meddler(helper.children, signal.SIGKILL, most=1) as meddler:
        error = answered(constraints, COSTLY)
    assert isinstance(error, WireError)
    assert len(meddler.met) == 1
    assert error.code == ErrorCode.INVALID_REQUEST
    assert "takes more than a second" in error.message
    assert helpers() == [helper], "nobody else's trial is disturbed"
    with Meddler(helper.children, signal.SIGKILL, most=99) as meddler:
        assert str(answered(constraints, COSTLY)) == str(error), "it is remembered, and not tried again"
    assert not meddler.met


@pytest.mark.long
def test_a_costly_constraint_costs_its_second_once_and_no_process_is_started_again(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helping, "LEASE_S", WITHIN)
    answered(constraints, ("regex", "warm"))
    (helper,) = helpers()
    for number in range(3):
        costly = ("json_schema", json.dumps({"type": "integer", "multipleOf": 1_000_003 + number}))
        error = answered(constraints, costly)
        assert isinstance(error, WireError)
        assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "json_schema")
        assert helpers() == [helper]
    constraint = answered(constraints, PHRASE)
    assert isinstance(constraint, Constraint)
    push_text(constraint, "pig ate")


def test_a_helper_that_is_killed_while_idle_is_replaced(constraints: Constraints) -> None:
    answered(constraints, ("regex", "warm"))
    (helper,) = helpers()
    os.kill(helper.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(helper), what="its end")
    assert isinstance(answered(constraints, PHRASE), Constraint)
