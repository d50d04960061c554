"""The blocking client delivers the right answers and sends the right messages, against a real peer."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from modelctl import Client
from protocol.client.answers import Completion, Delta
from protocol.codec import pack_body, pack_error, unpack_body
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.limits import MAX_FRAME
from protocol.messages import Call, Cancel, Credit, Error, Generate, GoAway, Hello, Kind, Message, Ping, Pong, Reply
from tests.protocol.scripted_peer import (
    CreditScript,
    HoldingScript,
    ScriptedPeer,
    accepted,
    answers,
    delta,
    events,
    failed,
    finished,
    pump_until,
)


@pytest.fixture
def peer(runtime_dir: Path) -> Iterator[ScriptedPeer]:
    with ScriptedPeer(runtime_dir / "front", answers(["a ", "b ", "c"])) as peer:
        yield peer


def test_a_stream_delivers_its_deltas_then_how_it_ended(peer: ScriptedPeer) -> None:
    with Client(peer.endpoint) as client:
        stream = client.generate("letters", "sort: c b a ->", max_tokens=8, stop=["\n"], temperature=0)
        assert stream.finish_reason is None
        deltas = list(stream)
        assert deltas == [Delta("a ", (0,)), Delta("b ", (1,)), Delta("c", (2,))]
        assert stream.text == "a b c"
        assert stream.token_ids == (0, 1, 2)
        assert stream.finish_reason == "stop"
        assert stream.usage == {"prompt_tokens": 3, "completion_tokens": 3}
        assert stream.timings == {"prefill_ms": 0.5}
        assert stream.accepted == {"model": "letters", "queue_position": 0}
        assert list(stream) == []
    (request,) = peer.of(Generate)
    assert (request.request, request.model, request.route) == (stream.request_id, "letters", {})
    assert unpack_body(request.body) == {
        "prompt": "sort: c b a ->", "max_tokens": 8, "stop": ["\n"], "temperature": 0
    }  # fmt: skip
    assert peer.of(Cancel) == []


def test_complete_returns_the_whole_answer(peer: ScriptedPeer) -> None:
    with Client(peer.endpoint) as client:
        answer = client.complete("letters", messages=[{"role": "user", "content": "hi"}], resume=False, seed=None)
    assert answer == Completion(
        "a b c", (0, 1, 2), "stop", {"prompt_tokens": 3, "completion_tokens": 3}, {"prefill_ms": 0.5}
    )
    (request,) = peer.of(Generate)
    assert request.route == {"resume": False}
    assert unpack_body(request.body) == {"messages": [{"role": "user", "content": "hi"}]}


def test_hello_comes_first_and_the_greeting_is_kept(peer: ScriptedPeer) -> None:
    with Client(peer.endpoint) as client:
        assert client.server["server"] == "scripted"
    assert isinstance(peer.received[0], Hello)
    assert unpack_body(peer.received[0].body)["library"].startswith("modelctl-python/")


def test_token_ids_travel_as_little_endian_u32(peer: ScriptedPeer) -> None:
    with Client(peer.endpoint) as client:
        client.complete("letters", token_ids=[1, 258, 0xFFFFFFFF])
        with pytest.raises(RequestError, match="token_ids holds something else") as refused:
            client.generate("letters", token_ids=[-1])
        assert refused.value.field == "token_ids"
    (request,) = peer.of(Generate)
    assert unpack_body(request.body) == {"token_ids": b"\1\0\0\0\2\1\0\0\xff\xff\xff\xff"}


def test_the_final_event_may_carry_text(runtime_dir: Path) -> None:
    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Generate):
            peer.send(client, accepted(message.request))
            peer.send(client, events(delta(1, 0, ""), finished(1, 1, "length", "the end", (7, 8))))

    with ScriptedPeer(runtime_dir / "front", script) as peer, Client(peer.endpoint) as client:
        stream = client.generate("letters", "x")
        assert next(stream) == Delta("the end", (7, 8))
        assert list(stream) == []
        assert stream.finish_reason == "length"


def test_two_streams_read_in_turn_do_not_mix(runtime_dir: Path) -> None:
    """The peer answers only when it has both requests, and puts events of both into every frame."""

    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Generate) and message.request == 2:
            peer.send(client, accepted(2))
            peer.send(client, accepted(1))
            for seq in range(5):
                peer.send(client, events(delta(2, seq, f"b{seq}"), delta(1, seq, f"a{seq}")))
            peer.send(client, events(finished(1, 5), finished(2, 5)))

    with ScriptedPeer(runtime_dir / "front", script) as peer, Client(peer.endpoint) as client:
        first, second = client.generate("letters", "1"), client.generate("letters", "2")
        pairs = [(a.text, b.text) for a, b in zip(first, second, strict=True)]
        assert pairs == [(f"a{i}", f"b{i}") for i in range(5)]
        assert (first.finish_reason, second.finish_reason) == ("stop", "stop")


def test_credit_is_granted_as_events_are_taken(runtime_dir: Path) -> None:
    """The peer sends one window of events and waits. The rest comes only if the client reads."""
    script = CreditScript(total=100, window=8)
    with ScriptedPeer(runtime_dir / "front", script, window=8) as peer, Client(peer.endpoint) as client:
        unread, read = client.generate("letters", "1"), client.generate("letters", "2")
        assert len(list(read)) == 100
        assert script.sent[unread.request_id] == 8
        assert list(islice(unread, 100)) == [Delta("x", (i,)) for i in range(100)]
        assert all(c.events == 4 for c in peer.of(Credit))


def test_credit_goes_on_for_what_nobody_reads_any_more(runtime_dir: Path) -> None:
    """Without credit, a supervisor would hold the terminal event, too."""
    script = CreditScript(total=100, window=8)
    with ScriptedPeer(runtime_dir / "front", script, window=8) as peer, Client(peer.endpoint) as client:
        left = client.generate("letters", "1")
        pump_until(client, lambda: len(left._state.deltas) == 8, "a window of deltas")
        left.close()
        client.complete("letters", "2")
        assert list(left) == []
        pump_until(client, lambda: script.sent[1] == 100, "the abandoned stream to run out")
        assert client._connection.session.ignored == 0


def test_ping_is_answered(peer: ScriptedPeer) -> None:
    with Client(peer.endpoint) as client:
        client.complete("letters", "x")
        peer.inject(peer.clients[0], Ping(12345))
        pump_until(client, lambda: bool(peer.of(Pong)), "PONG")
    assert peer.of(Pong) == [Pong(12345)]


def test_an_error_event_raises_with_code_and_field_after_what_came_before(runtime_dir: Path) -> None:
    error = RequestError("prompt has 9000 tokens: at most 8192", field="prompt", code=ErrorCode.CONTEXT_OVERFLOW)

    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Generate):
            peer.send(client, accepted(message.request))
            peer.send(client, events(delta(1, 0, "some"), failed(1, 1, error.to_wire())))

    with ScriptedPeer(runtime_dir / "front", script) as peer, Client(peer.endpoint) as client:
        stream = client.generate("letters", "x")
        assert next(stream).text == "some"
        with pytest.raises(WireError, match="at most 8192") as raised:
            next(stream)
        assert (raised.value.code, raised.value.field) == (ErrorCode.CONTEXT_OVERFLOW, "prompt")
        assert list(stream) == []
        assert stream.finish_reason is None
        assert peer.of(Cancel) == []


def test_an_error_before_accepted_raises(runtime_dir: Path) -> None:
    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Generate):
            error = WireError(ErrorCode.OVERLOADED, "the queue is full", retry_after_ms=250)
            peer.send(client, Error(message.request, pack_error(error)))

    with ScriptedPeer(runtime_dir / "front", script) as peer, Client(peer.endpoint) as client:
        with pytest.raises(WireError, match="queue is full") as raised:
            client.complete("letters", "x")
        assert (raised.value.code, raised.value.retry_after_ms) == (ErrorCode.OVERLOADED, 250)
        assert raised.value.retryable


def test_calls_return_the_result_or_raise(runtime_dir: Path) -> None:
    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Call) and message.verb == "status":
            result = {"asked": unpack_body(message.body)}
            peer.send(client, Reply(message.call, pack_body({"result": result})))
        elif isinstance(message, Call) and message.verb == "models":
            error = WireError(ErrorCode.MODEL_NOT_FOUND, "no such model", field="model")
            peer.send(client, Reply(message.call, pack_body({"error": error.to_wire()})))

    with ScriptedPeer(runtime_dir / "front", script) as peer, Client(peer.endpoint) as client:
        assert client.status() == {"asked": {}}
        assert client.status("letters") == {"asked": {"model": "letters"}}
        assert client.call("status", model="a", wait=True) == {"asked": {"model": "a", "wait": True}}
        with pytest.raises(WireError) as raised:
            client.models()
        assert (raised.value.code, raised.value.field) == (ErrorCode.MODEL_NOT_FOUND, "model")
        with pytest.raises(TimeoutError, match=r"no answer to unheard within 0.05 s"):
            client.call("unheard", reply_timeout=0.05)


def test_a_frame_that_is_too_large_is_refused_here(peer: ScriptedPeer) -> None:
    limit = MAX_FRAME[Kind.GENERATE]
    with Client(peer.endpoint) as client:
        with pytest.raises(WireError, match=rf"GENERATE of {limit // 100}\d\d bytes: at most {limit}") as raised:
            client.generate("letters", "x" * limit, max_tokens=5)
        assert raised.value.code is ErrorCode.TOO_LARGE
        assert client.complete("letters", "x").text == "a b c"
    assert len(peer.of(Generate)) == 1


@pytest.mark.parametrize(
    ("value", "what"),
    [({1, 2}, "a set"), (1 << 70, "a int"), (["\ud800"], "text that is not valid Unicode")],
    ids=["set", "huge", "surrogate"],
)
def test_a_value_that_msgpack_cannot_carry_is_named(peer: ScriptedPeer, value: object, what: str) -> None:
    with Client(peer.endpoint) as client, pytest.raises(RequestError, match=f"logit_bias is {what}") as refused:
        client.generate("letters", "x", logit_bias=value)
    assert refused.value.field == "logit_bias"


def test_goaway_refuses_new_requests_and_lets_streams_end(runtime_dir: Path) -> None:
    with ScriptedPeer(runtime_dir / "front", HoldingScript()) as peer, Client(peer.endpoint) as client:
        stream = client.generate("letters", "x")
        next(stream)
        peer.inject(peer.clients[0], GoAway(pack_body({"reason": "it is being stopped"})))
        pump_until(client, lambda: client._connection.session.goaway is not None, "GOAWAY")
        with pytest.raises(WireError, match="it is being stopped") as raised:
            client.generate("letters", "y")
        assert raised.value.code is ErrorCode.DRAINING
        stream.cancel()
        assert [d.text for d in stream] == ["late "]
        assert stream.finish_reason == "cancelled"


def test_the_operators_socket_takes_calls_only(runtime_dir: Path) -> None:
    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Call):
            peer.send(client, Reply(message.call, pack_body({"result": {"stopped": True}})))

    with ScriptedPeer(runtime_dir / "admin", script), Client(runtime_dir=runtime_dir, admin=True) as client:
        assert client.call("stop", model="letters") == {"stopped": True}
        with pytest.raises(WireError, match="front socket") as raised:
            client.generate("letters", "x")
        assert raised.value.code is ErrorCode.UNSUPPORTED
