"""Constraints that take long to compile do not delay other requests, with real clients, supervisors and workers."""

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from modelctl import Client
from protocol.client.answers import Progress
from protocol.errors import ErrorCode, WireError
from tests.keyed import Keyed
from tests.serving import Serving, is_alive, is_helper, wait_until

PROMPT = "sort: d b a c ->"
MODEL = {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu", "max_batch_size": 2}
MOST_JOBS = 4
"""Number of jobs that such a worker has at once."""


@pytest.fixture(scope="module")
def keyed() -> Iterator[Keyed]:
    with Keyed({"letters": MODEL}, {"known": "infer"}, wait=False) as running:
        running.serving.wait_state("letters", "ready")
        yield running


@pytest.fixture
def serving(keyed: Keyed) -> Iterator[Serving]:
    yield keyed.serving
    keyed.serving.wait_idle("letters")


@pytest.fixture
def client(serving: Serving) -> Iterator[Client]:
    with serving.client() as one:
        yield one


def costly(number: int) -> dict[str, Any]:
    """Return a unique schema that is refused after a second of computing."""
    return {"type": "integer", "multipleOf": 1_000_003 + number}


def helper(serving: Serving) -> psutil.Process:
    """Return the worker's process that tries constraints."""
    children = serving.worker("letters").children()
    return next(p for p in children if is_alive(p) and is_helper(p, "constraint child", "constraint_child"))


def waiting(serving: Serving) -> int:
    queued: int = serving.status("letters")["queued"]
    return queued


def errors(serving: Serving) -> int:
    """Return the number of requests that have ended with an error."""
    count: int = serving.status("letters")["totals"]["errors"]
    return count


@pytest.mark.long
def test_a_known_regex_and_plain_requests_go_on_beside_unknown_schemas(serving: Serving, client: Client) -> None:
    """A worker that takes four jobs at once gets twenty schemas of a second each."""
    regex = "[a-f]{3}-[0-9]{2}"
    client.complete("letters", PROMPT, regex=regex)
    plain = client.complete("letters", PROMPT, temperature=0, max_tokens=20).text
    before = errors(serving)
    with serving.client() as hog:
        # No constraint is tried until the helper is resumed, or until it is replaced after ten seconds.
        stopped = helper(serving)
        stopped.suspend()
        streams = [hog.generate("letters", PROMPT, json_schema=costly(number)) for number in range(20)]
        wait_until(lambda: waiting(serving) >= 20 - MOST_JOBS, what="they are accepted")
        assert client.complete("letters", PROMPT, regex=regex).finish_reason == "stop"
        assert client.complete("letters", PROMPT, temperature=0, max_tokens=20).text == plain
        ended = errors(serving) - before
        assert ended <= 2, "neither waited for them"
        assert waiting(serving) >= 20 - 3, "none of them holds a slot"
        unknown = client.generate("letters", PROMPT, regex="[a-f]{4}")
        wait_until(lambda: waiting(serving) + errors(serving) - before == 21, what="it is tried, too")
        with suppress(psutil.NoSuchProcess):
            stopped.resume()
        assert unknown.complete().finish_reason == "stop"
        assert errors(serving) - before <= ended + 5, "it takes turns with them"
        for stream in streams:
            stream.cancel()
        codes = []
        for stream in streams:
            try:
                codes.append(stream.complete().finish_reason)
            except WireError as e:
                codes.append(e.code.wire_name)
        assert set(codes) <= {"cancelled", "invalid_request"}


def test_an_operator_cancels_a_parked_request(serving: Serving, client: Client) -> None:
    client.complete("letters", PROMPT, choice=["before"])
    stopped = helper(serving)
    stopped.suspend()  # the helper compiles nothing until it is resumed, or replaced after ten seconds
    stream = client.generate("letters", PROMPT, regex="[a-f]{7}")
    with serving.client(admin=True) as operator:

        def parked() -> list[dict[str, Any]]:
            return [r for r in operator.call("requests")["requests"] if r["state"] == "parked"]

        (request,) = wait_until(parked, what="a parked request")
        assert (request["worker"], request["queue_position"]) == (None, None)
        operator.call("cancel_request", id=request["id"])
        assert stream.complete().finish_reason == "cancelled"
        assert operator.call("requests")["total"] == 0
    with suppress(psutil.NoSuchProcess):
        stopped.resume()
    assert client.complete("letters", PROMPT, choice=["after"]).text == "after"


def test_a_costly_schema_is_refused_and_no_process_is_started_again(serving: Serving, client: Client) -> None:
    client.complete("letters", PROMPT, choice=["once"])
    first = helper(serving)
    for _ in range(2):
        with pytest.raises(WireError, match="takes more than a second") as refused:
            client.complete("letters", PROMPT, json_schema=costly(100))
        assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "json_schema")
    assert helper(serving) == first


