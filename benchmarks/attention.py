"""Compare an attention call over pages with PyTorch's own flash attention over contiguous keys and values.

    python -m benchmarks.attention          needs a CUDA device; about a minute

The heads are those of the 1B (32 query heads and 8 key heads of 64) and the 8B (32, 8 of 128), in fp16. Pages of 256
tokens are scattered over the cache. Decoding: one new token for each of 1, 8, 32 and 64 sequences of 200 to 8,000
tokens. Prompts: chunks of 256 to 2,048 tokens of one sequence behind 0 to 8,000.

Device times are medians of replays of CUDA graphs. A graph calls on four caches in turn, as layers do. Our calls and
PyTorch's are measured in turn. "with append": the call also writes the new keys and values into the pages, which
PyTorch's call never does. Host time is that of one call of ``flash_attn_with_kvcache`` from Python.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import report
from model_worker.engines.paged import attention as paged_attention

PAGE, LAYERS, ROUNDS = 256, 4, 3
HEADS, KV_HEADS = 32, 8
Call = Callable[[int], torch.Tensor]  # the argument is the number of the layer


@dataclass
class Setup:
    """One case of attention, computed in several ways."""

    name: str
    appending: Call
    reading: Call
    contiguous: Call
    first_of_step: Call  # like appending, but nothing is known from an earlier call


def graph_of(call: Call) -> torch.cuda.CUDAGraph:
    for layer in range(LAYERS):
        call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            for layer in range(LAYERS):
                call(layer)
    return graph


def device_times(calls: list[Call], replays: int = 9) -> list[float]:
    """Return the median microseconds on the device of each call. The calls are measured in turn."""
    graphs, steps = [], []
    for call in calls:
        graphs.append(graph_of(call))
        steps.append(dict(paged_attention._steps))  # keeps the tensors alive that the graph reads
    times: list[list[float]] = [[] for _ in calls]
    for replay in range(replays + 2):
        for graph, found in zip(graphs, times, strict=True):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            graph.replay()
            after.record()
            after.synchronize()
            if replay >= 2:
                found.append(before.elapsed_time(after) * 1000 / (ROUNDS * LAYERS))
    return [statistics.median(found) for found in times]


def setup(name: str, past: list[int], q_len: int, head_dim: int, dtype: torch.dtype = torch.float16) -> Setup:
    """Return a case with sequences of ``past`` tokens and q_len new ones."""
    rng = random.Random(0)
    batch = len(past)
    needed = [-(-(n + q_len) // PAGE) for n in past]
    free = list(range(sum(needed)))
    rng.shuffle(free)
    table = torch.zeros(batch, max(needed), dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    lengths = torch.tensor(past, dtype=torch.int32, device="cuda")
    ends, table = lengths + q_len, table.cuda()
    starts_q = torch.arange(0, (batch + 1) * q_len, q_len, dtype=torch.int32, device="cuda")
    starts_k = torch.nn.functional.pad(ends.cumsum(0), (1, 0)).int()

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, KV_HEADS, head_dim, dtype=dtype, device="cuda")

    pages = [(numbers(sum(needed), PAGE), numbers(sum(needed), PAGE)) for _ in range(LAYERS)]
    tokens = sum(past) + batch * q_len
    rows = [(numbers(tokens), numbers(tokens)) for _ in range(LAYERS)]
    q = torch.randn(batch, q_len, HEADS, head_dim, dtype=dtype, device="cuda")
    k, v = numbers(batch, q_len), numbers(batch, q_len)
    longest = max(past) + q_len

    def appending(layer: int) -> torch.Tensor:
        return paged_attention.flash_attn_with_kvcache(
            q, *pages[layer], k, v, cache_seqlens=lengths, block_table=table, causal=True
        )

    def reading(layer: int) -> torch.Tensor:
        return paged_attention.flash_attn_with_kvcache(
            q, *pages[layer], cache_seqlens=ends, block_table=table, causal=True
        )

    def first_of_step(layer: int) -> torch.Tensor:
        paged_attention._steps.clear()
        return appending(layer)

    def contiguous(layer: int) -> torch.Tensor:
        out: torch.Tensor = torch.ops.aten._flash_attention_forward(
            q.flatten(0, 1), *rows[layer], starts_q, starts_k, q_len, longest, 0.0, True, False
        )[0]
        return out

    return Setup(name, appending, reading, contiguous, first_of_step)


def host_time(call: Call, calls: int = 100) -> float:
    """Return the microseconds of the host for one call, the median of 15 rounds."""
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(calls):
            call(i % LAYERS)
        times.append((time.perf_counter() - start) * 1e6 / calls)
    return statistics.median(times)


def cases(head_dim: int) -> list[Setup]:
    made = []
    for batch in (1, 8, 32, 64):
        spread = [200 + (7800 * i) // max(1, batch - 1) for i in range(batch)]
        random.Random(1).shuffle(spread)
        for past in ([200], [2000], [8000]) if batch == 1 else ([200] * batch, [2000] * batch, spread):
            what = f"{past[0]}" if len(set(past)) == 1 else "200-8000"
            made.append(setup(f"decode {batch}x{what}", [n - 1 for n in past], 1, head_dim))
    for chunk in (256, 512, 1024, 2048):
        made += [setup(f"prompt {chunk} behind {past}", [past], chunk, head_dim) for past in (0, 2048, 8000)]
    return made


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is visible")
    torch.manual_seed(0)
    results: list[report.Result] = []
    with torch.inference_mode():
        for head_dim in (64, 128):
            said = paged_attention.check(
                torch.device("cuda", torch.cuda.current_device()), heads=HEADS, kv_heads=KV_HEADS, head_dim=head_dim
            )
            print(f"head dim {head_dim}: {said}")
            ratios: dict[str, list[float]] = {"decode": [], "prompt": []}
            each = []
            for case in cases(head_dim):
                with_append, without, theirs = device_times([case.appending, case.reading, case.contiguous])
                ratios[case.name.split()[0]].append(with_append / theirs)
                name = f"dim {head_dim} {case.name}"
                each += [
                    report.Result(f"{name}: device, with append", round(with_append, 1), "us"),
                    report.Result(f"{name}: device, without", round(without, 1), "us"),
                    report.Result(f"{name}: PyTorch contiguous", round(theirs, 1), "us"),
                    report.Result(f"{name}: over PyTorch's", round(with_append / theirs, 3), "ratio"),
                ]
                del case
                torch.cuda.empty_cache()
            for kind, found in ratios.items():
                results += [
                    report.Result(
                        f"dim {head_dim} {kind}: worst over PyTorch's", round(max(found), 3), "ratio", "<= 1.3"
                    ),
                    report.Result(
                        f"dim {head_dim} {kind}: median", round(statistics.median(found), 3), "ratio", "<= 1.3"
                    ),
                ]
            results += each
        small = setup("", [200] * 8, 1, 64)
        results += [
            report.Result("host, decoding, with append", round(host_time(small.appending), 1), "us", "<= 30"),
            report.Result("host, decoding, without", round(host_time(small.reading), 1), "us", "<= 30"),
            report.Result("host, first call of a step", round(host_time(small.first_of_step), 1), "us"),
            report.Result("host, PyTorch's own call", round(host_time(small.contiguous), 1), "us"),
        ]
    report.write("attention", results)


if __name__ == "__main__":
    main()
