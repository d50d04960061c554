"""Each key may use only a part of the memory for bodies, and a request whose body stalls is ended."""

import json
import os
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import psutil
import pytest

from gateway.http.body import PACE_BYTES, UNCHECKED_BYTES, BodyMemory, BodyTimer, HeldBody, memory_of
from gateway.http.errors import ApiError
from protocol.process.worker_spec import GatewaySettings
from supervisor.config.server import GatewayConfig, gateway_problems
from supervisor.keys.records import parse_rights
from supervisor.keys.store import KeyStore
from tests.gateway.running import Gateway
from tests.serving import WITHIN, Serving, engine, wait_until

MIB = 1 << 20
MAX_BODY = 80 * MIB
"""The largest body. A key's share of the memory is as large, so it has room for one whole body."""


class Served:
    """A supervisor, and the tokens of two keys."""

    def __init__(self, serving: Serving, bad: str, good: str) -> None:
        self.serving, self.bad, self.good = serving, bad, good


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    store = KeyStore(keys)
    tokens = [store.add_token(name, parse_rights("infer")) for name in ("bad", "good")]
    with Serving({"m": engine()}, keys=keys) as serving:
        yield Served(serving, *tokens)


def begin(port: int, token: str | None, length: int) -> socket.socket:
    """Return a connection that has sent the head of a request with a body of ``length`` bytes."""
    connection = socket.create_connection(("127.0.0.1", port), WITHIN)
    authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{authorization}Content-Length: {length}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def answer_on(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Return the status and the error of the answer."""
    received = b""
    while b"\r\n\r\n" not in received or not received.endswith(b"}"):
        piece = connection.recv(1 << 16)
        assert piece, received
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body).get("error", {})


def ask(port: int, token: str | None, size: int) -> tuple[int, dict[str, Any]]:
    """Send a request whose body is filled up with spaces. Return the status and the error of the answer."""
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 3}).encode().ljust(size)
    with closing(begin(port, token, len(body))) as connection:
        connection.sendall(body)
        return answer_on(connection)


def test_stalled_bodies_of_one_key_leave_room_for_the_other_keys(served: Served) -> None:
    with Gateway(served.serving, auth="keys", max_body=MAX_BODY) as gateway, ExitStack() as stack:
        wait_until(lambda: ask(gateway.port, served.good, 0)[0] == 200, what="the gateway")
        process = psutil.Process(gateway.process.pid)
        before = process.memory_info().rss
        stalled = stack.enter_context(closing(begin(gateway.port, served.bad, MAX_BODY)))
        stalled.sendall(bytes(MAX_BODY - 8 * MIB))
        # What the gateway has not read yet does not count yet, and the body that wants the last bytes is refused.
        wait_until(lambda: process.memory_info().rss > before + MAX_BODY - 10 * MIB, what="the stalled body")
        status, error = ask(gateway.port, served.bad, 12 * MIB)
        assert (status, error["code"]) == (429, "overloaded")
        assert "of this key" in error["message"]
        assert ask(gateway.port, served.bad, 1000)[0] == 200, "a small body has room"
        for _ in range(3):
            assert ask(gateway.port, served.good, 12 * MIB)[0] == 200
        stalled.close()
        wait_until(lambda: ask(gateway.port, served.bad, 12 * MIB)[0] == 200, what="the share")


def test_a_made_up_token_holds_no_memory(served: Served) -> None:
    with Gateway(served.serving, auth="keys") as gateway:
        wait_until(lambda: ask(gateway.port, served.good, 0)[0] == 200, what="the gateway")
        with closing(begin(gateway.port, "mctl_made-up", MIB)) as connection:
            connection.sendall(bytes(2 * UNCHECKED_BYTES))  # the rest of the body never comes
            status, error = answer_on(connection)
            assert (status, error["code"]) == (401, "unauthorized")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"body_s": 0.3}, "the body must come in 0.3 s"),
        ({"body_pace_s": 0.3}, f"at least {PACE_BYTES} bytes in each 0.3 s"),
    ],
)
def test_a_body_that_stalls_is_ended_and_its_memory_is_free(
    served: Served, settings: dict[str, float], says: str
) -> None:
    with Gateway(served.serving, auth="keys", max_body=MAX_BODY, **settings) as gateway:
        wait_until(lambda: ask(gateway.port, served.good, 0)[0] == 200, what="the gateway")
        for sent in (1, UNCHECKED_BYTES + 1):
            with closing(begin(gateway.port, served.good, MAX_BODY)) as connection:
                connection.sendall(bytes(sent))
                status, error = answer_on(connection)
            assert (status, error["code"]) == (408, "too_slow")
            assert says in error["message"]
        assert ask(gateway.port, served.good, 1000)[0] == 200


def test_a_body_that_comes_at_its_pace_is_not_ended() -> None:
    pace = BodyTimer(60, 10, 0)
    assert pace.due == 10
    assert "bytes in each 10 s" in pace.error().message
    pace.add(PACE_BYTES - 1, 9)
    assert pace.due == 10
    pace.add(1, 9.5)
    assert pace.due == 19.5
    for now in range(10, 60, 9):
        pace.add(PACE_BYTES, now)
    assert pace.due == 60, "the whole body has a limit, too"
    assert "come in 60 s" in pace.error().message


def test_one_key_has_a_quarter_and_unchecked_tokens_have_one_together() -> None:
    memory = BodyMemory(most=100, share=25)
    memory.take("a", 25)
    with pytest.raises(ApiError, match="of this key") as refused:
        memory.take("a", 1)
    assert (refused.value.status, refused.value.retry, memory.held["a"]) == (429, True, 25)
    for key in "bcd":
        memory.take(key, 25)
    with pytest.raises(ApiError, match="of others"):
        memory.take("e", 1)
    memory.give_back("b", 25)
    memory.take("e", 25)
    assert sorted(memory.held) == ["a", "c", "d", "e"], "who holds nothing is forgotten"


def test_a_body_counts_with_all_that_is_made_of_it() -> None:
    memory = BodyMemory(most=1000, share=250)
    held = HeldBody(memory)
    held.add(60)
    held.belongs_to("a")
    held.add(40)
    assert dict(memory.held) == {"a": 100}
    held.values = 240  # a character takes up to four bytes
    held.becomes(held.values)
    held.sends(1)
    assert dict(memory.held) == {"a": 340}, "a body that was taken is not refused because of what it becomes"
    with pytest.raises(ApiError, match="of this key"):
        memory.take("a", 1)
    held.sent(keeps=True)
    assert dict(memory.held) == {"a": 240}
    held.sent(keeps=False)
    assert not memory.held
    held.release()
    assert not memory.held


def test_the_frames_of_several_answers_need_room() -> None:
    memory = BodyMemory(most=1000, share=250)
    held = HeldBody(memory)
    held.add(50)
    held.sends(4)
    assert memory.held.total() == 250
    other = HeldBody(memory)
    other.belongs_to("other")
    other.add(100)
    with pytest.raises(ApiError, match=r"n is 3, and the body has 100 bytes: .* at most 250 bytes") as refused:
        other.sends(3)
    assert (refused.value.status, refused.value.param) == (413, "n")
    with pytest.raises(ApiError, match="of this key") as refused:
        other.sends(2)
    assert (refused.value.status, refused.value.retry) == (429, True)


def test_values_count_as_what_they_take() -> None:
    plain, wide = ({"prompt": "x" * 1000 + end} for end in ("", "\N{GRINNING FACE}"))
    assert 1000 < memory_of(plain) < 1500
    assert 4000 < memory_of(wide) < 6000
    assert memory_of([1] * 1000) > 8000
    assert memory_of([{} for _ in range(1000)]) > 64_000
    assert memory_of({"a": [{"b": ["x" * 5000]}]}) > 5000


def test_a_body_counts_until_the_supervisor_has_read_the_request(served: Served) -> None:
    """A supervisor that stands still reads nothing, and what it has not read stays in the gateway's memory."""
    with Gateway(served.serving, auth="none", max_body=4 * MIB, body_memory=12 * MIB) as gateway:
        wait_until(lambda: ask(gateway.port, None, 0)[0] == 200, what="the gateway")
        body = json.dumps({"model": "m", "prompt": "x" * (5 * MIB // 2), "max_tokens": 3}).encode()
        with ExitStack() as stack:
            os.kill(served.serving.pid, signal.SIGSTOP)
            stack.callback(os.kill, served.serving.pid, signal.SIGCONT)
            connections = []
            for _ in range(8):
                connections.append(stack.enter_context(closing(begin(gateway.port, None, len(body)))))
                connections[-1].sendall(body)
            ready, _, _ = select.select(connections, [], [], WITHIN)
            assert ready
            for connection in ready:
                status, error = answer_on(connection)
                assert (status, error["code"]) == (429, "overloaded")
            os.kill(served.serving.pid, signal.SIGCONT)
            statuses = {answer_on(connection)[0] for connection in connections if connection not in ready}
            assert 400 in statuses
            assert statuses <= {400, 429}
        for _ in range(8):
            assert ask(gateway.port, None, 3 * MIB)[0] == 200


def test_a_share_has_room_for_the_largest_body() -> None:
    memory = BodyMemory.of(GatewaySettings(body_memory=400 * MIB, max_body=100 * MIB))
    assert (memory.most, memory.share) == (400 * MIB, 100 * MIB)
    for size in (1, 16 * MIB, 500 * MIB):
        assert BodyMemory.of(GatewaySettings(max_body=size)).share >= size
    everybody = BodyMemory.of(GatewaySettings(auth="none"))
    assert everybody.share == everybody.most == 256 * MIB
    assert gateway_problems(GatewayConfig(body_memory=400 * MIB, max_body=100 * MIB)) == []
    assert gateway_problems(GatewayConfig(auth="none", body_memory=100 * MIB, max_body=100 * MIB)) == []
    ((key, message),) = gateway_problems(GatewayConfig(body_memory=399 * MIB, max_body=100 * MIB))
    assert (key, "at least 4 times max_body" in message) == ("body_memory", True)
