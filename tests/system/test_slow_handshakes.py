"""A client does not take a slow handshake for a missing supervisor or a refused key."""

import asyncio
import contextlib
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from modelctl import AsyncClient, Client
from protocol.client.transport import SLOW_HANDSHAKE_S
from protocol.errors import ConnectionLost
from tests.deterministic_engine import answer
from tests.keyed import Keyed
from tests.serving import WITHIN, engine

STALL_S = 3.5
"""Seconds that the supervisor is stopped: longer than its limit of 3 s for a handshake."""


def carry(near: socket.socket, far: socket.socket) -> None:
    """Pass bytes on in both directions until one side has closed its connection."""
    while True:
        for one in select.select([near, far], [], [])[0]:
            if not (chunk := one.recv(65536)):
                return
            (far if one is near else near).sendall(chunk)


@pytest.fixture(scope="module")
def keyed() -> Iterator[Keyed]:
    with Keyed({"m": engine()}, {"laptop": "infer"}) as keyed:
        yield keyed


@pytest.mark.long
@pytest.mark.parametrize("near", [True, False], ids=["ipc", "tcp"])
def test_a_supervisor_that_stands_still_meanwhile_is_waited_for(keyed: Keyed, near: bool) -> None:
    async def ask() -> str:
        where: dict[str, Any] = (
            {"runtime_dir": keyed.serving.runtime_dir}
            if near
            else {"endpoint": keyed.endpoint, "key": keyed.keys["laptop"]}
        )
        keyed.serving.process.send_signal(signal.SIGSTOP)
        timer = asyncio.get_running_loop().call_later(STALL_S, keyed.serving.process.send_signal, signal.SIGCONT)
        try:
            async with AsyncClient(**where, timeout=WITHIN) as client:
                return (await client.complete("m", "after all", max_tokens=9)).text
        finally:
            timer.cancel()
            keyed.serving.process.send_signal(signal.SIGCONT)

    assert asyncio.run(ask()) == answer("after all", 9)


def test_whoever_takes_a_connection_and_says_nothing_did_not_answer(keyed: Keyed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionLost, match=f"did not answer within {STALL_S} s"):
            Client(endpoint, key=keyed.keys["laptop"], timeout=STALL_S)


def test_a_handshake_that_is_ended_late_is_tried_again(keyed: Keyed) -> None:
    """The test ends the first connection as a supervisor does after its time limit, and passes the second one on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def stand_between() -> None:
            first, _ = listener.accept()
            with first:
                time.sleep(SLOW_HANDSHAKE_S + 0.5)
            second, _ = listener.accept()
            with second, socket.create_connection(("127.0.0.1", keyed.port)) as port, contextlib.suppress(OSError):
                carry(second, port)

        between = threading.Thread(target=stand_between, daemon=True)
        between.start()
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with Client(endpoint, key=keyed.keys["laptop"], timeout=WITHIN) as client:
            assert client.complete("m", "second try", max_tokens=9).text == answer("second try", 9)
        between.join(WITHIN)
        assert not between.is_alive()
