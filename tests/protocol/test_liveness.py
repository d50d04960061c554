"""Clients notice a supervisor that hangs or is stopped within the limits of silence, and wait for one that is slow."""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelctl import AsyncClient, Client
from protocol.client.transport import Liveness, PeerState
from protocol.errors import ConnectionLost
from protocol.messages import Cancel, Generate, Message, Ping
from tests.protocol.scripted_peer import (
    DEADLINE_S,
    HoldingScript,
    ScriptedPeer,
    accepted,
    delta,
    events,
    finished,
    peer_process,
)

SILENCE_S = 0.6
Wait = Callable[[Path], None]


# ---- the judge


def watch(liveness: Liveness, start: float, end: float, *, waiting: bool = True) -> list[tuple[float, PeerState]]:
    """Check ten times per second. Return the times and states that were not ALIVE."""
    parts: list[tuple[float, PeerState]] = []
    for tenth in range(round(start * 10), round(end * 10) + 1):
        state = liveness.check(tenth / 10, waiting=waiting)
        if state is not PeerState.ALIVE:
            parts.append((tenth / 10, state))
            if state is PeerState.LOST:
                break
    return parts


def test_it_asks_after_a_third_and_gives_up_after_all() -> None:
    assert watch(Liveness(15.0, 0.0), 0, 30) == [(5.0, PeerState.ASK), (15.0, PeerState.LOST)]


def test_any_sign_of_life_begins_anew() -> None:
    liveness = Liveness(15.0, 0.0)
    assert watch(liveness, 0, 12) == [(5.0, PeerState.ASK)]
    liveness.heard(12.0)
    assert watch(liveness, 12, 40) == [(17.0, PeerState.ASK), (27.0, PeerState.LOST)]


def test_silence_is_nothing_while_nothing_is_awaited() -> None:
    liveness = Liveness(15.0, 0.0)
    assert watch(liveness, 0, 100, waiting=False) == []
    assert watch(liveness, 100, 130) == [(105.0, PeerState.ASK), (115.0, PeerState.LOST)]


def test_who_did_not_look_cannot_tell() -> None:
    """The program did something else for a minute, so messages that came meanwhile may not have been read yet."""
    liveness = Liveness(15.0, 0.0)
    assert watch(liveness, 0, 9) == [(5.0, PeerState.ASK)]
    assert watch(liveness, 69, 100) == [(74.0, PeerState.ASK), (84.0, PeerState.LOST)]


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans(), st.booleans()), max_size=60))
def test_it_never_gives_up_unasked_nor_sooner_than_two_thirds_after_asking(
    steps: list[tuple[float, bool, bool]],
) -> None:
    now, asked_at, liveness = 0.0, None, Liveness(3.0, 0.0)
    for pause, heard, waiting in steps:
        now += pause
        if heard:
            liveness.heard(now)
            asked_at = None
        state = liveness.check(now, waiting=waiting)
        if state is PeerState.ASK:
            asked_at = now
        elif state is PeerState.LOST:
            assert asked_at is not None
            assert waiting
            assert not heard
            assert now - asked_at >= 2.0
            return


# ---- the clients, against a peer


def blocking(ask: Callable[[Client], object]) -> Wait:
    def wait(runtime_dir: Path) -> None:
        with Client(runtime_dir=runtime_dir, silence=SILENCE_S) as client:
            ask(client)

    return wait


def on_a_loop(ask: Callable[[AsyncClient], Coroutine[Any, Any, object]]) -> Wait:
    def wait(runtime_dir: Path) -> None:
        async def main() -> None:
            async with AsyncClient(runtime_dir=runtime_dir, silence=SILENCE_S) as client:
                await ask(client)

        asyncio.run(main())

    return wait


