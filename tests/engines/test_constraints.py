"""Constraints allow and refuse the right tokens at a bounded cost. Tokens are drawn at random, without a model."""

import json
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import llguidance
import psutil
import pytest

from model_worker.engine import Job
from model_worker.engines.constraints import Constraint, Constraints
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.tokenizer import Tokenizer
from model_worker.text import Pieces
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.request import SamplingParams
from tests.engines.constraint_cases import HOSTILE, NOT_OFFERED, REGEXES, SCHEMAS
from tests.serving import is_helper
from tools.demo_models import directory

PATIENCE_S = 120.0
END = 2
TOKENIZER = Tokenizer(ModelDir(str(directory("letters"))))
LETTERS = TOKENIZER.pieces
assert LETTERS is not None
VOCAB = TOKENIZER.vocab_size


@pytest.fixture(scope="module")
def constraints() -> Iterator[Constraints]:
    assert LETTERS is not None
    made = Constraints(LETTERS, VOCAB, [END])
    yield made
    made.close()


def a_job(constraint: tuple[str, str], sampling: SamplingParams | None = None, **fields: Any) -> Job:
    return Job(1, (1,), 64, sampling or SamplingParams(), constraint=constraint, **fields)


def outcome(constraints: Constraints, job: Job) -> Constraint | WireError:
    constraints.add(job)
    deadline = time.monotonic() + PATIENCE_S
    while not (ready := constraints.ready(0.1)):
        assert time.monotonic() < deadline, "no constraint, and no refusal"
    assert len(constraints) == 0
    assert ready[0][0] is job
    try:
        return ready[0][1]()
    except WireError as e:
        return e


def compiled(constraints: Constraints, kind: str, text: str, **fields: Any) -> Constraint:
    found = outcome(constraints, a_job((kind, text), **fields))
    if isinstance(found, WireError):
        raise found
    return found


def refused(constraints: Constraints, kind: str, text: str, **fields: Any) -> RequestError:
    found = outcome(constraints, a_job((kind, text), **fields))
    assert isinstance(found, RequestError)
    return found


def random_answer(constraint: Constraint, rng: random.Random, most: int = 1000) -> list[int]:
    """Return random allowed ids up to an end. A long answer prefers tokens that close it, or it might never end."""
    ids: list[int] = []
    while not constraint.finished:
        allowed = constraint.allowed.nonzero()[0].tolist()
        assert allowed, f"no way on behind {TOKENIZER.decode(ids)!r}"
        token = rng.choice(allowed)
        if len(ids) > 60:
            closing = [i for i in allowed if i == END or TOKENIZER.decode([i]).strip() in tuple('"]}0')]
            token = rng.choice(closing or allowed)
        if token == END:
            assert constraint.accepting
            return ids
        constraint.push(token)
        ids.append(token)
        assert len(ids) < most
    return ids


def go_on(constraint: Constraint, tokens: list[int]) -> None:
    """Draw tokens until the constraint ends the answer."""
    rng = random.Random(0)
    while constraint.allowed.any():
        constraint.push(rng.choice(tokens))
        assert constraint.position < 200_000


def push_text(constraint: Constraint, text: str) -> None:
    for byte in text.encode():
        token = next(i for i in range(VOCAB) if TOKENIZER.token_bytes(i) == bytes([byte]))
        assert constraint.allowed[token], text
        constraint.push(token)


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_validate(constraints: Constraints, name: str) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    seen = set()
    for seed in range(12):
        constraint = compiled(constraints, "json_schema", json.dumps(schema))
        text = TOKENIZER.decode(random_answer(constraint, random.Random(seed)))
        try:
            validator.validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as e:
            raise AssertionError(f"seed {seed}: {text!r}") from e
        seen.add(text)
    assert len(seen) > 1 or name in ("constant", "nothing in it", "five levels"), seen


