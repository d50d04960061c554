"""The verb ``story`` tells what became of a request, and to whom it may be told."""

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from modelctl import Client
from protocol.errors import WireError
from tests.keyed import Keyed
from tests.serving import engine, wait_until

LONG = 100_000


@pytest.fixture(scope="module")
def keyed() -> Iterator[Keyed]:
    keys = {"one": "infer", "two": "infer", "viewer": "status"}
    models = {"m": engine(step_s=0.005, context=2 * LONG, max_batch_size=1), "lazy": engine(lazy=True)}
    with Keyed(models, keys) as keyed:
        yield keyed


def told(client: Client, name: str) -> dict[str, Any]:
    (story,) = client.story(name)["requests"]
    return dict(story)


def steps(story: dict[str, Any]) -> list[str]:
    return [step["step"] for step in story["steps"]]


def test_a_request_that_was_finished(keyed: Keyed) -> None:
    with keyed.client("one") as one, keyed.client("viewer") as viewer:
        one.complete("m", "secret words", max_tokens=5, trace_ids=["mine", "order 7"], priority="batch")
        story = told(viewer, "mine")
        assert story == told(viewer, "order 7") == told(viewer, story["id"]) | {"events": story["events"]}
        assert steps(story) == ["accepted", "placed", "first_token", "ended"]
        assert (story["key"], story["model"], story["priority"]) == ("one", "m", "batch")
        assert (story["state"], story["finish_reason"], story["error"]) == ("ended", "length", None)
        assert (story["prompt_tokens"], story["tokens"], story["resumes"]) == (12, 5, 0)
        assert story["steps"][0]["ready"] is True
        assert story["steps"][1]["worker"] == "m"
        assert story["steps"][1]["gpu"] == "cpu"
        times = [step["ms"] for step in story["steps"]]
        assert times == sorted(times)
        assert 0 <= story["queue_ms"] <= story["first_token_ms"] <= story["total_ms"]
        assert "secret" not in str(story)


def test_a_request_that_goes_on_after_the_death_of_its_worker_and_is_cancelled(keyed: Keyed) -> None:
    serving = keyed.serving
    with keyed.client("one") as one, keyed.client("viewer") as viewer:
        stream = one.generate("m", "goes on", max_tokens=LONG, trace_ids=["goes-on"])
        next(stream)
        waiting = one.generate("m", "waits", max_tokens=1, trace_ids=["waits"])
        assert told(viewer, "goes-on")["state"] == "running"
        os.kill(serving.worker("m").pid, signal.SIGKILL)
        # Not a loop over the stream: leaving it would cancel the request, perhaps before the second worker has it.
        wait_until(lambda: steps(told(viewer, "goes-on")).count("placed") > 1, what="a second worker")
        stream.cancel()
        stream.complete()
        waiting.complete()
        story = told(viewer, "goes-on")
        assert steps(story)[:2] == ["accepted", "placed"]
        assert steps(story)[-3:] == ["placed", "cancelled", "ended"]
        ended = next(step for step in story["steps"] if step["step"] == "worker_ended")
        assert "the worker process ended" in ended["reason"]
        assert story["finish_reason"] == "cancelled"
        assert story["resumes"] >= 1
        assert "death" in {event["kind"] for event in story["events"]}
        assert all(event["model"] == "m" for event in story["events"])
        with keyed.client("one") as same:
            assert told(same, "goes-on")["events"] == [], "events take the right status"


def test_a_request_whose_client_left_and_one_that_waited_for_a_load(keyed: Keyed) -> None:
    with keyed.client("viewer") as viewer:
        with keyed.client("one") as one:
            stream = one.generate("m", "leaves", max_tokens=LONG, trace_ids=["leaves"])
            next(stream)  # a stream that nobody keeps is cancelled, perhaps before the client leaves
        wait_until(lambda: told(viewer, "leaves")["finish_reason"] == "disconnected")
        with keyed.client("one") as one:
            one.complete("lazy", "p", max_tokens=1, trace_ids=["waited"])
        story = told(viewer, "waited")
        assert story["steps"][0]["ready"] is False
        assert any(re.search(r"lazy: ready, \d", event["message"]) for event in story["events"])


