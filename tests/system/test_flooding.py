"""A local process that floods a socket harms no other client, and the supervisor's memory stays bounded."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from protocol.errors import ErrorCode
from tests.deterministic_engine import answer
from tests.flooding import hit_and_run
from tests.fuzzing.live import WellBehaved, peak
from tests.raw_client import RawClient
from tests.serving import ROOT, WITHIN, Serving, engine, wait_until

ROUNDS, AT_ONCE = 300, 10
FLOOD_S = 2.0
MAX_GROWTH = 1 << 30
"""Bytes by which the supervisor may grow. Without a bound, these floods make it grow by 1 to 2 GiB each second."""


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving({"b": engine(step_s=0.001, context=100_000, max_queue=20_000)}) as serving:
        yield serving


@pytest.fixture
def neighbour(serving: Serving) -> Iterator[WellBehaved]:
    """Run a client that asks again and again during a test, and must not be affected."""
    behaved = WellBehaved(serving)
    behaved.start()
    yield behaved
    behaved.leaving.set()
    behaved.join(WITHIN)
    assert serving.process.poll() is None, "the supervisor died"
    assert not behaved.wrong, behaved.wrong
    assert behaved.waits, "no answer came"


@pytest.mark.long
@pytest.mark.parametrize("name", ["front", "admin", "back"])
def test_flooding_and_leaving_does_not_abort_the_supervisor(
    serving: Serving, neighbour: WellBehaved, name: str
) -> None:
    """Without the defence, libzmq 4.3.5 aborted in the first or second round, on all three sockets."""
    before = serving.counters()["connections_denied"]
    heard = sum(hit_and_run(str(serving.runtime_dir / name), AT_ONCE) for _ in range(ROUNDS // AT_ONCE))
    assert serving.process.poll() is None
    if name == "back":  # only workers may use this socket
        assert serving.counters()["connections_denied"] >= before + ROUNDS
    else:
        assert heard == ROUNDS


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "name", "size", "connections"),
    [
        ("flood", "front", 34, 1),
        ("flood", "admin", 34, 1),
        ("flood", "front", 100_000, 1),
        ("flood", "front", 34, 50),
        ("flood", "front", 2000, 50),
        ("parts", "front", 20, 1),
    ],
)
def test_a_flood_ends_its_own_connections_only(
    serving: Serving, neighbour: WellBehaved, kind: str, name: str, size: int, connections: int
) -> None:
    before = peak(serving.pid)
    command = [sys.executable, "-m", "tests.flooding", kind, str(serving.runtime_dir / name)]
    done = subprocess.run(
        [*command, str(FLOOD_S), str(size), str(connections)],
        cwd=ROOT, env=serving.environment, capture_output=True, text=True, timeout=FLOOD_S + WITHIN,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(json.loads(done.stdout), serving.counters(), f"peak {peak(serving.pid) >> 20} MiB")
    assert peak(serving.pid) - before < MAX_GROWTH


@pytest.mark.long
def test_ten_thousand_requests_at_once_are_no_flood(serving: Serving) -> None:
    """That is more than the client library can send at once, so the test uses a raw socket."""
    count = 10_000
    before = serving.counters()["connections_cut_off"]
    with RawClient(serving.runtime_dir) as client:
        for request in range(1, count + 1):
            client.generate(request, "b", f"one of many {request}", max_tokens=1)
        client.read_until_ended(*range(1, count + 1), within=4 * WITHIN)
        assert not client.errors
        for request in range(1, count + 1):
            assert client.heard[request].text == answer(f"one of many {request}", 1)
    assert serving.counters()["connections_cut_off"] == before


@pytest.mark.long
def test_who_is_cut_off_is_told_why(serving: Serving) -> None:
    """The client here is an honest program with a fault: it reads all messages, but never waits for answers."""
    with RawClient(serving.runtime_dir) as client:
        monitor = client.socket.get_monitor_socket()
        for request in range(1, 400_000):
            client.generate(request, "nosuch", "again and again", max_tokens=1)

        def reported() -> list[dict[str, object]]:
            while client.socket.poll(0):  # thousands of errors come before
                client.receive()
            return [error for request, error in client.errors if request == 0]

        (error,) = wait_until(reported)
        assert error["code"] == ErrorCode.RATE_LIMITED
        assert error["retryable"]
        assert "wait for answers" in str(error["message"])
        wait_until(lambda: monitor.poll(0) and monitor.recv_multipart()[0][:2] == b"\x00\x02", what="the end")
        client.socket.disable_monitor()
        monitor.close(linger=0)
