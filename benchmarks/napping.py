"""Put the demo models to sleep and wake them many times: all weights, all caches. Do they answer as before, and is
anything left behind?

    python -m benchmarks.napping [--naps 1000]

The naps are divided among the models and caches, each in an engine of its own in this process. Every test prompt is
asked before the first nap and after the last one, 32 at once. GPU memory, resident memory and descriptors after the
last nap are compared with those after a few naps.
"""

import gc
import itertools
from typing import Any

import psutil

from benchmarks.exact_answers import CACHES, MODELS, texts
from benchmarks.harness import arguments_for, entry, spec_of
from benchmarks.models import source_of
from benchmarks.report import Result, write
from model_worker.engines import build_engine
from tools.demo_models import corpus

NAPS, FIRST = 1000, 4
AT_ONCE = 32
MIB = 1 << 20


def nap(engine: Any) -> None:
    engine.sleep(lambda: None)
    engine.wake(lambda: None)


def answers(engine: Any, prompts: list[str]) -> list[str]:
    return [text for begin in range(0, len(prompts), AT_ONCE) for text in texts(engine, prompts[begin:][:AT_ONCE])]


def held() -> tuple[float, float, int]:
    """Return MiB of GPU memory that is in use, MiB of this process's resident memory, and its descriptors."""
    import torch

    gc.collect()
    free, total = torch.cuda.mem_get_info()
    process = psutil.Process()
    return (total - free) / MIB, process.memory_info().rss / MIB, process.num_fds()


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--naps", type=int, default=NAPS)
    arguments = parser.parse_args()
    cases = list(itertools.product(MODELS[:2] if arguments.quick else MODELS, CACHES))
    each = -(-arguments.naps // len(cases))
    naps = differ = asked = 0
    grown: list[tuple[float, float, int]] = []
    for model, cache in cases:
        prompts = [prompt for prompt, known in corpus.TEST_PROMPTS[source_of(model)] if len(prompt) < 800 > len(known)]
        made = entry(arguments, model, AT_ONCE, AT_ONCE * 1024, cache_mode=cache)
        engine = build_engine(spec_of(made, sleep=True))
        engine.load(lambda *_: None)
        before = answers(engine, prompts)
        for _ in range(FIRST):
            nap(engine)
        first = held()
        for _ in range(each - FIRST):
            nap(engine)
        last = held()
        differ += sum(a != b for a, b in zip(before, answers(engine, prompts), strict=True))
        naps, asked = naps + each, asked + len(prompts)
        grown.append((last[0] - first[0], last[1] - first[1], last[2] - first[2]))
        engine.close()
        del engine
        print(f"{model}, {cache}: {each} naps, {len(prompts)} prompts, {differ} differ so far, {grown[-1]}", flush=True)
        write("napping", figures(naps, asked, differ, grown), arguments.out)


def figures(naps: int, asked: int, differ: int, grown: list[tuple[float, float, int]]) -> list[Result]:
    gpu, resident, descriptors = (max(column) for column in zip(*grown, strict=True))
    return [
        Result("naps", naps, "", f">= {NAPS}"),
        Result("prompts asked before and after", asked, ""),
        Result("answers that differ afterwards", differ, "", "<= 0"),
        Result("growth of GPU memory, the most of a model", gpu, "MiB", "<= 4"),
        Result("growth of resident memory, the most of a model", resident, "MiB", "<= 32"),
        Result("growth of descriptors, the most of a model", descriptors, "", "<= 0"),
    ]


if __name__ == "__main__":
    main()
