"""What the worker's loop makes of conversations, questions, defaults and limits, and of answers begun elsewhere."""

import time
from struct import pack
from typing import Any

import pytest

from model_worker.engine import EngineEvent, Finished
from model_worker.intake import not_offered
from model_worker.loop import RENDERING_WAIT_MS
from protocol.codec import pack_body
from protocol.messages import TERMINAL, Ask, CancelJob, EventFlag, JobMessage, Message
from tests.deterministic_engine import OFFERED, DeterministicEngine, answer
from tests.supervisor.test_templates import EITHER
from tests.supervisor.test_worker_loop import ScriptedLink, engine, job, remembering, run


def chat(channel: int, request: int, content: str = "hi", **fields: Any) -> JobMessage:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
    return JobMessage(channel, request, {}, pack_body(body))


def ended(*requests: tuple[int, int]) -> Any:
    """Whether these requests have ended."""

    def done(link: ScriptedLink) -> bool:
        return all(any(entry.flags & TERMINAL for entry, _ in link.of(*request)) for request in requests)

    return done


def text_of(link: ScriptedLink, channel: int, request: int) -> str:
    return "".join(fields.get("text", "") for _, fields in link.of(channel, request))


# conversations


def test_a_chat_is_rendered_and_answered() -> None:
    link = run(ScriptedLink([chat(1, 1)], done=ended((1, 1))))
    assert text_of(link, 1, 1) == answer("user: hi", 4)
    entries = [entry for entry, _ in link.of(1, 1)]
    assert [entry.seq for entry in entries] == list(range(4))
    assert link.of(1, 1)[-1][1]["usage"] == {"prompt_tokens": 8, "completion_tokens": 4}


class Steps(DeterministicEngine):
    """Remembers when it was stepped."""

    longest = 0.0
    last: float | None = None

    def step(self) -> list[EngineEvent]:
        now = time.monotonic()
        if self.jobs and self.last is not None:
            self.longest = max(self.longest, now - self.last)
        self.last = now
        return super().step()


def test_steps_go_on_while_a_conversation_is_rendered_and_others_overtake_it() -> None:
    stepped = Steps(engine(template=EITHER, step_s=0.002, context=2000).spec)
    turns = [[job(1, 1, "stream", max_tokens=1000), chat(1, 2, "loop")], [], [chat(2, 1, "fine")]]
    link = run(ScriptedLink(*turns, done=ended((1, 1), (1, 2), (2, 1))), stepped)
    ends = [(channel, entry.request) for channel, entry, _, _ in link.events if entry.flags & TERMINAL]
    assert ends.index((2, 1)) < ends.index((1, 2)), "who came later is served first"
    assert text_of(link, 1, 1) == answer("stream", 1000)
    assert text_of(link, 2, 1) == answer("fine", 4)
    ((entry, told),) = link.of(1, 2)
    assert (entry.seq, entry.flags, told["delivered_tokens"]) == (0, EventFlag.ERROR, 0)
    assert (told["error"]["name"], told["error"]["field"]) == ("invalid_request", "messages")
    assert "takes longer than 1 s" in told["error"]["message"]
    assert stepped.longest < 0.5


def test_a_chat_is_cancelled_while_it_is_rendered() -> None:
    held = engine(template=EITHER)
    link = run(
        ScriptedLink([chat(1, 1, "loop")], [], [CancelJob(1, 1)], [CancelJob(1, 1)], [], done=ended((1, 1))), held
    )
    ((entry, told),) = link.of(1, 1)
    assert (entry.seq, entry.flags, told["finish_reason"]) == (0, EventFlag.FINISHED, "cancelled")
    assert told["usage"] == {"prompt_tokens": 0, "completion_tokens": 0}
    assert not held.jobs
    assert not held.pending
    assert link.statistics[-1]["pending"] == 0


def test_the_loop_waits_for_a_rendered_text_and_for_nothing_else() -> None:
    link = run(ScriptedLink([chat(1, 1)], done=ended((1, 1))))
    rendering = link.waits[1 : link.waits.index(0)]
    assert rendering == [RENDERING_WAIT_MS] * len(rendering)
    assert link.waits.count(0) == 3, "then it steps"


class NoTemplate(DeterministicEngine):
    chat_template = None


def test_a_model_without_a_template_says_so() -> None:
    link = run(ScriptedLink([chat(1, 1), job(1, 2)], done=ended((1, 1), (1, 2))), NoTemplate(engine().spec))
    ((_, told),) = link.of(1, 1)
    assert told["error"]["field"] == "messages"
    assert "has no chat template" in told["error"]["message"]
    assert link.of(1, 2)[-1][1]["finish_reason"] == "length"


