"""Load, stream, cancel and unload every model through a supervisor and a worker, and keep a log of it.

    python -m benchmarks.models_run [--gpu 0] [--models letters letters-gptq 1b-exl2 ...]

The right answers of the demo models to their test prompts are known (``tools.demo_models.corpus``), and the CPU
engine gives exactly these. As shipped, in fp16 with an FP16 cache, every answer must be right. That also holds for
GPTQ's 4 bits, which leave the right token a lead of 3 logits at every step
(tests/benchmarks/test_results_and_models.py). For a conversion to EXL2 the share of right answers is a figure. With
random weights the margins are smaller than rounding errors. So their prompts are asked alone and all at once, and the
first token that differs is a figure, too.

A GPTQ model is loaded once more, and then the fp16 model of the same weights. The figures are how many greedy answers
of the two are equal, and with random weights how far apart the log-probabilities are (benchmarks.comparison).

Writes models-run.json and models-run.txt; with --gptq, models-run-gptq.json and .txt.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.comparison import WITH_LOGPROBS, compare
from benchmarks.harness import Request, Server, arguments_for, entry, requests
from benchmarks.memory import GIB, MIB, Memory, memory, wait_for
from benchmarks.models import source_of, twin_of
from benchmarks.report import Result, write
from tools.demo_models import NAMES, corpus

GPTQ = ("letters-gptq", "letters-gptq-act-order", "stories-gptq", "1b-gptq", "1b-gptq-act-order")
MODELS = ("letters", "stories", "letters-exl2", "1b", "1b-exl2", "8b")
BATCH = 16
TOKENS, ENOUGH = 64, 1000
"""Tokens of an answer: with random weights, and more than any answer of a demo model has."""
FEW = 12
"""Test prompts of a quick run."""


class Story:
    """The lines of the log, which are printed and kept for the file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def tell(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)


def answers(server: Server, model: str, fields: list[dict[str, Any]], tokens: int, at_once: int) -> list[Any]:
    """Return a greedy completion for each request. Each request in flight has a client and a thread of its own."""

    def one(request: dict[str, Any]) -> Any:
        with server.client() as client:
            return client.complete(model, max_tokens=tokens, temperature=0, **request)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, fields))


def right_answers(server: Server, model: str, story: Story, few: bool) -> Result:
    pairs = corpus.TEST_PROMPTS[source_of(model)][: FEW if few else None]
    said = answers(server, model, [{"prompt": prompt} for prompt, _ in pairs], ENOUGH, BATCH)
    right = sum(answer.text == expected for answer, (_, expected) in zip(said, pairs, strict=True))
    story.tell(f"{model}: {right} of {len(pairs)} test prompts answered as expected; for instance")
    for (prompt, _), answer in list(zip(pairs, said, strict=True))[:2]:
        story.tell(f"    {prompt[-80:]!r} -> {answer.text[:100]!r} ({answer.finish_reason})")
    return Result(
        f"{model}: test prompts answered as on the CPU", right / len(pairs), "share",
        None if model.endswith("-exl2") else ">= 1",
    )  # fmt: skip


def divergence(server: Server, model: str, asked: list[Request], story: Story) -> list[Result]:
    """Ask the same prompts alone, then all at once."""
    fields = [request.fields for request in asked]
    alone = [list(a.token_ids) for a in answers(server, model, fields, TOKENS, 1)]
    together = [list(a.token_ids) for a in answers(server, model, fields, TOKENS, len(fields))]
    first = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), TOKENS)
        for a, b in zip(alone, together, strict=True)
    ]
    story.tell(f"{model}: first token that differs between alone and {len(fields)} at once: {first} ({TOKENS}: none)")
    same = sum(at == TOKENS for at in first)
    return [
        Result(f"{model}: earliest difference, alone and {len(asked)} at once", min(first), "tokens"),
        Result(f"{model}: answers without any difference", same / len(asked), "share"),
    ]


