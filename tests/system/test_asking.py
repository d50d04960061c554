"""A worker answers queries about tokens and texts, and a model's defaults and limits apply to its requests."""

import os
import signal
from struct import unpack

import pytest

from protocol.codec import pack_body
from protocol.errors import ErrorCode, WireError
from protocol.messages import Call
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.raw_client import RawClient
from tests.serving import engine, wait_until


def test_tokens_of_a_text_and_back(serve: Serve) -> None:
    serving = serve({"a": engine(replicas=2)})
    with serving.client() as client:
        report = client.call("tokenize", reply_timeout=60, model="a", prompt="añ")
        assert unpack(f"<{report['count']}I", report["token_ids"]) == tuple("añ".encode())
        assert client.call("detokenize", reply_timeout=60, model="a", token_ids=report["token_ids"]) == {"text": "añ"}
        assert client.call("tokenize", reply_timeout=60, model="a:2", prompt="b")["count"] == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("verb", "params", "code", "field"),
    [
        ("tokenize", {"prompt": "x"}, ErrorCode.INVALID_REQUEST, "model"),
        ("tokenize", {"model": "nosuch", "prompt": "x"}, ErrorCode.MODEL_NOT_FOUND, "model"),
        ("tokenize", {"model": "a"}, ErrorCode.INVALID_REQUEST, None),
        ("tokenize", {"model": "a", "prompt": 5}, ErrorCode.INVALID_REQUEST, "prompt"),
        ("detokenize", {"model": "a", "token_ids": b"123"}, ErrorCode.INVALID_REQUEST, "token_ids"),
        ("detokenize", {"model": "a", "token_ids": b"1234", "x": 1}, ErrorCode.INVALID_REQUEST, "x"),
        ("tokenize", {"model": "b", "prompt": "x"}, ErrorCode.MODEL_NOT_RUNNING, None),
    ],
)
def test_wrong_questions_are_answered_with_what_is_wrong(
    serve: Serve, verb: str, params: dict[str, object], code: ErrorCode, field: str | None
) -> None:
    serving = serve({"a": engine(), "b": engine(autostart=False)})
    with serving.client() as client:
        with pytest.raises(WireError) as caught:
            client.call(verb, reply_timeout=60, **params)
        assert caught.value.code is code
        assert field is None or caught.value.field == field
        assert client.complete("a", "goes on", max_tokens=5).text == answer("goes on", 5)


def test_who_asked_a_worker_that_died_is_told(serve: Serve) -> None:
    """The test stops the worker first, so that it cannot answer before it is killed."""
    serving = serve({"a": engine()})
    worker = serving.worker("a")
    with RawClient(serving.runtime_dir) as client:
        worker.suspend()
        client.send(Call(7, "tokenize", pack_body({"model": "a", "prompt": "x"})))
        client.barrier()
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: client.receive() is not None and bool(client.replies), what="an answer")
        (reply,) = client.replies
        assert isinstance(reply["error"], dict)
        assert reply["error"]["name"] == "worker_died"


def test_defaults_and_limits_of_a_model(serve: Serve) -> None:
    limits = {"max_tokens": 20, "prompt_tokens": 10, "temperature": 1.5}
    serving = serve({"a": engine(sampling={"preset": "steady", "max_tokens": 5}, limits=limits)})
    with serving.client() as client:
        assert client.complete("a", "defaults").text == answer("defaults", 5)
        assert client.complete("a", "given", max_tokens=20).text == answer("given", 20)
        for fields, field in (
            ({"max_tokens": 21}, "max_tokens"),
            ({"temperature": 1.6}, "temperature"),
            ({"prompt": "12345678901"}, "prompt"),
        ):
            with pytest.raises(WireError) as caught:
                client.complete("a", **{"prompt": "beyond", **fields})
            assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, field)


def test_a_question_that_grows_when_it_is_packed_anew_costs_nobody_a_worker(serve: Serve) -> None:
    """Floats of 4 bytes become 8 bytes, so a query that fits the front socket can be too large for the worker."""
    serving = serve({"a": engine()})
    pid = serving.status("a")["pid"]
    floats = b"\xdd" + (700_000).to_bytes(4, "big") + b"\xca\x3f\x80\x00\x00" * 700_000
    with RawClient(serving.runtime_dir) as client:
        client.send(Call(7, "tokenize", b"\x82\xa5model\xa1a\xa6prompt" + floats))
        wait_until(lambda: client.receive() is not None and bool(client.replies or client.errors), what="an answer")
    assert serving.status("a")["pid"] == pid
    with serving.client() as client:
        assert client.complete("a", "goes on", max_tokens=5).text == answer("goes on", 5)
