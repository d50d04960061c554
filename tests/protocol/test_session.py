"""In a session alone, every request ends exactly once and reads as it was sent, in any order of events."""

from dataclasses import dataclass, field
from struct import Struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.client.answers import CallState, StreamState
from protocol.client.request_options import generate_request
from protocol.client.session import ClientSession
from protocol.codec import decode, encode, pack_body
from protocol.errors import ConnectionLost, ErrorCode, WireError
from protocol.messages import CLIENT_TO_SUPERVISOR, Cancel, Credit, Reply, Welcome
from protocol.request import parse_generate
from tests.protocol.scripted_peer import Event, delta, events, failed, finished

WINDOW = 4
WORKER_DIED = WireError(ErrorCode.WORKER_DIED, "died")


def session_with_window() -> ClientSession:
    session = ClientSession("test")
    session.receive(encode(Welcome(pack_body({"window": WINDOW}))))
    session.outbox.clear()
    return session


@dataclass
class Reader:
    """One request, with the events that its peer still has to send and those that its reader got."""

    state: StreamState
    to_send: list[Event]
    sent: int = 0
    left: bool = False
    texts: list[str] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)

    def read(self, session: ClientSession) -> None:
        if self.left:
            return
        already_over = self.state.ended and not self.state.deltas and bool(self.endings)
        try:
            each = session.take(self.state)
        except WireError as e:
            self.endings.append(e.code.wire_name)
            return
        if each is not None:
            self.texts.append(each.text)
        elif self.state.ended and not already_over:
            self.endings.append(self.state.finish_reason or "none")


@settings(max_examples=200)
@given(st.data())
def test_every_request_ends_exactly_once(data: st.DataObject) -> None:
    session = session_with_window()
    readers = []
    for _ in range(data.draw(st.integers(1, 4))):
        state = session.generate("letters", {"prompt": "x"})
        length = data.draw(st.integers(0, 9))
        end = (
            finished(state.id, length) if data.draw(st.booleans()) else failed(state.id, length, WORKER_DIED.to_wire())
        )
        readers.append(Reader(state, [*(delta(state.id, i, str(i)) for i in range(length)), end]))
    lost = False
    for _ in range(data.draw(st.integers(0, 60))):
        reader = data.draw(st.sampled_from(readers))
        match data.draw(st.sampled_from(["send", "send", "read", "read", "cancel", "leave", "lose"])):
            case "send" if not lost and reader.sent < len(reader.to_send):
                session.receive(encode(events(reader.to_send[reader.sent])))
                reader.sent += 1
            case "read":
                reader.read(session)
            case "cancel":
                session.cancel(reader.state)
            case "leave":
                session.abandon(reader.state)
                reader.left = True
            case "lose" if data.draw(st.integers(0, 9)) == 0:
                session.lose("gone")
                lost = True
    session.lose("gone")
    session.lose("gone again")
    for reader in readers:
        for _ in range(len(reader.to_send) + 3):
            reader.read(session)
        complete = reader.sent == len(reader.to_send)
        if not reader.left:
            assert reader.texts == [str(i) for i in range(reader.sent - complete)]
            ending = reader.to_send[-1]
            expected = ("stop" if ending[2] == 2 else "worker_died") if complete else "connection_lost"
            assert reader.endings == [expected]
        else:
            assert len(reader.endings) <= 1
    assert not session._streams
    assert session.ignored == 0


@given(st.integers(0, 40), st.integers(0, 40))
def test_credit_never_runs_out_and_is_never_granted_ahead(arrive: int, taken: int) -> None:
    """The client always owes less than half a window of credit for read events, so the peer can always send on."""
    session = session_with_window()
    state = session.generate("letters", {"prompt": "x"})
    session.outbox.clear()
    for seq in range(arrive):
        session.receive(encode(events(delta(state.id, seq, "x"))))
    taken = min(taken, arrive)
    for _ in range(taken):
        session.take(state)
    sent = [decode(frame, CLIENT_TO_SUPERVISOR) for frame in session.outbox]
    granted = sum(message.events for message in sent if isinstance(message, Credit))
    assert taken - WINDOW // 2 < granted <= taken


def test_cancel_is_sent_once_and_never_after_the_end() -> None:
    session = session_with_window()
    first, second = session.generate("letters", {}), session.generate("letters", {})
    session.outbox.clear()
    session.cancel(first)
    session.cancel(first)
    session.abandon(first)
    session.abandon(first)
    session.receive(encode(events(finished(second.id, 0))))
    session.cancel(second)
    session.abandon(second)
    assert [decode(frame, CLIENT_TO_SUPERVISOR) for frame in session.outbox] == [Cancel(first.id)]


def test_requests_and_calls_share_one_sequence_of_ids() -> None:
    session = session_with_window()
    ids = [session.generate("a", {}).id, session.call("status", {}).id, session.generate("a", {}).id]
    assert ids == [1, 2, 3]


def test_a_loss_touches_what_is_unfinished_and_nothing_else() -> None:
    session = session_with_window()
    done, open_ = session.generate("letters", {}), session.generate("letters", {})
    answered, waiting = session.call("status", {}), session.call("status", {})
    session.receive(encode(events(finished(done.id, 0))))
    session.receive(encode(Reply(answered.id, pack_body({"result": {"a": 1}}))))
    touched = session.lose("gone")
    assert touched == [open_, waiting]
    assert all(isinstance(state.error, ConnectionLost) for state in touched)
    assert open_.error is not waiting.error
    assert session.take(done) is None
    assert (done.finish_reason, done.error) == ("stop", None)
    assert (answered.result, answered.error) == ({"a": 1}, None)