def test_a_conversation_that_cannot_fit_is_refused_before_and_after_it_is_rendered() -> None:
    long = engine(template="{{ messages[0].content * 1000 }}")
    link = run(ScriptedLink([chat(1, 1, "x" * 2000), chat(1, 2, "xxx")], done=ended((1, 1), (1, 2))), long)
    for request, message in ((1, "the messages have 2000 bytes: at most 1024 can fit"), (2, "more than 1024 bytes")):
        ((_, told),) = link.of(1, request)
        assert (told["error"]["name"], told["error"]["field"]) == ("context_overflow", "messages")
        assert message in told["error"]["message"]


# questions


def ask(number: int, verb: str, **params: Any) -> Ask:
    return Ask(number, verb, pack_body(params))


def asked(*questions: Ask, of: DeterministicEngine | None = None) -> ScriptedLink:
    return run(ScriptedLink(list(questions), done=lambda link: len(link.answers) == len(questions)), of)


def test_a_text_and_a_conversation_are_tokenized_and_ids_are_read() -> None:
    link = asked(
        ask(1, "tokenize", prompt="ab"),
        ask(2, "tokenize", messages=[{"role": "user", "content": "hi"}]),
        ask(3, "detokenize", token_ids=pack("<2I", 97, 98)),
        ask(4, "tokenize", prompt=""),
        ask(5, "detokenize", token_ids=b""),
    )
    assert link.answers[1] == {"result": {"token_ids": pack("<2I", 97, 98), "count": 2}}
    assert link.answers[2] == {"result": {"token_ids": pack("<8I", *b"user: hi"), "count": 8}}
    assert link.answers[3] == {"result": {"text": "ab"}}
    assert link.answers[4] == {"result": {"token_ids": b"", "count": 0}}
    assert link.answers[5] == {"result": {"text": ""}}
    assert not link.events


def test_tools_count_as_tokens() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    (told,) = asked(
        ask(1, "tokenize", messages=[{"role": "user", "content": "x"}], tools=[tool]),
        of=engine(template="{{ tools[0].function.name }}"),
    ).answers.values()
    assert told["result"]["token_ids"] == pack("<4I", *b"look")


@pytest.mark.parametrize(
    ("verb", "params", "field", "name", "message"),
    [
        ("judge", {}, "verb", "unsupported", "tokenize and detokenize only"),
        ("tokenize", {}, None, "invalid_request", "give exactly one of prompt and messages"),
        ("tokenize", {"prompt": 5}, "prompt", "invalid_request", "must be a string"),
        ("tokenize", {"promt": "x"}, "promt", "invalid_request", "did you mean 'prompt'?"),
        ("tokenize", {"prompt": "x", "tools": [{}]}, "tools", "invalid_request", "needs messages"),
        ("tokenize", {"prompt": "x" * 1025}, "prompt", "context_overflow", "has 1025 bytes: at most 1024"),
        (
            "tokenize",
            {"messages": [{"role": "user", "content": "loop"}]},
            "messages",
            "invalid_request",
            "takes longer",
        ),
        ("tokenize", {"messages": []}, "messages", "invalid_request", "at least 1 long"),
        ("detokenize", {}, "token_ids", "invalid_request", "token_ids is missing"),
        ("detokenize", {"token_ids": b"abc"}, "token_ids", "invalid_request", "has 3 bytes: must be ids of 4 bytes"),
        ("detokenize", {"token_ids": [1]}, "token_ids", "invalid_request", "must be a bin of token ids"),
        ("detokenize", {"token_ids": pack("<I", 256)}, "token_ids", "invalid_request", "256 is not in the vocabulary"),
        ("detokenize", {"token_ids": bytes(65 * 4)}, "token_ids", "context_overflow", "has 65 tokens: at most 64"),
    ],
)
def test_a_bad_question_is_told_what_is_wrong(
    verb: str, params: dict[str, Any], field: str | None, name: str, message: str
) -> None:
    (told,) = asked(ask(7, verb, **params), of=engine(template=EITHER)).answers.values()
    assert (told["error"].get("field"), told["error"]["name"]) == (field, name)
    assert message in told["error"]["message"]


def test_a_question_that_is_no_map_is_answered() -> None:
    link = asked(Ask(1, "tokenize", b"\xc1"), Ask(2, "detokenize", b""))
    assert [told["error"]["name"] for told in link.answers.values()] == ["invalid_request"] * 2


