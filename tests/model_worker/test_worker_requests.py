"""The worker's loop handles conversations, queries, defaults and limits correctly."""

from struct import pack
from typing import Any

import pytest

from model_worker.intake import not_offered
from model_worker.loop import RENDERING_WAIT_MS
from protocol.codec import pack_body
from protocol.messages import TERMINAL, Ask, CancelJob, EventFlag, JobMessage
from tests.deterministic_engine import OFFERED, DeterministicEngine, answer
from tests.model_worker.test_hostile_templates import EITHER
from tests.model_worker.test_worker_loop import ScriptedLink, engine, job, remembering, run


def chat(channel: int, request: int, content: str = "hi", **fields: Any) -> JobMessage:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
    return JobMessage(channel, request, {}, pack_body(body))


def ended(*requests: tuple[int, int]) -> Any:
    """Return whether these requests have ended."""

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


def test_steps_go_on_while_a_conversation_is_rendered_and_others_overtake_it() -> None:
    stepped = engine(template=EITHER, step_s=0.002, context=2000)
    turns = [[job(1, 1, "stream", max_tokens=1000), chat(1, 2, "loop")], [], [chat(2, 1, "fine")]]
    link = run(ScriptedLink(*turns, done=ended((1, 1), (1, 2), (2, 1))), stepped)
    ends = [(channel, entry.request) for channel, entry, _, _ in link.events if entry.flags & TERMINAL]
    assert ends.index((2, 1)) < ends.index((1, 2)), "who came later is served first"
    assert text_of(link, 1, 1) == answer("stream", 1000)
    assert text_of(link, 2, 1) == answer("fine", 4)
    ((entry, report),) = link.of(1, 2)
    assert (entry.seq, entry.flags, report["delivered_tokens"]) == (0, EventFlag.ERROR, 0)
    assert (report["error"]["name"], report["error"]["field"]) == ("invalid_request", "messages")
    assert "takes longer than 1 s" in report["error"]["message"]
    refused = next(i for i, (channel, entry, _, _) in enumerate(link.events) if (channel, entry.request) == (1, 2))
    streamed = sum((channel, entry.request) == (1, 1) for channel, entry, _, _ in link.events[:refused])
    assert streamed > 100, "the rendering takes a second of processor time, a step of the stream 2 ms"


def test_a_chat_is_cancelled_while_it_is_rendered() -> None:
    held = engine(template=EITHER)
    link = run(
        ScriptedLink([chat(1, 1, "loop")], [], [CancelJob(1, 1)], [CancelJob(1, 1)], [], done=ended((1, 1))), held
    )
    ((entry, report),) = link.of(1, 1)
    assert (entry.seq, entry.flags, report["finish_reason"]) == (0, EventFlag.FINISHED, "cancelled")
    assert report["usage"] == {"prompt_tokens": 0, "completion_tokens": 0}
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
    ((_, report),) = link.of(1, 1)
    assert report["error"]["field"] == "messages"
    assert "has no chat template" in report["error"]["message"]
    assert link.of(1, 2)[-1][1]["finish_reason"] == "length"


def test_a_conversation_that_cannot_fit_is_refused_before_and_after_it_is_rendered() -> None:
    long = engine(template="{{ messages[0].content * 1000 }}")
    link = run(ScriptedLink([chat(1, 1, "x" * 2000), chat(1, 2, "xxx")], done=ended((1, 1), (1, 2))), long)
    for request, message in ((1, "the messages have 2000 bytes: at most 1024 can fit"), (2, "more than 1024 bytes")):
        ((_, report),) = link.of(1, request)
        assert (report["error"]["name"], report["error"]["field"]) == ("context_overflow", "messages")
        assert message in report["error"]["message"]


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
    assert link.answers[1] == {"result": {"token_ids": pack("<2I", 97, 98), "count": 2, "context": 64}}
    assert link.answers[2] == {"result": {"token_ids": pack("<8I", *b"user: hi"), "count": 8, "context": 64}}
    assert link.answers[3] == {"result": {"text": "ab"}}
    assert link.answers[4] == {"result": {"token_ids": b"", "count": 0, "context": 64}}
    assert link.answers[5] == {"result": {"text": ""}}
    assert not link.events


def test_tools_count_as_tokens() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    (report,) = asked(
        ask(1, "tokenize", messages=[{"role": "user", "content": "x"}], tools=[tool]),
        of=engine(template="{{ tools[0].function.name }}"),
    ).answers.values()
    assert report["result"]["token_ids"] == pack("<4I", *b"look")


@pytest.mark.parametrize(
    ("verb", "params", "field", "name", "message"),
    [
        ("judge", {}, "verb", "unsupported", "tokenize, detokenize, chat_template only"),
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
    (report,) = asked(ask(7, verb, **params), of=engine(template=EITHER)).answers.values()
    assert (report["error"].get("field"), report["error"]["name"]) == (field, name)
    assert message in report["error"]["message"]


def test_a_question_that_is_no_map_is_answered() -> None:
    link = asked(Ask(1, "tokenize", b"\xc1"), Ask(2, "detokenize", b""))
    assert [report["error"]["name"] for report in link.answers.values()] == ["invalid_request"] * 2


# the model's defaults and limits


def test_defaults_reach_the_engine_and_give_way_to_fields() -> None:
    reported = remembering()
    sampling = {"preset": "steady", "temperature": 0.5, "stop": ["x"]}
    run(ScriptedLink([job(1, 1), job(1, 2, temperature=0, preset="none")], [], []), reported, sampling=sampling)
    plain, given = (one.sampling for one in reported.seen)
    assert (plain.temperature, plain.repetition_penalty, plain.frequency_penalty) == (0.5, 1.11, 0.03)
    assert (given.temperature, given.repetition_penalty, given.frequency_penalty) == (0, 1, 0)
    assert [one.stop for one in reported.seen] == [("x",), ("x",)]


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
        ({"max_tokens": 700, "cut_to_context": True}, {}, 62),
        ({"max_tokens": 8, "cut_to_context": True}, {}, 8),
    ],
)
def test_most_tokens_of_an_answer(fields: dict[str, Any], model: dict[str, Any], new: int) -> None:
    reported = remembering()
    run(ScriptedLink([job(1, 1, **{"max_tokens": None, **fields})], []), reported, **model)
    assert [one.max_new_tokens for one in reported.seen] == [new]


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
    ((_, report),) = link.of(1, 1)
    assert (report["error"]["field"], report["error"]["name"]) == (field, "invalid_request")
    assert message in report["error"]["message"]


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