def test_a_reply_that_cannot_be_read_is_an_internal_error() -> None:
    for body in (b"\xc1", pack_body({}), pack_body({"result": 5}), pack_body({"error": "text"})):
        session = session_with_window()
        call = session.call("status", {})
        touched = session.receive(encode(Reply(call.id, body)))
        assert touched == [call]
        assert isinstance(call, CallState)
        assert call.error is not None
        assert call.error.code is ErrorCode.INTERNAL


ENTRY = [-0.25, b"caf\xc3", [[7, -0.25, b"caf\xc3"], [9, -1.5, b"x"]]]


def test_logprobs_reach_the_reader_with_their_tokens() -> None:
    session = session_with_window()
    state = session.generate("letters", {"prompt": "x", "logprobs": True})
    first = (state.id, 0, 0, (7,), {"text": "caf", "logprobs": [ENTRY]})
    last = (state.id, 1, 2, (8, 9), {"finish_reason": "stop", "logprobs": [[-1.0, b"", []], [-2.0, b"y", []]]})
    session.receive(encode(events(first, last)))
    delta = session.take(state)
    assert delta is not None
    (reported,) = delta.logprobs
    assert (reported.token_id, reported.logprob, reported.bytes, reported.text) == (7, -0.25, b"caf\xc3", "caf\ufffd")
    assert [(other.token_id, other.logprob, other.bytes) for other in reported.top] == [
        (7, -0.25, b"caf\xc3"),
        (9, -1.5, b"x"),
    ]
    session.take(state)
    assert [entry.token_id for entry in state.logprobs] == state.token_ids == [7, 8, 9]
    assert [entry.logprob for entry in state.logprobs] == [-0.25, -1.0, -2.0]


def packed(kind: str, *values: float) -> bytes:
    return Struct(f"<{len(values)}{kind}").pack(*values)


PIECE: dict[str, Any] = {
    "first": 1, "top": 1, "before": 5, "ids": packed("I", 6, 7), "logprobs": packed("f", -2.5, -0.125),
    "known": packed("I", 5, 6, 7), "bytes": [b"a", b" b", b"caf\xc3"],
}  # fmt: skip


def test_prompt_logprobs_reach_the_reader_before_the_answer() -> None:
    session = session_with_window()
    state = session.generate("letters", {"prompt": "x", "prompt_logprobs": 1})
    more = PIECE | {"first": 2, "before": 6}
    for number, piece in enumerate((PIECE, more)):
        session.receive(encode(events((state.id, number, 0, (), {"text": "", "prompt_logprobs": piece}))))
    session.receive(encode(events((state.id, 2, 2, (8,), {"text": "x", "finish_reason": "stop"}))))
    first, second, answer = (session.take(state) for _ in range(3))
    assert first is not None
    assert first.prompt is not None
    assert (first.text, first.token_ids, first.prompt.first, first.prompt.before) == ("", (), 1, (5, b"a"))
    (token,) = first.prompt.tokens()
    assert (token.token_id, token.logprob, token.bytes) == (6, -2.5, b" b")
    assert [(top.token_id, top.logprob, top.text) for top in token.top] == [(7, -0.125, "caf\ufffd")]
    assert second is not None
    assert second.prompt is not None
    assert second.prompt.first == 2
    assert answer is not None
    assert (answer.text, answer.prompt) == ("x", None)


@pytest.mark.parametrize("piece", [
    5, [1], {}, *(PIECE | change for change in (
        {"first": 0}, {"first": True}, {"top": -1}, {"top": 2}, {"before": 9}, {"before": "a"}, {"ids": "ab"},
        {"ids": b"abc"}, {"ids": packed("I", 6)}, {"ids": packed("I", 6, 99)}, {"logprobs": packed("f", -1)},
        {"logprobs": b"abcde"}, {"known": packed("I", 5, 6)}, {"bytes": [b"a"]}, {"bytes": ["a", "b", "c"]},
        {"bytes": b"abc"},
    )),
])  # fmt: skip
def test_prompt_logprobs_that_cannot_be_read_end_the_stream(piece: object) -> None:
    session = session_with_window()
    state = session.generate("letters", {"prompt": "x"})
    session.receive(encode(events((state.id, 0, 0, (), {"text": "", "prompt_logprobs": piece}))))
    with pytest.raises(WireError, match="prompt_logprobs have the wrong shape") as fault:
        session.take(state)
    assert fault.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    "entries",
    [
        5,
        "x",
        [5],
        [[]],
        [ENTRY, ENTRY],
        [[1, b"", []]],
        [[-1.0, "text", []]],
        [[-1.0, b"", [[7, -1.0]]]],
        [[-1.0, b"", 5]],
    ],
)
def test_logprobs_that_cannot_be_read_end_the_stream(entries: object) -> None:
    session = session_with_window()
    state = session.generate("letters", {"prompt": "x"})
    session.receive(encode(events((state.id, 0, 0, (7,), {"text": "a", "logprobs": entries}))))
    with pytest.raises(WireError, match="logprobs") as fault:
        session.take(state)
    assert fault.value.code is ErrorCode.INTERNAL


def test_what_a_user_gives_becomes_what_the_wire_carries() -> None:
    body, route = generate_request(
        {
            "prompt": "x",
            "logit_bias": {5: 1, "7": -2.0},
            "banned_tokens": (1, 2),
            "seed": None,
            "zzz": 1,
            "resume": True,
        }
    )
    assert route == {}
    assert body == {"prompt": "x", "logit_bias": {"5": 1, "7": -2.0}, "banned_tokens": (1, 2), "zzz": 1}
    request = parse_generate(pack_body({name: value for name, value in body.items() if name != "zzz"}))
    assert (request.logit_bias, request.banned_tokens) == ({5: 1.0, 7: -2.0}, (1, 2))