def test_an_error_has_its_name_and_nothing_of_the_request(keyed: Keyed) -> None:
    with keyed.client("one") as one:
        with pytest.raises(WireError, match="not offered"):
            one.complete("m", "p", regex="(secret", max_tokens=5, trace_ids=["fails"])
        story = told(one, "fails")
        assert story["state"] == "ended"
        assert story["error"] is not None
        assert story["finish_reason"] is None
        assert "secret" not in str(story)
        assert story["error_message"] == "regex was refused: the client was told why"
        with pytest.raises(WireError):
            one.complete("m", "secret", max_tokens=3 * LONG)
        told_of = one.ended_requests(limit=1)["requests"][0]
        assert (told_of["error"], "secret" in str(told_of)) == ("context_overflow", False)
        assert f"max_tokens is {3 * LONG}" in told_of["error_message"], "it has numbers only"


def test_ended_requests_are_listed_for_a_follower(keyed: Keyed) -> None:
    with keyed.client("one") as one, keyed.client("two") as two, keyed.client("viewer") as viewer:
        before = viewer.ended_requests(limit=1)
        one.complete("m", "secret words", max_tokens=5, trace_ids=["followed"])
        two.complete("m", "secret words", max_tokens=1)
        news = viewer.ended_requests(after=before["last"])
        assert (news["session"], news["dropped"]) == (before["session"], False)
        first, second = news["requests"]
        assert [first["number"], second["number"]] == [before["last"] + 1, news["last"]]
        story = told(viewer, "followed")
        assert first == {"number": first["number"]} | {name: story[name] for name in first if name != "number"}
        assert (first["key"], first["tokens"], first["finish_reason"], first["worker"]) == ("one", 5, "length", "m")
        assert first["tokens_per_s"] > 0
        assert 0 <= first["queue_ms"] <= first["first_token_ms"] <= first["total_ms"]
        assert "secret" not in str(news)
        assert [request["key"] for request in two.ended_requests(after=before["last"])["requests"]] == ["two"]
        assert viewer.ended_requests(after=news["last"])["requests"] == []


def test_another_key_sees_nothing_of_it(keyed: Keyed) -> None:
    with keyed.client("one") as one, keyed.client("two") as two:
        one.complete("m", "p", max_tokens=1, trace_ids=["private"])
        name = told(one, "private")["id"]
        for asked in ("private", name, "9999-1", "none"):
            with pytest.raises(WireError, match=f"no request '{asked}' is known"):
                two.story(asked)
        two.complete("m", "p", max_tokens=1, trace_ids=["private"])
        assert told(two, "private")["key"] == "two"


def test_trace_ids_that_are_none(keyed: Keyed) -> None:
    with keyed.client("one") as one:
        for wrong in ([], ["x"] * 5, [""], ["x" * 129], "text", [1]):
            given: Any = wrong
            with pytest.raises(WireError, match=r"trace_ids is .*: must be a list of 1 to 4 strings"):
                one.complete("m", "p", max_tokens=1, trace_ids=given)


def test_the_command_tells_it(keyed: Keyed) -> None:
    with keyed.client("one") as one:
        one.complete("m", "p", max_tokens=3, trace_ids=["for-people"])
    to = ("--connect", keyed.endpoint, "--key-file", str(keyed.file("viewer")))
    done = keyed.serving.modelctl("story", "for-people", *to)
    assert done.returncode == 0, done.stderr
    head, also, *lines = done.stdout.splitlines()
    assert ": model m, key one, priority normal, accepted 20" in head
    assert also == "  also for-people"
    assert lines[0].endswith(" s  accepted, 0 before it")
    assert any(line.endswith(" s  given to worker m on cpu") for line in lines)
    assert lines[-1].endswith(" s  ended (length), 1 tokens of prompt, 3 of the answer")
    done = keyed.serving.modelctl("story", "for-people", "--json", *to)
    assert '"finish_reason": "length"' in done.stdout
    with keyed.client("one") as one, pytest.raises(WireError):
        one.complete("m", "p", max_tokens=3 * LONG, trace_ids=["too-long"])
    said = keyed.serving.modelctl("story", "too-long").stdout
    assert f"ended with the error context_overflow: max_tokens is {3 * LONG}: at most" in said
    done = keyed.serving.modelctl("story", "nothing")
    assert done.returncode == 1
    assert "no request 'nothing' is known" in done.stderr
