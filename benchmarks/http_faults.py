"""Measure what faults cost the clients of the gateway: slow readers, and a gateway that is killed.

    python -m benchmarks.http_faults [--quick] [--out DIR]

Slow readers: a good reader has one stream of RATE tokens per second, first alone and then beside SLOW clients that ask
for long streams and read almost nothing. The gaps between its tokens are compared.

Killed: the supervisor's gateway gets SIGKILL while it serves KILLED streams, ROUNDS times, each time after it has
served for LIVED_S seconds. (The supervisor waits longer and longer before it starts a gateway that dies again and
again.) Measured are the seconds until /livez answers again, and until no request is left in the engine. The engines
compute nothing.
"""

import argparse
import asyncio
import contextlib
import http.client
import os
import signal
import socket
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Server, percentile
from benchmarks.openai_client import stream
from benchmarks.report import RESULTS, Result, write

RATE, SECONDS, SLOW = 50, 10, 200
KILLED, ROUNDS, LIVED_S = 64, 5, 5.0
ENDLESS = 100_000
WITHIN = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def model(batch: int) -> dict[str, Any]:
    return {
        "model_dir": ".", "engine": "benchmarks.paced_engine:SteppedEngine", "max_batch_size": batch,
        "options": {"rate": RATE, "context": 4 * ENDLESS},
    }  # fmt: skip


def slow_reader(port: int) -> socket.socket:
    """Return a connection that has asked for a long stream, and that has little room for what is not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    body = b'{"model":"slow","prompt":"x","max_tokens":%d,"stream":true}' % ENDLESS
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection.sendall(head + body)
    return connection


def gap_p99(port: int, tokens: int) -> float:
    """Return the 99th percentile of the seconds between two tokens of a good reader's stream."""
    answer = asyncio.run(stream("127.0.0.1", port, {"model": "good", "prompt": "x", "max_tokens": tokens}))
    if not answer.finished:
        raise RuntimeError(f"the good reader's stream did not end: {answer.error}")
    return percentile(answer.gaps_s, 99)


def slow_readers(quick: bool) -> list[Result]:
    count, tokens = (20, 2 * RATE) if quick else (SLOW, SECONDS * RATE)
    port = free_port()
    models = {"good": model(4), "slow": model(count)}
    with Server(models, gateway={"listen": port, "auth": "none"}) as server, contextlib.ExitStack() as stack:
        wait_live(port)
        gap_p99(port, RATE)  # warms up
        alone = gap_p99(port, tokens)
        for _ in range(count):
            stack.callback(slow_reader(port).close)
        deadline = time.monotonic() + WITHIN
        while server.status("slow")["active"] < count:
            if time.monotonic() > deadline:
                raise TimeoutError("the slow readers' streams have not all begun")
            time.sleep(0.05)
        beside = gap_p99(port, tokens)
    label = f"{count} slow readers"
    return [
        Result("gap between tokens of a good reader, p99, alone", 1e3 * alone, "ms"),
        Result(f"gap between tokens of a good reader, p99, beside {label}", 1e3 * beside, "ms"),
        Result(f"p99 beside {label} by p99 alone", beside / alone, "ratio", "<= 1.3"),
    ]


def wait_live(port: int) -> None:
    """Wait until /livez answers. Raises TimeoutError."""
    deadline = time.monotonic() + WITHIN
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)
        try:
            connection.request("GET", "/livez")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            time.sleep(0.005)
        finally:
            connection.close()
    raise TimeoutError("the gateway does not answer")


async def broken(port: int, count: int, kill: "asyncio.Event") -> int:
    """Begin streams, set ``kill`` once all have begun, and return how many ended without their end."""

    async def one() -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"model":"slow","prompt":"x","max_tokens":%d,"stream":true}' % ENDLESS
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await reader.readuntil(b"data: ")
        begun.append(True)
        if len(begun) == count:
            kill.set()
        rest = b""
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(65536):
                rest = part
        writer.close()
        return b"[DONE]" not in rest

    begun: list[bool] = []
    return sum(await asyncio.gather(*(one() for _ in range(count))))


def killed(quick: bool) -> list[Result]:
    count, rounds = (8, 2) if quick else (KILLED, ROUNDS)
    port = free_port()
    back: list[float] = []
    empty: list[float] = []
    cut = 0
    with Server({"slow": model(count)}, gateway={"listen": port, "auth": "none"}) as server:
        for _ in range(rounds):
            wait_live(port)
            time.sleep(LIVED_S)

            async def round_() -> tuple[int, float]:
                kill = asyncio.Event()
                streams = asyncio.create_task(broken(port, count, kill))
                await kill.wait()
                (pid,) = (await asyncio.to_thread(server.overview))["supervisor"]["gateway"]["pids"]
                os.kill(pid, signal.SIGKILL)
                at = time.perf_counter()
                return await streams, at

            ended, at = asyncio.run(round_())
            cut += ended
            wait_live(port)
            back.append(time.perf_counter() - at)
            server.wait_idle("slow")
            empty.append(time.perf_counter() - at)
    return [
        Result(
            f"gateway killed with {count} streams: streams that ended cleanly broken",
            cut / rounds,
            "streams",
            f">= {count}",
        ),
        Result(f"gateway killed with {count} streams: back, median", statistics.median(back), "s", "<= 1"),
        Result(f"gateway killed with {count} streams: back, longest", max(back), "s", "<= 1"),
        Result(f"gateway killed with {count} streams: nothing left in the engine after", max(empty), "s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tries the script itself")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    write("http-faults", slow_readers(arguments.quick) + killed(arguments.quick), arguments.out)


if __name__ == "__main__":
    main()
