"""Measure what HTTP costs: the gateway's processor time for each token, beside that of ``AsyncClient`` alone.

    python -m benchmarks.http_path [--quick] [--out DIR]

As in ``benchmarks.client_path`` a process takes the supervisor's place, and sends every stream a token as often as a 1B
model on an H200 makes one. The gateway is a process of its own. A third process reads the streams. ``AsyncClient``
alone reads the same tokens in the same run.
"""

import argparse
import asyncio
import multiprocessing
import socket
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.client_path import STEPS, STREAMS, on_a_loop, seconds_a_token, stand_in
from benchmarks.openai_client import Answer, stream
from benchmarks.report import RESULTS, Result, write


def gateway(runtime_dir: str, listener: socket.socket, told: Connection) -> None:
    """Serve in a process of its own, and answer each message on ``told`` with this process's processor time."""
    import threading

    from gateway.reports import Reports
    from gateway.server import serve
    from protocol.process.gateway_settings import GatewaySettings

    def tell() -> None:
        while told.recv() is not None:
            told.send(time.process_time())

    threading.Thread(target=tell, daemon=True).start()
    nobody, ours = socket.socketpair()
    with nobody, ours:
        serve(GatewaySettings(runtime_dir=runtime_dir, auth="none"), [listener], Reports(ours))


async def read(port: int, streams: int) -> list[Answer]:
    body = {"model": "m", "prompt": "x"}
    return await asyncio.gather(*(stream("127.0.0.1", port, body) for _ in range(streams)))


def measure(streams: int) -> tuple[float, int, int]:
    """Return (seconds of the gateway's processor for a token, tokens, tokens that came together with others)."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="modelctl-bench-") as scratch, socket.socket() as listener:
        path = Path(scratch, "front")
        supervisor = spawn.Process(target=stand_in, args=(f"ipc://{path}", streams))
        supervisor.start()
        while not path.exists():
            time.sleep(0.01)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1000)
        ours, theirs = spawn.Pipe()
        server = spawn.Process(target=gateway, args=(scratch, listener, theirs))
        server.start()
        ours.send("ready?")
        before = ours.recv()
        while True:  # until it has connected
            ours.send("idle?")
            now = ours.recv()
            if now - before < 0.001:
                break
            before = now
            time.sleep(0.2)
        answers = asyncio.run(read(listener.getsockname()[1], streams))
        ours.send("done")
        spent = ours.recv() - now
        server.terminate()
        server.join()
        supervisor.terminate()
        supervisor.join()
    tokens = sum(answer.events for answer in answers)
    if not all(answer.finished for answer in answers):
        raise RuntimeError(f"an answer did not end: {[answer.error for answer in answers][:1]}")
    return spent / tokens, tokens, STEPS * streams - tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round: tries the script itself")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    results = []
    for streams in STREAMS:
        rounds = []
        for _ in range(1 if arguments.quick else 3):
            http, tokens, joined = measure(streams)
            alone = seconds_a_token(on_a_loop, streams)
            rounds.append((http - alone, http, alone, joined))
            print(f"{streams} streams: {1e6 * http:.1f} µs, alone {1e6 * alone:.1f} µs, {tokens} tokens", flush=True)
        more, http, alone, joined = sorted(rounds)[len(rounds) // 2]
        name = f"{streams} streams: processor time of a token"
        results += [
            Result(f"{name}, gateway", 1e6 * http, "µs"),
            Result(f"{name}, AsyncClient alone", 1e6 * alone, "µs"),
            Result(f"{name}, gateway minus AsyncClient", 1e6 * more, "µs", "<= 15" if streams == 32 else None),
            Result(f"{streams} streams: tokens joined with others", joined, "tokens"),
        ]
    write("http-path", results, arguments.out)


if __name__ == "__main__":
    main()