# the model's defaults and limits


def test_defaults_reach_the_engine_and_give_way_to_fields() -> None:
    told = remembering()
    sampling = {"preset": "steady", "temperature": 0.5, "stop": ["x"]}
    run(ScriptedLink([job(1, 1), job(1, 2, temperature=0, preset="none")], [], []), told, sampling=sampling)
    plain, given = (one.sampling for one in told.seen)
    assert (plain.temperature, plain.repetition_penalty, plain.frequency_penalty) == (0.5, 1.11, 0.03)
    assert (given.temperature, given.repetition_penalty, given.frequency_penalty) == (0, 1, 0)
    assert [one.stop for one in told.seen] == [("x",), ("x",)]


@pytest.mark.parametrize(
    ("fields", "model", "new"),
    [
        ({}, {}, 62),
        ({}, {"limits": {"max_tokens": 9}}, 9),
        ({}, {"limits": {"max_tokens": 900}}, 62),
        ({}, {"sampling": {"max_tokens": 7}}, 7),
        ({}, {"sampling": {"max_tokens": 7}, "limits": {"max_tokens": 9}}, 7),
        ({"max_tokens": 8}, {"sampling": {"max_tokens": 7}, "limits": {"max_tokens": 9}}, 8),
        ({}, {"sampling": {"max_tokens": 700}}, 62),
    ],
)
def test_max_tokens_unset_is_the_default_or_the_limit(fields: dict[str, Any], model: dict[str, Any], new: int) -> None:
    told = remembering()
    run(ScriptedLink([job(1, 1, **{"max_tokens": None, **fields})], []), told, **model)
    assert [one.max_new_tokens for one in told.seen] == [new]


@pytest.mark.parametrize(
    ("fields", "model", "field", "message"),
    [
        ({"max_tokens": 10}, {"limits": {"max_tokens": 9}}, "max_tokens", "is 10: this model allows at most 9"),
        ({"max_tokens": None, "min_tokens": 10}, {"limits": {"max_tokens": 9}}, "min_tokens", "at most 9 tokens"),
        (
            {"max_tokens": None, "min_tokens": 8},
            {"sampling": {"max_tokens": 7}},
            "min_tokens",
            "more than the 7 of",
        ),
        ({"prompt": "xxx"}, {"limits": {"prompt_tokens": 2}}, "prompt", "has 3 tokens: this model allows at most 2"),
        (
            {"prompt": None, "token_ids": bytes(12)},
            {"limits": {"prompt_tokens": 2}},
            "token_ids",
            "has 3 tokens: this model allows at most 2",
        ),
        (
            {"prompt": None, "messages": [{"role": "user", "content": ""}]},
            {"limits": {"prompt_tokens": 2}},
            "messages",
            "has 6 tokens: this model allows at most 2",
        ),
        ({"max_tokens": 4}, {"sampling": {"min_tokens": 5}}, "min_tokens", "(min_tokens by this model's defaults)"),
    ],
)
def test_beyond_a_limit_is_refused_by_name(
    fields: dict[str, Any], model: dict[str, Any], field: str, message: str
) -> None:
    link = run(ScriptedLink([job(1, 1, **fields)], done=ended((1, 1))), **model)
    ((_, told),) = link.of(1, 1)
    assert (told["error"]["field"], told["error"]["name"]) == (field, "invalid_request")
    assert message in told["error"]["message"]


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        ({}, None),
        ({"preset": "steady", "temperature": 0.5, "max_tokens": 5, "stop": ["x"]}, None),
        ({"cfg_scale": 1, "banned_tokens": []}, None),
        ({"cfg_scale": 2}, "cfg_scale"),
        ({"banned_strings": ["x"]}, "banned_strings"),
    ],
)
def test_defaults_that_an_engine_does_not_offer_are_found_before_any_request(
    sampling: dict[str, Any], name: str | None
) -> None:
    assert not_offered(sampling, OFFERED) == name
    if name is None and sampling.get("preset"):
        assert not_offered(sampling, OFFERED - {"frequency_penalty"}) == "frequency_penalty"


# answers that were begun in another worker


def resumed(request: int, delivered: str, carry: dict[str, Any] | None = None, **fields: Any) -> JobMessage:
    ids = pack(f"<{len(delivered)}I", *delivered.encode())
    body = pack_body({"prompt": "p", "max_tokens": 8, **fields})
    return JobMessage(1, request, {"seq": 3, "token_ids": ids, "resumes": 1, "queue_ms": 12.5, **(carry or {})}, body)


