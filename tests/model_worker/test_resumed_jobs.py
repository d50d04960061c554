"""The worker's loop resumes answers of other workers with the state that their jobs carry."""

from struct import pack
from typing import Any

import pytest

from model_worker.engine import EngineEvent, Finished
from model_worker.loop import _timings
from protocol.codec import pack_body
from protocol.messages import CancelJob, EventFlag, JobMessage, Message
from tests.deterministic_engine import DeterministicEngine, answer
from tests.model_worker.test_worker_loop import ScriptedLink, engine, remembering, run
from tests.model_worker.test_worker_requests import ended, text_of


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
    ((entry, report),) = link.of(1, 2)
    assert (entry.seq, report["finish_reason"]) == (3, "cancelled")
    assert report["usage"] == {"prompt_tokens": 0, "completion_tokens": 5, "resumes": 1}


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
    ((entry, report),) = link.of(1, 1)
    assert (entry.seq, entry.flags, entry.tokens) == (3, EventFlag.ERROR, 0)
    assert (report["error"]["name"], report["error"]["retryable"]) == ("worker_died", True)
    assert f"an answer with {why} cannot go on" in report["error"]["message"]
    assert report["delivered_tokens"] == 3
    assert not told_engine.seen
    begun = run(ScriptedLink([resumed(1, "", {"seq": 0}, **fields)], []), remembering())
    assert not [f for _, f in begun.of(1, 1) if "worker_died" in str(f)], "nothing of it was delivered: it begins"


def test_what_is_resumed_reaches_the_engine() -> None:
    reported = remembering()
    run(ScriptedLink([resumed(1, "abc")], []), reported)
    assert [one.resumed_ids for one in reported.seen] == [(97, 98, 99)]


class Timed(DeterministicEngine):
    """An engine that reports 0.25 s for a prompt and 0.5 s for the tokens after it."""

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


def test_the_wait_for_a_place_in_the_batch_is_time_in_the_queue() -> None:
    finished = Finished(1, [97], "a", "stop", 1, 8, prefill_s=0.25, decode_s=0.5)
    assert _timings({"queue_ms": 5.0}, 8, finished, spent_s=2.75)["queue_ms"] == 2005.0
    assert _timings({"queue_ms": 5.0}, 8, finished, spent_s=0.7)["queue_ms"] == 5.0


def test_one_that_is_cancelled_has_only_waited() -> None:
    link = run(ScriptedLink([resumed(1, "abc"), CancelJob(1, 1)], []))
    assert link.of(1, 1)[-1][1]["timings"] == {"queue_ms": 12.5}
