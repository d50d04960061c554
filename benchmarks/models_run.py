"""Every model loads, streams, is cancelled and unloads, through a supervisor and a worker; what it said is kept.

    python -m benchmarks.models_run [--gpu 0] [--models letters stories letters-exl2 1b 1b-exl2 8b]

The demo models' answers to their test prompts are known (``model_worker.demo_models.corpus``; the CPU engine gives
exactly these): as they are shipped, in fp16 with an FP16 cache, every answer must be right. Of a conversion the share
of right answers is a figure. Random weights decide by less than rounding can change, so for these the same prompts are
asked alone and all at once, and the first token that differs is a figure, too.

Writes models-run.json and models-run.txt.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import Request, Server, arguments_for, entry, requests
from benchmarks.memory import GIB, MIB, Memory, memory, wait_for
from benchmarks.report import Result, write
from model_worker.demo_models import NAMES, corpus

MODELS = ("letters", "stories", "letters-exl2", "1b", "1b-exl2", "8b")
BATCH = 16
TOKENS = 64


class Story:
    """Lines of the log: printed, and kept for the file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def tell(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)


def answers(server: Server, model: str, fields: list[dict[str, Any]], tokens: int, at_once: int) -> list[Any]:
    """A completion for each request, greedy; a client and a thread for each of those under way."""

    def one(request: dict[str, Any]) -> Any:
        with server.client() as client:
            return client.complete(model, max_tokens=tokens, temperature=0, **request)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, fields))


def right_answers(server: Server, model: str, story: Story, few: bool) -> Result:
    name = model.removesuffix("-exl2")
    pairs = corpus.TEST_PROMPTS[name][: 12 if few else None]
    said = answers(server, model, [{"prompt": prompt} for prompt, _ in pairs], 1000, BATCH)
    right = sum(answer.text == expected for answer, (_, expected) in zip(said, pairs, strict=True))
    story.tell(f"{model}: {right} of {len(pairs)} test prompts answered as expected; for instance")
    for (prompt, _), answer in list(zip(pairs, said, strict=True))[:2]:
        story.tell(f"    {prompt[-80:]!r} -> {answer.text[:100]!r} ({answer.finish_reason})")
    return Result(
        f"{model}: test prompts answered as on the CPU", right / len(pairs), "share",
        ">= 1" if model == name else None,
    )  # fmt: skip


def divergence(server: Server, model: str, asked: list[Request], story: Story) -> list[Result]:
    """The same prompts alone, then all at once."""
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


def cancelled(server: Server, model: str, request: Request, story: Story) -> Result:
    """Milliseconds from ``cancel`` after five deltas to the answer's end; then nothing of it may be left."""
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
    if model.removesuffix("-exl2") in NAMES:
        results.append(right_answers(server, model, story, quick))
        longest, _ = max(corpus.TEST_PROMPTS[model.removesuffix("-exl2")], key=lambda pair: len(pair[1]))
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
    arguments = parser.parse_args()
    models = arguments.models or (["letters", "tiny"] if arguments.quick else list(MODELS))
    entries = {model: entry(arguments, model, BATCH, BATCH * 1024) for model in models}
    held, story = memory(arguments.gpu), Story()
    results: list[Result] = []
    with Server({name: made | {"autostart": False} for name, made in entries.items()}, wait=False) as server:
        for model, made in entries.items():
            results += run(server, model, made, held, story, arguments.quick)
            write("models-run", results, arguments.out)  # kept also when a later one fails
            Path(arguments.out, "models-run.txt").write_text("\n".join(story.lines) + "\n")


if __name__ == "__main__":
    main()
