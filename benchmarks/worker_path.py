"""Measure the time that the worker adds to each step of the engine, from its return to the next call, and to a token.

    python -m benchmarks.worker_path [--step-ms 2] [--out DIR]

The worker's own loop and link run in this process. They drive an engine that computes nothing for STEP_MS and then
returns one token for each stream. A second process plays the supervisor and reads. The engine notes when its step
returns and when it is called again. The time between is what serving adds to a step, compared with the bare generator's
loop. It is measured in processor time of the loop's thread, which other programs do not affect, and also in wall-clock
time. The same is measured with steps that take no time, minus their cost without serving. That is the cost of serving
when nothing has to wake up and every cache is warm.

At the end a pass of the garbage collector is measured in a worker with a model: once with the loaded objects, and once
with these objects frozen, as in a worker. Such a pass stops every stream while it lasts.
"""

import argparse
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from time import perf_counter, thread_time

import zmq

from benchmarks.report import RESULTS, Result, write
from model_worker.engine import Capabilities, EngineEvent, EngineStats, Finished, Job, NewTokens, ProgressCallback
from model_worker.engines import build_engine
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.tokenizer import Tokenizer
from model_worker.intake import ModelTraits
from model_worker.link import WorkerLink
from model_worker.loop import WorkerLoop
from model_worker.text import TextStream
from protocol.codec import decode, encode, is_events, pack_body
from protocol.messages import TERMINAL, WORKER_TO_SUPERVISOR, Events, Hello, JobMessage, Shutdown
from protocol.process.worker_spec import EngineSpec, WorkerSpec
from protocol.request import SamplingParams
from tools.demo_models import directory

STREAMS = (1, 8, 32)
STEPS = 1500
RESTLESS_STEPS = 200_000
STEP_SECONDS = {1: 3.7e-3, 8: 5.3e-3, 32: 8.6e-3}
"""Seconds of a step of a 1B model on an H200."""
CLIENTS = 1
"""Connections over which the streams are spread. Each one gets an EVENTS frame per step."""


