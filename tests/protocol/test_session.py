"""The session alone: whatever order things happen in, every request ends exactly once and reads as it was sent."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.answers import CallState, StreamState
from protocol.codec import decode, encode, pack_body
from protocol.errors import ConnectionLost, ErrorCode, WireError
from protocol.messages import CLIENT_TO_SUPERVISOR, Cancel, Credit, Reply, Welcome
from protocol.session import ClientSession
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
    """One request: what its peer has left to send, and what its reader got."""

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
    """At every moment: granted = taken, less than half a window; so a peer with a window can always send on."""
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