@pytest.mark.parametrize(
    "wait",
    [
        blocking(lambda client: client.complete("letters", "x")),
        blocking(lambda client: client.call("status")),
        blocking(lambda client: client.choices("letters", "x", n=3).complete()),
        on_a_loop(lambda client: client.complete("letters", "x")),
        on_a_loop(lambda client: client.call("status")),
        on_a_loop(lambda client: client.choices("letters", "x", n=3).complete()),
    ],
    ids=["request", "call", "choices", "async request", "async call", "async choices"],
)
def test_a_supervisor_that_hangs_is_noticed(runtime_dir: Path, wait: Wait) -> None:
    """The connection stays alive, since libzmq answers the heartbeats. But no PING is answered."""
    with ScriptedPeer(runtime_dir / "front", pong=False) as peer:
        start = time.monotonic()
        with pytest.raises(ConnectionLost, match=r"has not answered for 0.6 s: it hangs, or is stopped"):
            wait(runtime_dir)
        assert 0.9 * SILENCE_S < time.monotonic() - start < DEADLINE_S
        assert len(peer.of(Ping)) == 1


@pytest.mark.parametrize(
    "wait",
    [
        blocking(lambda client: client.complete("letters", "x")),
        on_a_loop(lambda client: client.complete("letters", "x")),
    ],
    ids=["blocking", "async"],
)
def test_a_stream_that_is_only_slow_is_waited_for(runtime_dir: Path, wait: Wait) -> None:
    """No event comes for several times the limit of silence, but the supervisor answers PING."""

    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Ping) and len(peer.of(Ping)) == 8:
            peer.send(client, events(delta(1, 0, "at last"), finished(1, 1)))

    with ScriptedPeer(runtime_dir / "front", script) as peer:
        start = time.monotonic()
        wait(runtime_dir)
        assert time.monotonic() - start > 2 * SILENCE_S
        assert len(peer.of(Ping)) == 8
        assert peer.of(Cancel) == []


def test_a_supervisor_that_is_stopped_is_noticed_by_heartbeats(runtime_dir: Path) -> None:
    with peer_process(runtime_dir / "front") as process, Client(runtime_dir=runtime_dir) as client:
        stream = client.generate("letters", "x")
        assert [next(stream).text for _ in range(3)] == ["0 ", "1 ", "2 "]
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ConnectionLost, match="the connection to the supervisor ended"):
            next(stream)


def test_a_supervisor_that_is_stopped_is_noticed_in_a_loop(runtime_dir: Path) -> None:
    async def main() -> None:
        with peer_process(runtime_dir / "front") as process:
            async with AsyncClient(runtime_dir=runtime_dir) as client:
                stream = client.generate("letters", "x")
                assert [(await anext(stream)).text for _ in range(3)] == ["0 ", "1 ", "2 "]
                process.send_signal(signal.SIGSTOP)
                with pytest.raises(ConnectionLost, match="the connection to the supervisor ended"):
                    await anext(stream)

    asyncio.run(main())


def test_a_client_that_was_stopped_itself_loses_nothing(runtime_dir: Path) -> None:
    """The client was stopped for longer than its limit of silence. Messages that came meanwhile are still delivered."""
    with (
        ScriptedPeer(runtime_dir / "front", HoldingScript()) as peer,
        Client(peer.endpoint, silence=2.0) as client,  # enough for a busy machine to answer PING
    ):
        stream = client.generate("letters", "x")
        assert next(stream).text == "0 "
        time.sleep(4.0)  # the time must really pass while the client does not look
        peer.inject(peer.clients[0], events(delta(1, 1, "there")))
        assert next(stream).text == "there"


def test_a_hung_supervisor_that_comes_back_is_connected_to_anew(runtime_dir: Path) -> None:
    def script(peer: ScriptedPeer, client: bytes, message: Message) -> None:
        if isinstance(message, Generate) and len(peer.clients) == 2:
            peer.send(client, accepted(message.request))
            peer.send(client, events(delta(message.request, 0, "fine"), finished(message.request, 1)))

    with (
        ScriptedPeer(runtime_dir / "front", script, pong=False) as peer,
        Client(peer.endpoint, silence=SILENCE_S) as client,
    ):
        with pytest.raises(ConnectionLost, match="has not answered"):
            client.complete("letters", "x")
        assert client.complete("letters", "y").text == "fine"
        assert len(peer.of(Generate)) == 2, "nothing is sent twice"