def like_its_twin(server: Server, model: str, twin: str, made: dict[str, Any], quick: bool) -> list[Result]:
    """Compare a model with its twin. Each is started, one after the other. Answers of demo models must be equal."""
    demo = source_of(model) in NAMES
    if demo:
        prompts = [prompt for prompt, _ in corpus.TEST_PROMPTS[source_of(model)][: FEW if quick else None]]
        fields: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    else:
        fields = [request.fields | WITH_LOGPROBS for request in requests(model, made["model_dir"], BATCH, seed=1)]
    said = []
    for name in (model, twin):
        server.modelctl("start", name)
        server.wait_state(name, "ready")
        said.append(answers(server, name, fields, ENOUGH if demo else TOKENS, BATCH if demo else 1))
        server.modelctl("stop", name)
    own, of_twin = said
    return compare(model, "its dequantised fp16 twin's", own, of_twin, must_equal=demo)


def cancelled(server: Server, model: str, request: Request, story: Story) -> Result:
    """Measure milliseconds from ``cancel`` after five deltas to the answer's end. Then nothing of the request may be
    left."""
    with server.client() as client:
        stream = client.generate(model, max_tokens=1000, temperature=0, **request.fields)
        for _ in range(5):
            next(stream)
        begun = time.perf_counter()
        stream.cancel()
        for _ in stream:
            pass
        spent = time.perf_counter() - begun
        reason = str(stream.finish_reason)
    engine = server.wait_idle(model)["engine_stats"]
    story.tell(f"{model}: finish_reason {reason} after {1000 * spent:.1f} ms; then the engine: {engine}")
    if reason != "cancelled":
        raise RuntimeError(f"{model}: a cancelled answer ended with {reason}")
    return Result(f"{model}: cancelled within", 1000 * spent, "ms")


def run(server: Server, model: str, made: dict[str, Any], held: Memory, story: Story, quick: bool) -> list[Result]:
    empty = held.used()
    server.modelctl("start", model)
    status = server.wait_state(model, "ready")
    pid = status["pid"]
    story.tell(f"{model}: ready in {status['load_seconds']} s on {status['device']}; {status['attention']}")
    asked = requests(model, made["model_dir"], BATCH, seed=1)
    results = [Result(f"{model}: loaded in", float(status["load_seconds"]), "s")]
    with server.client() as client:
        deltas = list(client.generate(model, max_tokens=8, temperature=0, **asked[0].fields))
    story.tell(f"{model}: streamed {[delta.text for delta in deltas]}")
    if source_of(model) in NAMES:
        results.append(right_answers(server, model, story, quick))
        longest, _ = max(corpus.TEST_PROMPTS[source_of(model)], key=lambda pair: len(pair[1]))
        asked = [Request([], {"prompt": longest})]
    else:
        results += divergence(server, model, asked, story)
    results.append(cancelled(server, model, asked[0], story))
    full = held.of(pid)
    story.tell(f"{model}: pid {pid} holds {full} (bytes by GPU)")
    server.modelctl("stop", model)
    wait_for(lambda: not held.of(pid), 30, "its memory to come back")
    left = held.used() - empty
    story.tell(f"{model}: stopped; in use on the GPUs: {held.used()} bytes, {empty} before it was loaded")
    return [
        *results,
        Result(f"{model}: VRAM held", sum(full.values()) / GIB, "GiB"),
        Result(f"{model}: VRAM left in use after it was stopped", left / MIB, "MiB", "<= 1"),
    ]


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--models", nargs="+", help=f"default: {' '.join(MODELS)}; with --quick letters and tiny")
    parser.add_argument("--gptq", action="store_true", help=f"instead: {' '.join(GPTQ)}")
    arguments = parser.parse_args()
    usual = GPTQ if arguments.gptq else ("letters", "tiny") if arguments.quick else MODELS
    models, name = arguments.models or list(usual), "models-run-gptq" if arguments.gptq else "models-run"
    twins = {model: twin for model in models if (twin := twin_of(model))}
    entries = {model: entry(arguments, model, BATCH, BATCH * 1024) for model in (*models, *twins.values())}
    held, story = memory(arguments.gpu), Story()
    results: list[Result] = []
    with Server({name: made | {"autostart": False} for name, made in entries.items()}, wait=False) as server:
        for model in models:
            results += run(server, model, entries[model], held, story, arguments.quick)
            if model in twins:
                results += like_its_twin(server, model, twins[model], entries[model], arguments.quick)
            write(name, results, arguments.out)  # so that they are kept if a later model fails
            Path(arguments.out, f"{name}.txt").write_text("\n".join(story.lines) + "\n")


if __name__ == "__main__":
    main()
