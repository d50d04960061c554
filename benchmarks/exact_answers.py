"""Check the demo models' known answers on a GPU: all weights, all caches, every number of answers at once.

    python -m benchmarks.exact_answers [--most 32]

For fp16 and GPTQ every answer must be the known one. A conversion to EXL2 loses a little, so the same weights are also
asked one prompt at a time with ``graphs: false``: the figure is the share of answers that are right, and it must be no
less with captured steps.
"""

import itertools
from typing import Any

from benchmarks.harness import arguments_for, entry, spec_of
from benchmarks.models import source_of
from benchmarks.report import Result, write
from model_worker.engine import Failed, Finished, Job, NewTokens
from model_worker.engines import build_engine
from protocol.request import SamplingParams
from tools.demo_models import corpus

MODELS = ("letters", "stories", "letters-gptq", "stories-gptq", "letters-exl2-rounded", "stories-exl2-rounded")
CACHES = ("FP16", "Q8", "Q6", "Q4")
FEWEST = 12
"""Prompts that are asked at least for each number of answers at once."""


def texts(engine: Any, prompts: list[str]) -> list[str]:
    """Return the greedy answers to prompts that are asked all at once."""
    said = [""] * len(prompts)
    for number, prompt in enumerate(prompts):
        engine.submit(Job(number, tuple(engine.encode(prompt)), 1000, SamplingParams(temperature=0)))
    left = len(prompts)
    while left:
        for event in engine.step():
            if isinstance(event, NewTokens | Finished):
                said[event.job] += event.text
            left -= isinstance(event, Finished | Failed)
    return said


def right(engine: Any, pairs: list[tuple[str, str]], at_once: int) -> list[bool]:
    few = list(itertools.islice(itertools.cycle(pairs), -(-FEWEST // at_once) * at_once))
    found = []
    for group in itertools.batched(few, at_once) if hasattr(itertools, "batched") else _batched(few, at_once):
        answers = texts(engine, [prompt for prompt, _ in group])
        found += [said == expected for said, (_, expected) in zip(answers, group, strict=True)]
    return found


def _batched(items: list[Any], size: int) -> list[list[Any]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--most", type=int, default=32)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    arguments = parser.parse_args()
    results: list[Result] = []
    for model, cache in itertools.product(arguments.models, CACHES):
        pairs = [pair for pair in corpus.TEST_PROMPTS[source_of(model)] if len(pair[0]) < 800 and len(pair[1]) < 420]
        pairs = pairs[:: max(1, len(pairs) // 32)]
        made = entry(arguments, model, arguments.most, arguments.most * 1024, cache_mode=cache)
        reference = 1.0
        if "exl2" in model:
            engine = build_engine(spec_of(made | {"graphs": False}))
            engine.load(lambda *_: None)
            alone = right(engine, pairs, 1) + right(engine, pairs, 8)
            reference = sum(alone) / len(alone)
            engine.close()
            del engine
        engine = build_engine(spec_of(made))
        engine.load(lambda *_: None)
        found = [answer for at_once in range(1, arguments.most + 1) for answer in right(engine, pairs, at_once)]
        engine.close()
        del engine
        share = sum(found) / len(found)
        name = f"{model}, {cache}: answers that are right, 1 to {arguments.most} at once"
        results.append(Result(name, share, f"share of {len(found)}", None if "exl2" in model else ">= 1"))
        if "exl2" in model:
            name = f"{model}, {cache}: the same with graphs: false, 1 and 8 at once"
            results.append(Result(name, reference, "share"))
        print(results[-1], flush=True)
        write("exact-answers", results, arguments.out)


if __name__ == "__main__":
    main()
