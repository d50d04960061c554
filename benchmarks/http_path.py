"""Measure what HTTP costs: the gateway's processor time for each token, beside that of ``AsyncClient`` alone.

    python -m benchmarks.http_path [--quick] [--out DIR]

As in ``benchmarks.client_path`` a process takes the supervisor's place, and sends every stream a token as often as a 1B
model on an H200 makes one. The gateway is a process of its own. A third process reads the streams. ``AsyncClient``
alone reads the same tokens in the same run.

The answers are of two kinds. The first is text, as a completion. The second is that of a chat with tools: the model
reasons, writes text, and calls a tool. The gateway parses it.
"""

import argparse
import asyncio
import multiprocessing
import socket
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.client_path import STEPS, STREAMS, TEXTS, on_a_loop, seconds_a_token, stand_in
from benchmarks.openai_client import Answer, stream
from benchmarks.report import RESULTS, Result, write
from protocol.answer_formats.parser import AnswerParser, MarkerPair
from protocol.answer_formats.source import CallArguments, CallEnd, CallStart, Reasoning, Text, Tool


def gateway(runtime_dir: str, listener: socket.socket, told: Connection) -> None:
    """Serve in a process of its own, and answer each message on ``told`` with this process's processor time."""
    import threading

    from gateway.server import Reports, serve
    from protocol.process.helper_link import HelperLink
    from protocol.process.worker_spec import GatewaySettings

    def tell() -> None:
        while told.recv() is not None:
            told.send(time.process_time())

    threading.Thread(target=tell, daemon=True).start()
    nobody, ours = socket.socketpair()
    with nobody, ours:
        reports = Reports(HelperLink(ours.fileno()))
        serve(GatewaySettings(runtime_dir=runtime_dir, auth="none"), [listener], reports)


@dataclass(frozen=True)
class Kind:
    """A kind of answers.

    body    of the requests
    texts   the tokens of an answer
    format  what the first event says about the answer
    events  how many events with text an answer has if no tokens come together
    """

    name: str
    body: dict[str, Any]
    texts: tuple[str, ...] = TEXTS
    format: dict[str, Any] | None = None
    events: int = STEPS


TOOL: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = ("\n", "<tool_call>", '\n{"', "name", '": "', "get_weather", '", "', "arguments", '": ', '{"city": "')
CALL_END = ('"}}', "\n", "</tool_call>")
BEFORE_CALL = ("<think>", *TEXTS[:200], "\n", "</think>", "\n\n", *TEXTS[:133])
REASONED = (*BEFORE_CALL, *CALL, *TEXTS[len(BEFORE_CALL) + len(CALL) + len(CALL_END) :], *CALL_END)


def agent() -> Kind:
    """Return answers that reason in two fifths of their tokens, and then have text, and the arguments of a call."""
    assert len(REASONED) == STEPS
    parser = AnswerParser(
        tool_format="hermes", tools=(Tool("get_weather", TOOL),), reasoning=MarkerPair("<think>", "</think>")
    )
    parts = [part for text in REASONED for part in parser.feed(text)] + parser.finish()
    assert {type(part) for part in parts} == {Reasoning, Text, CallStart, CallArguments, CallEnd}
    return Kind(
        "tools and reasoning, ",
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": TOOL}}],
        },
        REASONED,
        {"tools": "hermes", "reasoning": ["<think>", "</think>"], "inside": False},
        len([part for part in parts if not isinstance(part, CallEnd)]),
    )


async def read(port: int, body: dict[str, Any], streams: int) -> list[Answer]:
    return await asyncio.gather(*(stream("127.0.0.1", port, body) for _ in range(streams)))


def measure(kind: Kind, streams: int) -> tuple[float, int, int]:
    """Return (seconds of the gateway's processor for a token, tokens, events that came together with others)."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="modelctl-bench-") as scratch, socket.socket() as listener:
        path = Path(scratch, "front")
        supervisor = spawn.Process(target=stand_in, args=(f"ipc://{path}", streams, kind.texts, kind.format))
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
        answers = asyncio.run(read(listener.getsockname()[1], kind.body, streams))
        ours.send("done")
        spent = ours.recv() - now
        server.terminate()
        server.join()
        supervisor.terminate()
        supervisor.join()
    tokens, events = STEPS * streams, sum(answer.events for answer in answers)
    if not all(answer.finished for answer in answers):
        raise RuntimeError(f"an answer did not end: {[answer.error for answer in answers][:1]}")
    return spent / tokens, tokens, kind.events * streams - events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round: tries the script itself")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    results = []
    texts: dict[int, float] = {}
    """The gateway's time for a token of a text, by the number of streams."""
    for kind, streams in product((Kind("", {"model": "m", "prompt": "x"}), agent()), STREAMS):
        rounds = []
        for _ in range(1 if arguments.quick else 3):
            http, tokens, joined = measure(kind, streams)
            alone = seconds_a_token(on_a_loop, streams)
            rounds.append((http - alone, http, alone, joined))
            name = f"{kind.name}{streams} streams"
            print(f"{name}: {1e6 * http:.1f} µs, alone {1e6 * alone:.1f} µs, {tokens} tokens", flush=True)
        more, http, alone, joined = sorted(rounds)[len(rounds) // 2]
        results += [
            Result(f"{name}: processor time of a token, gateway", 1e6 * http, "µs"),
            Result(f"{name}: processor time of a token, AsyncClient alone", 1e6 * alone, "µs"),
            Result(
                f"{name}: processor time of a token, gateway minus AsyncClient", 1e6 * more, "µs",
                "<= 15" if streams == 32 else None,
            ),
            Result(f"{name}: tokens joined with others", joined, "tokens"),
        ]  # fmt: skip
        if streams in texts:
            results.append(Result(f"{name}: gateway, by the same for a text", http / texts[streams], "ratio"))
        texts.setdefault(streams, http)
    write("http-path", results, arguments.out)


if __name__ == "__main__":
    main()