class PacedEngine:
    """An engine that gives each of ``streams`` jobs a token at each step, once all are there. A step takes ``step_s``
    seconds."""

    def __init__(self, texts: Sequence[str], step_s: float, streams: int) -> None:
        self._texts, self._step_s, self._streams = texts, step_s, streams
        self._jobs: dict[int, Job] = {}
        self._steps = 0
        self.called: list[tuple[float, float]] = []
        """Wall-clock and processor time, in seconds, at each call of ``step``."""
        self.returned: list[tuple[float, float]] = []

    def __call__(self, spec: EngineSpec) -> "PacedEngine":
        return self

    def load(self, progress: ProgressCallback) -> None: ...

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(1 << 20, max(STREAMS), frozenset(), False, "none", "none")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    chat_template = None

    constraints = None

    def encode_rendered(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id % 256])

    def submit(self, job: Job) -> None:
        self._jobs[job.id] = job

    def step(self) -> list[EngineEvent]:
        if len(self._jobs) < self._streams:
            return []
        begun = perf_counter()
        self.called.append((begun, thread_time()))
        text = self._texts[self._steps % len(self._texts)]
        self._steps += 1
        if self._steps == STEPS:
            events: list[EngineEvent] = [Finished(job, (self._steps,), text, "length", 1, STEPS) for job in self._jobs]
        else:
            events = [NewTokens(job, (self._steps,), text) for job in self._jobs]
        while perf_counter() - begun < self._step_s:
            pass
        used = thread_time()
        self.returned.append((perf_counter(), used))
        return events

    def cancel(self, job_id: int) -> None: ...

    def reset(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(0, len(self._jobs), self._steps)

    def close(self) -> None: ...


class RestlessEngine(PacedEngine):
    """An engine that gives every job the same token at each of ``steps`` steps, and then the end."""

    def __init__(self, streams: int, steps: int) -> None:
        super().__init__((), 0.0, streams)
        self._last, self._events = steps, list[EngineEvent]()
        self.used = 0.0
        """Processor time of the engine's thread in seconds, from the first step to the end."""

    def step(self) -> list[EngineEvent]:
        if len(self._jobs) < self._streams:
            return []
        self._steps = step = self._steps + 1
        if step == 1:
            self._events = [NewTokens(job, (1000,), " token") for job in self._jobs]
            self.used = -thread_time()
        elif step == self._last:
            self.used += thread_time()
            return [Finished(job, (1000,), " token", "length", 1, step) for job in self._jobs]
        return self._events


def stand_in(endpoint: str, streams: int, done: Event) -> None:
    """Play the supervisor in a process of its own: give out the jobs, read to the last event of each, send SHUTDOWN."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.bind(endpoint)
        ended = 0
        while ended < streams:
            sender, frame = socket.recv_multipart()
            if is_events(frame) and b"finish_reason" not in frame:
                continue  # frames are read as fast as they come
            message = decode(frame, WORKER_TO_SUPERVISOR)
            if isinstance(message, Hello):
                body = pack_body({"prompt": "x", "max_tokens": RESTLESS_STEPS})
                for number in range(streams):
                    job = JobMessage(number % CLIENTS, 1 + number, {}, body)
                    socket.send_multipart([sender, encode(job)])
            elif isinstance(message, Events):
                ended += sum(bool(entry.flags & TERMINAL) for entry in message.index)
        socket.send_multipart([sender, encode(Shutdown())])
        done.wait()  # if the connection ended, the worker would end


def serve(engine: PacedEngine, streams: int) -> None:
    """Run the worker's loop and its link with this engine, until all streams have ended."""
    with tempfile.TemporaryDirectory(prefix="modelctl-bench-") as scratch:
        endpoint = f"ipc://{scratch}/back"
        spawn = multiprocessing.get_context("spawn")
        done = spawn.Event()
        reader = spawn.Process(target=stand_in, args=(endpoint, streams, done))
        reader.start()
        while not Path(scratch, "back").exists():
            time.sleep(0.01)
        spec = WorkerSpec(EngineSpec("m", "", "/"), 1, "", endpoint, b"w", "", os.getppid())
        link = WorkerLink(spec)
        loop = WorkerLoop(engine, link)
        link.hello()
        link.ready(engine.capabilities, ModelTraits(), load_seconds=0.0, max_jobs=loop.max_jobs)
        loop.run()
        done.set()
        link.close()
        reader.join()


def added(streams: int, step_s: float, texts: Sequence[str]) -> tuple[list[float], list[float]]:
    """Return the seconds from the return of each step to the next call, with ``streams`` streams running.

    Two lists: wall-clock time and processor time.
    """
    engine = PacedEngine(texts, step_s, streams)
    serve(engine, streams)
    between = zip(engine.returned[50:-1], engine.called[51:], strict=True)
    wall, processor = zip(*((c[0] - r[0], c[1] - r[1]) for r, c in between), strict=True)
    return list(wall), list(processor)


def added_at_once(streams: int) -> float:
    """Return the seconds of processor time that are added to a step that takes none."""
    served, alone = RestlessEngine(streams, RESTLESS_STEPS), RestlessEngine(streams, RESTLESS_STEPS)
    serve(served, streams)
    for number in range(streams):
        alone.submit(Job(number, (1,), RESTLESS_STEPS, SamplingParams()))
    for _ in range(RESTLESS_STEPS):
        alone.step()
    return (served.used - alone.used) / RESTLESS_STEPS


def text_seconds(tokenizer: Tokenizer, stops: Sequence[str]) -> float:
    """Return the seconds per token that turning ids into text takes: the median of many answers."""
    ids = tokenizer.encode("Once upon a time there was a small fox who lived in a forest and played the violin. ") * 8
    rounds = []
    for _ in range(50):
        stream: TextStream = tokenizer.stream(ids[:8], stops)
        begun = perf_counter()
        for token_id in ids:
            stream.push(token_id)
        rounds.append((perf_counter() - begun) / len(ids))
    return statistics.median(rounds)


def collector_seconds() -> tuple[float, float]:
    """Return the seconds of a full pass over all objects, and of one without the loaded objects."""
    engine = build_engine(EngineSpec("stories", "transformers", str(directory("stories"))))
    engine.load(lambda *_: None)
    gc.collect()
    begun = perf_counter()
    gc.collect()
    whole = perf_counter() - begun
    gc.freeze()
    begun = perf_counter()
    gc.collect()
    return whole, perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=2.0, help="length of the engine's steps")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    arguments = parser.parse_args()
    tokenizer = Tokenizer(ModelDir(str(directory("stories"))))
    texts = [tokenizer.decode([token_id]) or "?" for token_id in range(256, 600)]
    results = [
        Result("text of a token", 1e6 * text_seconds(tokenizer, ()), "µs", "<= 2"),
        Result("text of a token, two stop strings", 1e6 * text_seconds(tokenizer, ("\n\nUser:", "</s>")), "µs", "<= 2"),
    ]
    for streams in STREAMS:
        gc.collect()
        wall, processor = added(streams, arguments.step_ms / 1000, texts)
        median = statistics.median(processor)
        results += [
            Result(f"{streams} streams: added to a step", 1e6 * median, "µs", f"<= {40 + 3 * streams}"),
            Result(f"{streams} streams: the same in wall time", 1e6 * statistics.median(wall), "µs"),
            Result(f"{streams} streams: the same in wall time, p99", 1e6 * statistics.quantiles(wall, n=100)[98], "µs"),
            Result(f"{streams} streams: share of a step of a 1B model", median / STEP_SECONDS[streams], "ratio"),
        ]
        at_once, target = 1e6 * added_at_once(streams), f"<= {2.5 + 0.3 * (streams - 1):.1f}"
        results.append(Result(f"{streams} streams: added to a step that takes no time", at_once, "µs", target))
    whole, set_aside = collector_seconds()
    results += [
        Result("garbage collector, all of a loaded worker", 1e3 * whole, "ms"),
        Result("garbage collector, as a worker runs", 1e3 * set_aside, "ms", "<= 1"),
    ]
    write("worker-path", results, arguments.out)


if __name__ == "__main__":
    main()
