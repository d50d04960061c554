"""Measure the cost of reading answers in a client's process: processor time per token, for both clients.

    python -m benchmarks.client_path [--out DIR]

A second process takes the supervisor's place. It sends every stream a token, STEPS times, as often as a 1B model on an
H200 makes one. The client's process only reads. Its processor time includes that of libzmq's thread.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from benchmarks.report import RESULTS, Result, write
from modelctl import AsyncClient, Client
from protocol.codec import EventWriter, decode, encode, pack_body
from protocol.messages import CLIENT_TO_SUPERVISOR, Accepted, EventEntry, EventFlag, Generate, Hello, Welcome

STREAMS = (1, 8, 32)
STEPS = 500
STEP_SECONDS = {1: 3.7e-3, 8: 5.3e-3, 32: 8.6e-3}


TEXTS = (" word",) * STEPS
"""The tokens of an answer."""


def stand_in(endpoint: str, streams: int, texts: Sequence[str] = TEXTS, format: dict[str, Any] | None = None) -> None:
    """Play the supervisor in a process of its own: accept ``streams`` requests, then answer all of them.

    texts   the tokens of every answer
    format  what the first event says about the answer
    """
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint)
        requests: list[int] = []
        while len(requests) < streams:
            client, frame = socket.recv_multipart()
            message = decode(frame, CLIENT_TO_SUPERVISOR)
            if isinstance(message, Hello):
                socket.send_multipart([client, encode(Welcome(pack_body({"server": "stand-in", "window": 256})))])
            elif isinstance(message, Generate):
                requests.append(message.request)
                socket.send_multipart([client, encode(Accepted(message.request, pack_body({"model": "m"})))])
        writer = EventWriter()
        due = time.perf_counter()
        for step, text in enumerate(texts):
            fields: dict[str, object] = {"text": text}
            if step == 0 and format is not None:
                fields["format"] = format
            is_last = step == len(texts) - 1
            if is_last:
                fields |= {"finish_reason": "stop", "usage": {}, "timings": {}}
            event = writer.event([step], fields)
            flags = int(EventFlag.FINISHED) if is_last else int(EventFlag.FIRST) if not step else 0
            index = [EventEntry(request, step, flags, 1, len(event)) for request in requests]
            socket.send_multipart([client, writer.frame(1, 1, index, event * streams)])
            due += STEP_SECONDS[streams]
            time.sleep(max(0.0, due - time.perf_counter()))
        socket.poll(5000)  # the client leaves when it has everything


def blocking(endpoint: str, streams: int) -> int:
    """Return the tokens that ``Client`` reads, stream after stream. All streams but one are read after they have
    arrived."""
    with Client(endpoint) as client:
        answers = [client.generate("m", "x") for _ in range(streams)]
        return sum(len(delta.token_ids) for answer in answers for delta in answer)


def on_a_loop(endpoint: str, streams: int) -> int:
    """Return the tokens that ``AsyncClient`` reads, with a task for each stream."""

    async def main() -> int:
        async with AsyncClient(endpoint) as client:

            async def one() -> int:
                return sum([len(delta.token_ids) async for delta in client.generate("m", "x")])

            return sum(await asyncio.gather(*(one() for _ in range(streams))))

    return asyncio.run(main())


def seconds_a_token(read: Callable[[str, int], int], streams: int) -> float:
    with tempfile.TemporaryDirectory(prefix="modelctl-bench-") as scratch:
        path = Path(scratch, "front")
        peer = multiprocessing.get_context("spawn").Process(target=stand_in, args=(f"ipc://{path}", streams))
        peer.start()
        while not path.exists():
            time.sleep(0.01)
        begun = time.process_time()
        tokens = read(f"ipc://{path}", streams)
        spent = time.process_time() - begun
        peer.terminate()
        peer.join()
    assert tokens == STEPS * streams
    assert threading.active_count() == 1
    return spent / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    results = []
    for name, read in (("Client", blocking), ("AsyncClient", on_a_loop)):
        for streams in STREAMS:
            spent = sorted(seconds_a_token(read, streams) for _ in range(3))[1]
            results.append(Result(f"{name}, {streams} streams: processor time of a token", 1e6 * spent, "µs"))
    write("client-path", results, arguments.out)


if __name__ == "__main__":
    main()
