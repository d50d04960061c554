"""Feed mutated frames to the product's decoders, in a process of its own.

    python -m tests.fuzzing DIRECTION COUNT SEED

On success the process prints one line of JSON (inputs, refused, cpu_seconds, slowest_256_ms, grown_bytes, seed) and
exits with 0. On failure it prints the frame or its batch in hex. Equal seeds and counts give equal frames.
FUZZ_FRAME=hex runs that frame alone.
"""

import json
import os
import resource
import sys
import time
import tracemalloc
from contextlib import suppress

from protocol.chat import QUESTIONS
from protocol.errors import WireError
from protocol.request import GenerateRequest
from protocol.values import Unfit, read
from tests.fuzzing.auditing import Witness
from tests.fuzzing.corpus import corpus
from tests.fuzzing.mutating import Mutator
from tests.fuzzing.receivers import Receiver, receiver

MOST_SECONDS = 0.05
MOST_BYTES = 20_000_000
_BATCH = 256
_TRIES = 50
"""How often a slow input is timed at most. The machine may have been busy with other processes the first time."""


def main(direction: str, count: int, seed: int) -> int:
    """Run ``count`` frames, in whole batches. Return the exit code."""
    mutator, receive = Mutator(corpus(direction), seed), receiver(direction)
    if alone := os.environ.get("FUZZ_FRAME"):
        receive(bytes.fromhex(alone))
        return 0
    # warm up: imports, readers and caches of the first use must not be measured
    for model in (GenerateRequest, *QUESTIONS.values()):
        with suppress(Unfit):
            read(model, {})
    for _ in range(2000):
        _refused(receive, mutator.frame())
    witness = Witness()
    refused, slowest, slowest_batch, begun = 0, 0.0, 0.0, time.process_time()
    peak = _peak()
    for _ in range(count // _BATCH + 1):
        frames = [mutator.frame() for _ in range(_BATCH)]
        witness.armed = True
        started = time.perf_counter()
        for frame in frames:
            try:
                receive(frame)
            except WireError:
                refused += 1
            except BaseException:
                print(f"not a protocol error: FUZZ_FRAME={frame.hex()} seed {seed}", file=sys.stderr)
                raise
        taken = time.perf_counter() - started
        witness.armed = False
        slowest_batch = max(slowest_batch, taken)
        if taken > MOST_SECONDS:  # a faster batch cannot contain a frame that is too slow
            slowest = max(slowest, *(_seconds(receive, frame) for frame in frames))
        if witness.seen:
            print(f"in one of {[frame.hex() for frame in frames]}: {witness.seen}", file=sys.stderr)
            return 1
        if (grown := _peak() - peak) > MOST_BYTES:
            print(f"grown by {grown} bytes at one of {[frame.hex() for frame in frames]}", file=sys.stderr)
            return 1
    report = {
        "direction": direction,
        "inputs": (count // _BATCH + 1) * _BATCH,
        "refused": refused,
        "cpu_seconds": round(time.process_time() - begun, 2),
        "slowest_256_ms": round(slowest_batch * 1000, 2),
        "grown_bytes": _peak() - peak,
        "seed": seed,
    }
    print(json.dumps(report))
    if slowest > MOST_SECONDS:
        print(f"an input took {slowest * 1000:.1f} ms, seed {seed}", file=sys.stderr)
        return 1
    return 0


def cost(receive: Receiver, frame: bytes) -> tuple[float, int]:
    """Return (seconds of CPU, peak of the bytes that Python allocated) for one frame."""
    tracemalloc.start()
    try:
        _refused(receive, frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return _seconds(receive, frame), peak


def _seconds(receive: Receiver, frame: bytes) -> float:
    """Return the CPU time of the fastest of several tries."""
    best = float("inf")
    for _ in range(_TRIES):
        started = time.process_time()
        _refused(receive, frame)
        best = min(best, time.process_time() - started)
        if best <= MOST_SECONDS:
            break
    return best


def _refused(receive: Receiver, frame: bytes) -> bool:
    try:
        receive(frame)
    except WireError:
        return True
    return False


def _peak() -> int:
    """Return the peak of this process's resident memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