def test_a_schema_that_is_costly_and_right_is_answered(serving: Serving, client: Client) -> None:
    schema = {"enum": [{"a": [n] * 5} for n in range(1000)]}
    for _ in range(2):
        reported = client.complete("letters", PROMPT, json_schema=schema, seed=1, max_tokens=200)
        assert json.loads(reported.text) in schema["enum"]


def test_a_client_is_told_that_its_shape_is_compiled(serving: Serving, client: Client) -> None:
    client.complete("letters", PROMPT, choice=["once"])
    stopped = helper(serving)
    stopped.suspend()
    phases = []

    def note(reported: Progress) -> None:
        phases.append(reported.phase)
        if reported.phase == "compiling":
            stopped.resume()

    assert client.complete("letters", PROMPT, regex="told{3}", on_progress=note).text == "tolddd"
    assert "compiling" in phases


def test_a_client_that_leaves_takes_its_schemas_with_it(serving: Serving) -> None:
    with serving.client() as leaving:
        streams = [leaving.generate("letters", PROMPT, json_schema=costly(200 + number)) for number in range(12)]
        assert streams
        wait_until(lambda: waiting(serving) >= 8, what="they wait")
        ended = errors(serving)
    wait_until(lambda: waiting(serving) == 0, what="nothing waits")
    assert errors(serving) - ended <= 4, "they were tried to the last"


@pytest.mark.long
def test_requests_that_wait_for_their_constraints_survive_the_worker(serving: Serving, client: Client) -> None:
    client.complete("letters", PROMPT, choice=["once"])
    helper(serving).send_signal(signal.SIGSTOP)
    streams = [client.generate("letters", PROMPT, regex=f"x{{{number}}}") for number in (3, 4, 5)]
    wait_until(lambda: waiting(serving) == 3, what="they wait")
    serving.worker("letters").kill()
    assert [stream.complete().text for stream in streams] == ["xxx", "xxxx", "xxxxx"]


@pytest.mark.long
def test_a_key_pays_for_what_is_compiled_for_it(keyed: Keyed, serving: Serving) -> None:
    """A key pays a thousand tokens for a second of computing, although its prompts are short and get no answer."""
    keyed.new("hog", tokens_per_minute=2000, max_in_flight=4)
    codes = []
    with keyed.client("hog") as hog, keyed.client("known") as other:
        for number in range(20):
            with pytest.raises(WireError) as refused:
                hog.complete("letters", PROMPT, json_schema=costly(300 + number))
            codes.append(refused.value.code)
            if refused.value.code is ErrorCode.RATE_LIMITED:
                break
        assert codes[-1] is ErrorCode.RATE_LIMITED
        assert set(codes[:-1]) == {ErrorCode.INVALID_REQUEST}
        assert other.complete("letters", PROMPT, regex="[a-f]{5}").finish_reason == "stop"
    (spent,) = [key for key in keyed.tcp()["keys"] if key["name"] == "hog"]
    assert spent["tokens_left"] < 1000