@pytest.mark.parametrize("regex", REGEXES)
def test_random_answers_match(constraints: Constraints, regex: str) -> None:
    for seed in range(20):
        constraint = compiled(constraints, "regex", regex)
        text = TOKENIZER.decode(random_answer(constraint, random.Random(seed)))
        assert re.fullmatch(regex, text, re.ASCII), f"seed {seed}: {text!r}"


def test_a_choice_is_one_of_them(constraints: Constraints) -> None:
    choices = ["yes", "yes, but", "no", "a/b", "[0-9]+", 'q"uo\\te', "line\nfeed\0\x7f", "é🦊"]
    text = json.dumps(choices)
    seen = {
        TOKENIZER.decode(random_answer(compiled(constraints, "choice", text), random.Random(seed)))
        for seed in range(200)
    }
    assert seen == set(choices)


@pytest.mark.parametrize(("named", "schema"), NOT_OFFERED, ids=[f"{n}-{i}" for i, (n, _) in enumerate(NOT_OFFERED)])
def test_what_is_not_offered_is_named(constraints: Constraints, named: str, schema: dict[str, Any]) -> None:
    error = refused(constraints, "json_schema", json.dumps(schema))
    assert named in error.message
    assert "offered" in error.message
    assert (error.field, error.code) == ("json_schema", ErrorCode.UNSUPPORTED)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", '{"type":"foo"}', "json_schema: Invalid type: foo"),
        ("json_schema", '{"minimum":"a secret"}', "json_schema: Expected f64 for 'minimum'"),
        ("json_schema", '{"type":"integer","minimum":5,"maximum":3}', "json_schema: nothing can match it"),
        ("json_schema", '{"enum":[]}', "json_schema: nothing can match it"),
        ("json_schema", '{"$ref":"#"}', "json_schema: nothing can match it"),
        ("json_schema", '{"$ref":"#/$defs/x"}', "json_schema: Pointer '/$defs/x' does not exist"),
        ("json_schema", '{"type":"string","pattern":"("}', "json_schema: unclosed group"),
        ("regex", "(", "regex: unclosed group"),
        ("regex", "a{2,1}", "regex: invalid repetition count range, the start must be <= the end"),
        ("regex", "[^\\x00-\\x{10FFFF}]", "regex: nothing can match it"),
        ("regex", "a\\bb", "regex: look-around (word boundaries and inner anchors are some) is not offered"),
        ("regex", "(a)\\1", "regex: backreferences are not offered"),
        ("regex", "(?x) a # b\nc", "regex: (?x) over several lines is not offered"),
        ("regex", "a\\", "regex: incomplete escape sequence: it ends with a backslash"),
    ],
)
def test_what_is_wrong_is_said_without_quoting(constraints: Constraints, kind: str, text: str, message: str) -> None:
    error = refused(constraints, kind, text)
    assert (error.message, error.field) == (message, kind)


