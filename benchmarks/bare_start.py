"""Produce the first token of a model without serving: with an engine in a process of its own, and nothing else.

    python -m benchmarks.bare_start ENGINE MODEL_DIR DEVICE PROMPT [kept]

The script prints one line when the token is there, then ends. It imports only what it needs. With ``kept`` it keeps
imported and loaded objects from the garbage collector, as a worker does; scripts do not do that by themselves.
"""

import gc
import os
import sys

from model_worker.engine import Finished, Job, NewTokens
from model_worker.engines import build_engine
from protocol.process.worker_spec import EngineSpec
from protocol.request import SamplingParams


def main(engine: str, directory: str, device: str, prompt: str, kept: str = "") -> None:
    if kept:
        gc.disable()
    spec = EngineSpec("m", engine, directory, device=device, max_seq_len=None, max_batch_size=8, options={})
    made = build_engine(spec)
    if kept:
        gc.freeze()
        gc.enable()
    made.load(lambda *_: None)
    if kept:
        gc.collect()
        gc.freeze()
    made.submit(Job(0, tuple(made.encode(prompt)), 8, SamplingParams(temperature=0.0)))
    while not any(isinstance(event, NewTokens | Finished) and event.token_ids for event in made.step()):
        pass
    print("token", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