def test_an_answer_goes_on_where_it_stopped() -> None:
    whole = answer("p", 8)
    link = run(ScriptedLink([resumed(1, whole[:5])], done=ended((1, 1))))
    events = link.of(1, 1)
    assert [entry.seq for entry, _ in events] == [3, 4, 5]
    assert [entry.flags for entry, _ in events] == [0, 0, EventFlag.FINISHED], "its first tokens are not these"
    assert text_of(link, 1, 1) == whole[5:]
    last = events[-1][1]
    assert last["usage"] == {"prompt_tokens": 1, "completion_tokens": 8, "resumes": 1}
    assert last["timings"]["queue_ms"] == 12.5


def test_an_answer_whose_events_held_no_tokens_has_its_first_still_to_come() -> None:
    link = run(ScriptedLink([resumed(1, "")], done=ended((1, 1))))
    assert [entry.flags for entry, _ in link.of(1, 1)] == [EventFlag.FIRST, *[0] * 6, EventFlag.FINISHED]
    assert [entry.seq for entry, _ in link.of(1, 1)] == list(range(3, 11))


def test_a_chat_goes_on_and_is_cancelled_with_what_was_delivered_before() -> None:
    chat_body: dict[str, Any] = {"prompt": None, "messages": [{"role": "user", "content": "hi"}]}
    whole = answer("user: hi", 8)
    first, second = resumed(1, whole[:5], None, **chat_body), resumed(2, whole[:5], None, **chat_body)
    turns: list[list[Message]] = [[first], [second, CancelJob(1, 2)]]
    link = run(ScriptedLink(*turns, done=ended((1, 1), (1, 2))))
    assert text_of(link, 1, 1) == whole[5:]
    ((entry, told),) = link.of(1, 2)
    assert (entry.seq, told["finish_reason"]) == (3, "cancelled")
    assert told["usage"] == {"prompt_tokens": 0, "completion_tokens": 5, "resumes": 1}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"mirostat_mode": 2}, "mirostat"),
        ({"banned_strings": ["x"]}, "banned_strings"),
        ({"token_healing": True}, "token_healing"),
        ({"cfg_scale": 2.0}, "cfg_scale"),
    ],
)
def test_what_cannot_go_on_ends_with_what_was_delivered(fields: dict[str, Any], why: str) -> None:
    told_engine = remembering()
    link = run(ScriptedLink([resumed(1, "abc", **fields)], []), told_engine)
    ((entry, told),) = link.of(1, 1)
    assert (entry.seq, entry.flags, entry.tokens) == (3, EventFlag.ERROR, 0)
    assert (told["error"]["name"], told["error"]["retryable"]) == ("worker_died", True)
    assert f"an answer with {why} cannot go on" in told["error"]["message"]
    assert told["delivered_tokens"] == 3
    assert not told_engine.seen
    begun = run(ScriptedLink([resumed(1, "", {"seq": 0}, **fields)], []), remembering())
    assert not [f for _, f in begun.of(1, 1) if "worker_died" in str(f)], "nothing of it was delivered: it begins"


def test_what_is_resumed_reaches_the_engine() -> None:
    told = remembering()
    run(ScriptedLink([resumed(1, "abc")], []), told)
    assert [one.resumed_ids for one in told.seen] == [(97, 98, 99)]


class Timed(DeterministicEngine):
    """Says that a prompt took 0.25 s, and the tokens after it 0.5 s."""

    def step(self) -> list[EngineEvent]:
        ids = [97] * (8 - len(self.pending[0].resumed_ids))
        return [Finished(self.pending[0].id, ids, "a", "stop", 1, 8, prefill_s=0.25, decode_s=0.5)]


@pytest.mark.parametrize(("delivered", "rate"), [("", 14.0), ("abc", 8.0), ("abcdefg", None)])
def test_timings_are_of_what_was_drawn_here(delivered: str, rate: float | None) -> None:
    link = run(ScriptedLink([resumed(1, delivered)], []), Timed(engine().spec))
    expected: dict[str, float] = {"queue_ms": 12.5, "prefill_ms": 250.0, "decode_ms": 500.0}
    if rate is not None:
        expected["tokens_per_s"] = rate
    assert link.of(1, 1)[-1][1]["timings"] == expected


def test_one_that_is_cancelled_has_only_waited() -> None:
    link = run(ScriptedLink([resumed(1, "abc"), CancelJob(1, 1)], []))
    assert link.of(1, 1)[-1][1]["timings"] == {"queue_ms": 12.5}