@pytest.mark.parametrize(("kind", "what"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_constraint_is_refused_or_compiled(constraints: Constraints, kind: str, what: Any) -> None:
    """test_constraint_helper checks the cost of a refused constraint, and that it is paid only once."""
    job = a_job((kind, what if isinstance(what, str) else json.dumps(what)))
    found = outcome(constraints, job)
    if isinstance(found, WireError):
        assert (found.field, found.retryable) == (kind, False)
        assert str(outcome(constraints, job)) == str(found)
    compiled(constraints, "regex", "next")
    children = [p for p in psutil.Process().children() if is_helper(p, "constraint child", "constraint_child")]
    assert len(children) == 1


def test_compiling_leaves_the_interpreter_to_the_step_loop(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread ticks like a step loop. It keeps ticking while the worker's process computes 0.1 s of compiling."""
    ticks, over = 0, threading.Event()
    compilations: list[tuple[float, int]] = []  # (seconds of processor time, ticks during them)
    library = llguidance.LLMatcher

    def compile(*given: Any, **named: Any) -> llguidance.LLMatcher:
        seconds, before = time.thread_time(), ticks
        made = library(*given, **named)
        compilations.append((time.thread_time() - seconds, ticks - before))
        return made

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.001):  # each wait releases the interpreter's lock and takes it again
            ticks += 1

    monkeypatch.setattr(llguidance, "LLMatcher", compile)
    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        compiled(constraints, "json_schema", json.dumps({"enum": [{"a": [n] * 5} for n in range(1000)]}))
    finally:
        over.set()
        ticking.join()
    ((seconds, meanwhile),) = compilations
    assert seconds > 0.03, "long enough to tell"
    assert meanwhile > 1, "the lock was held"


def test_an_answer_ends_where_nothing_can_follow(constraints: Constraints) -> None:
    constraint = compiled(constraints, "json_schema", '{"type":"object","additionalProperties":false}')
    assert not constraint.accepting
    push_text(constraint, "{")
    assert not constraint.finished
    push_text(constraint, "}")
    assert constraint.finished
    assert constraint.allowed.nonzero()[0].tolist() == [END]


def test_an_end_is_allowed_where_the_answer_may_end(constraints: Constraints) -> None:
    constraint = compiled(constraints, "regex", "ab*", stop_token_ids=(7,))
    assert not constraint.allowed[[END, 7]].any()
    push_text(constraint, "ab")
    assert constraint.allowed[[END, 7]].all()
    assert constraint.accepting
    assert not constraint.finished


def test_going_back(constraints: Constraints) -> None:
    constraint = compiled(constraints, "regex", "abc?d")
    push_text(constraint, "ab")
    allowed = constraint.allowed
    push_text(constraint, "cd")
    assert constraint.finished
    assert constraint.position == 4
    constraint.back_to(2)
    assert (constraint.position, constraint.finished) == (2, False)
    assert (constraint.allowed == allowed).all()
    push_text(constraint, "d")
    assert constraint.finished
    constraint.back_to(0)
    push_text(constraint, "abcd")


def test_an_answer_goes_on_in_another_worker(constraints: Constraints) -> None:
    text = json.dumps(SCHEMAS["nested"])
    whole = random_answer(compiled(constraints, "json_schema", text), random.Random(3))
    for cut in range(1, len(whole)):
        resumed = compiled(constraints, "json_schema", text, resumed_ids=tuple(whole[:cut]))
        assert resumed.position == cut
        undisturbed = compiled(constraints, "json_schema", text)
        undisturbed.replay(whole[:cut])
        assert (resumed.allowed == undisturbed.allowed).all()
        assert resumed.allowed[whole[cut]]
    error = refused(constraints, "json_schema", text, resumed_ids=(whole[0], END))
    assert (error.message, error.field) == ("resumed_ids do not satisfy json_schema", "resumed_ids")


def test_two_answers_of_one_constraint_do_not_meet(constraints: Constraints) -> None:
    one, other = (compiled(constraints, "regex", "a|bc") for _ in range(2))
    push_text(one, "b")
    push_text(other, "a")
    assert other.finished
    push_text(one, "c")
    assert one.finished


def test_one_answer_that_is_too_long_does_not_end_others(constraints: Constraints) -> None:
    """Copies of a matcher would share one memory limit, so the engine makes no copies."""
    text = json.dumps({"type": "string", "maxLength": 10**6})
    others = [compiled(constraints, "json_schema", text)]
    long = compiled(constraints, "json_schema", text)
    push_text(long, '"')
    words = [i for i in long.allowed.nonzero()[0].tolist() if len(t := TOKENIZER.token_bytes(i)) > 2 and t.isalpha()]
    with pytest.raises(RequestError, match="json_schema has become too costly for the answer to go on"):
        go_on(long, words)
    others.append(compiled(constraints, "json_schema", text))
    for other in others:
        push_text(other, '"still served"')
        assert other.finished


def test_nothing_left_to_begin_with(constraints: Constraints) -> None:
    first = next(i for i in range(VOCAB) if TOKENIZER.token_bytes(i) == b"x")
    error = refused(constraints, "regex", "x+", sampling=SamplingParams(banned_tokens=(first,)))
    assert error.message == "banned_tokens: no token is left that regex can begin with"
    error = refused(constraints, "regex", "x+", sampling=SamplingParams(allowed_tokens=(first + 1,)))
    assert error.field == "allowed_tokens"
    compiled(constraints, "regex", "x+", sampling=SamplingParams(allowed_tokens=(first,)))


@pytest.mark.parametrize("text", ["a\nb", "a\0b", "a/b", "//", "é\u2028", "\x7f\t", "a\\/b", "\\\\"])
def test_any_text_may_stand_in_a_regex(constraints: Constraints, text: str) -> None:
    answer = TOKENIZER.decode(random_answer(compiled(constraints, "regex", text), random.Random(0)))
    assert re.fullmatch(text, answer)


def test_what_is_no_text(constraints: Constraints) -> None:
    with pytest.raises(RequestError, match="regex is not valid Unicode text"):
        constraints.add(a_job(("regex", "a\ud800")))
    assert refused(constraints, "choice", json.dumps(["a\ud800"])).field == "choice"
    assert refused(constraints, "regex", "a\\").field == "regex"


def test_healing_does_not_go_with_it(constraints: Constraints) -> None:
    with pytest.raises(RequestError, match="token_healing and regex are not offered together") as refusal:
        constraints.add(a_job(("regex", "a"), token_healing=True))
    assert refusal.value.field == "token_healing"
    assert len(constraints) == 0


def test_a_cancelled_job_is_forgotten(constraints: Constraints) -> None:
    constraints.add(a_job(("regex", "cancel+")))
    assert constraints.cancel(1)
    assert not constraints.cancel(1)
    assert constraints.ready() == []


def test_one_that_is_cancelled_before_its_trial_costs_the_others_nothing(constraints: Constraints) -> None:
    """Its future was asked twice whether it may begin. The second time raised, and ended the thread."""
    compiler = constraints._compiler
    compiler.compile("regex", "x[a-h]+", 3)  # the others wait behind its trial
    cancelled = compiler.compile("regex", "y[a-h]+", 1)
    other = compiler.compile("regex", "y[a-h]+", 2)
    assert cancelled.future.cancel()
    assert other.future.result(PATIENCE_S) is not None
    assert compiler.compile("regex", "y[a-h]+", 2).future.result(PATIENCE_S) is not None


def test_tokens_that_spell_the_same() -> None:
    """Vocabularies work with byte tokens that equal other texts, ids without a text, and more ids than texts."""
    pieces = Pieces(["a", b"a", None, "b", "ab", "</s>"], byte_runs=True)
    made = Constraints(pieces, 8, [5])
    try:
        constraint = compiled(made, "regex", "ab")
        assert constraint.allowed.tolist() == [True, True, False, False, True, False, False, False]
        constraint.push(1)
        assert constraint.allowed.nonzero()[0].tolist() == [3]
        constraint.push(3)
        assert constraint.finished
        assert constraint.allowed.nonzero()[0].tolist() == [5]
    finally:
        made.close()


def test_the_child_ends_with_its_owner() -> None:
    made = Constraints(Pieces(["a", "</s>"]), 2, [1])
    before = {p.pid for p in psutil.Process().children()}
    compiled(made, "regex", "a+")
    (child,) = [p for p in psutil.Process().children() if p.pid not in before]
    child.kill()
    deadline = time.monotonic() + PATIENCE_S
    while child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
    compiled(made, "regex", "a{2}")  # another child compiles it
    made.close()
    assert not {p.pid for p in psutil.Process().children()} - before
    descriptor = os.dup(0)  # reuses the number of a closed descriptor
    try:
        made.close()
        os.fstat(descriptor)
    finally:
        os.close(descriptor)
