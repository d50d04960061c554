"""Measure for how much of a decode step the GPU has nothing to do, by the profiler's trace of an engine.

    python -m benchmarks.gpu_idle [--models 1b 8b 1b-exl2-rounded] [--streams 1 8 32]

A step begins with the kernel that fetches embeddings (``decode.kernels.embed``). "Between two steps" is the time from
the end of the kernel before it until its beginning, without the copies in between. "Within a step" is the sum of the
gaps between the kernels of one captured graph. The profiler slows the host down, so the step is also timed without it.
"""

import itertools
import statistics
import time
from typing import Any

from benchmarks.harness import arguments_for, entry, requests, spec_of
from benchmarks.report import Result, write
from model_worker.engine import Job
from model_worker.engines import build_engine
from protocol.request import SamplingParams

STREAMS = (1, 8, 32)
WARM, STEPS = 40, 60
NEW = 8 + 2 * WARM + STEPS + 4
"""Tokens of an answer: more than there are steps."""
FIRST = "embed"
MOST_IDLE = 0.1

Interval = tuple[float, float]


def idle(intervals: list[Interval]) -> float:
    """Return the time in which none of the intervals runs, from the first begin to the last end."""
    total, end = 0.0, intervals[0][0]
    for begin, until in sorted(intervals):
        total += max(0.0, begin - end)
        end = max(end, until)
    return total


def steps_of(events: list[tuple[str, float, float]]) -> list[tuple[float, float, float]]:
    """Return (duration, idle before the step, idle within it) of each step.

    events  (name, begin, end) of kernels and copies, in order of their begin
    """
    firsts = [number for number, (name, _, _) in enumerate(events) if name == FIRST]
    found = []
    for first, following in itertools.pairwise(firsts):
        last = following - 1
        while events[last][0].startswith(("Memcpy", "Memset")):
            last -= 1
        within = idle([(begin, end) for _, begin, end in events[first : last + 1]])
        before = idle([(begin, end) for _, begin, end in events[last : following + 1]])
        found.append((events[following][1] - events[first][1], before, within))
    return found


def measure(name: str, made: dict[str, Any], streams: list[int]) -> list[Result]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    engine = build_engine(spec_of(made))
    engine.load(lambda *_: None)
    results = []
    for count in streams:
        asked = requests(name, made["model_dir"], count, seed=count)
        for number, request in enumerate(asked):
            engine.submit(Job(number, tuple(request.ids), NEW, SamplingParams(temperature=0), min_new_tokens=NEW))
        for _ in range(WARM + 8):
            engine.step()
        times = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begun)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(WARM):
                engine.step()
            torch.cuda.synchronize()
        events = sorted(
            (
                (e.name, e.time_range.start, e.time_range.end)
                for e in profiled.events() or ()
                if str(e.device_type).endswith("CUDA")
            ),
            key=lambda event: event[1],
        )
        found = steps_of(events)[5:-2]
        step, before, within = (statistics.median(column) for column in zip(*found, strict=True))
        label = f"{name}, {count} streams: "
        results += [
            Result(f"{label}step, without the profiler", statistics.median(times) * 1000, "ms"),
            Result(f"{label}step in the trace", step / 1000, "ms"),
            Result(f"{label}idle between two steps", before / step, "share of the step", f"<= {MOST_IDLE}"),
            Result(f"{label}idle between two kernels of a step", within / step, "share of the step"),
        ]
        engine.reset()
    engine.close()
    return results


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--models", nargs="+", default=["1b", "8b", "1b-exl2-rounded"])
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    arguments = parser.parse_args()
    results: list[Result] = []
    for model in arguments.models:
        most = max(arguments.streams)
        results += measure(model, entry(arguments, model, most, max(most, 8) * 512), arguments.streams)
        write("gpu-idle", results, arguments.out)


if __name__ == "__main__":
    main()
