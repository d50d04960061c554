"""Measure models that take turns on one GPU: asleep in host memory against ended and loaded.

    python -m benchmarks.sleeping [--gpu 0] [--model 8b] [--swaps 60] [--quick] [--out DIR]

Four models with the same weights have a ``vram_limit`` that lets one of them be awake. (On the CPU a group does that.)
Requests of 64 tokens come one at a time, first in turn, then at random over all four. The first tokens are of those
requests that had to wait for their model. Answers are compared with the first ones of their model. With ``sleep: off``
the same requests end and load models.

The rate of waking is compared with a plain copy of pinned host memory to the GPU, in the same run. GPU memory, host
memory and descriptors of the workers after the first swaps are compared with those at the end.
"""

import random
import statistics
import time
from typing import Any

import psutil

from benchmarks.harness import Request, Server, arguments_for, entry, percentile, requests, spec_of
from benchmarks.report import Result, write
from model_worker.engines.exllamav2.vram import estimate

MODELS = ("a", "b", "c", "d")
TOKENS, BATCH, CACHE = 64, 8, 16384
SWAPS, LOADS = 100, 2
SEED = 5
GIB = 1 << 30
WITHIN_S = 300.0


def ask(server: Server, model: str, request: Request) -> tuple[float, float, list[int]]:
    """Return the seconds to the first token, the seconds to the last one, and the tokens."""
    ids: list[int] = []
    first = 0.0
    with server.client() as client:
        begun = time.perf_counter()
        for delta in client.generate(model, max_tokens=TOKENS, temperature=0, min_tokens=TOKENS, **request.fields):
            first = first or time.perf_counter() - begun
            ids += delta.token_ids
        return first, time.perf_counter() - begun, ids


def held(server: Server) -> dict[str, float]:
    """Return what all workers hold together: GPU memory, resident host memory, and descriptors."""
    processes = [psutil.Process(m["pid"]) for m in server.overview()["models"] if m["pid"]]
    return {
        "GPU memory": sum(m.get("vram_bytes") or 0 for m in server.overview()["models"]) / GIB,
        "resident memory": sum(p.memory_info().rss for p in processes) / GIB,
        "descriptors": float(sum(p.num_fds() for p in processes)),
    }


def swaps(server: Server, asked: dict[str, Request], order: list[str], whole: dict[str, list[int]]) -> dict[str, Any]:
    """Send requests to the models in this order. Return the times of those that had to wait for their model, how many
    answers differ from ``whole``, and the seconds of all of it."""
    waited, differ, begun = [], 0, time.perf_counter()
    for model in order:
        was_ready = server.status(model)["state"] == "ready"
        first, _, ids = ask(server, model, asked[model])
        differ += ids != whole[model]
        if not was_ready:
            waited.append(first)
    return {"waited": waited, "differ": differ, "seconds": time.perf_counter() - begun}


def plain_copy(size: int) -> float:
    """Return the bytes per second of a copy from pinned host memory to the GPU."""
    import torch

    size = min(size, 4 * GIB)
    host, there = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8).cuda()
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return size / min(seconds)


def main() -> None:
    parser = arguments_for(__doc__)
    parser.add_argument("--model", default="8b")
    parser.add_argument("--swaps", type=int, default=SWAPS, help="in turn, and as many again at random")
    arguments = parser.parse_args()
    model, count = ("letters", 8) if arguments.quick else (arguments.model, arguments.swaps)
    on_gpu = arguments.gpu != "cpu"
    results: list[Result] = []
    whole: dict[str, list[int]] = {}
    for form in ("ram", "off"):
        made = {name: entry(arguments, model, BATCH, CACHE, lazy=True, sleep=form) for name in MODELS}
        asked = {name: requests(model, made[name]["model_dir"], 1, seed=n)[0] for n, name in enumerate(MODELS)}
        settings: dict[str, Any] = {"host_memory": "100GiB"}
        if on_gpu:
            settings["vram_limit"] = {arguments.gpu: limit(arguments, model)}
        groups = None if on_gpu else {"all": {"models": list(MODELS), "loaded": 1}}
        with Server(made, wait=False, settings=settings, groups=groups) as server:
            rng = random.Random(SEED)
            if form == "off":
                loads = swaps(server, asked, [MODELS[n % 4] for n in range(LOADS)], whole)
                results += [
                    Result(f"{model}: first token after a load, median", statistics.median(loads["waited"]), "s"),
                    Result(f"{model}: swaps per minute, ended and loaded", 60 * LOADS / loads["seconds"], "1/min"),
                ]
                continue
            whole |= {name: ask(server, name, asked[name])[2] for name in MODELS}
            swaps(server, asked, list(MODELS), whole)
            before = held(server)
            for how, order in (
                ("in turn", [MODELS[n % 4] for n in range(count)]),
                ("at random", [rng.choice(MODELS) for _ in range(count)]),
            ):
                found = swaps(server, asked, order, whole)
                waited = found["waited"]
                results += [
                    Result(f"{model}, {how}: first token after a wake, median", statistics.median(waited), "s"),
                    Result(f"{model}, {how}: first token after a wake, p99", percentile(waited, 99), "s", "<= 1.0"),
                    Result(f"{model}, {how}: wakes", len(waited), ""),
                    Result(f"{model}, {how}: answers that differ from the first", found["differ"], "", "<= 0"),
                    Result(f"{model}, {how}: swaps per minute", 60 * len(waited) / found["seconds"], "1/min"),
                    Result(f"{model}, {how}: tokens per second", TOKENS * count / found["seconds"], "tokens/s"),
                ]
            after = held(server)
            for what, size in before.items():
                results += [Result(f"{model}: {what}, after / before", after[what] / size, "")] if size else []
            one = next(m for m in server.overview()["models"] if m["state"] == "asleep" and m["wake_s"])
            results.append(Result(f"{model}: host memory of one model", one["host_bytes"] / GIB, "GiB"))
            results.append(Result(f"{model}: GPU memory of one that sleeps", (one["vram_bytes"] or 0) / GIB, "GiB"))
            results.append(Result(f"{model}: time to wake", one["wake_s"], "s"))
            rate = one["host_bytes"] / one["wake_s"]
        if on_gpu:
            copy = plain_copy(int(one["host_bytes"]))
            results += [
                Result(f"{model}: rate of waking", rate / 1e9, "GB/s"),
                Result(f"{model}: rate of a plain pinned copy", copy / 1e9, "GB/s"),
                Result(f"{model}: waking / plain copy", rate / copy, "", ">= 0.8"),
            ]
    write("sleeping", results, arguments.out)


def limit(arguments: Any, model: str) -> str:
    """Return a vram_limit that one awake model and three sleeping ones need."""
    needs = estimate(spec_of(entry(arguments, model, BATCH, CACHE)))
    return f"{(needs.total + 6 * GIB) // (1 << 20)}MiB"


if __name__ == "__main__":
    main()
