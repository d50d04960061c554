"""Make the captured decode steps of a loaded model."""

from collections.abc import Callable
from typing import Any

import torch

from model_worker.engine import ProgressCallback
from model_worker.engines.exllamav2.decode.buckets import KERNEL_ROWS, PASSES, page_sizes, row_sizes
from model_worker.engines.exllamav2.decode.device_steps import DeviceSteps
from model_worker.engines.exllamav2.decode.embedding import HostEmbedding, NotReadableError
from model_worker.engines.exllamav2.decode.forward import use_graphs
from model_worker.engines.exllamav2.decode.graphs import DecodeGraphs
from model_worker.engines.exllamav2.decode.loop import DecodeLoop
from model_worker.engines.exllamav2.decode.obstacles import MIXTURE, most_rows, obstacle
from model_worker.engines.exllamav2.decode.pace import Pace
from model_worker.engines.exllamav2.decode.prompts import PromptPasses
from model_worker.engines.exllamav2.decode.tuning import finish_tuning, rows_of_kernels
from model_worker.engines.exllamav2.load import Loaded
from protocol.process.worker_spec import PAGE_TOKENS


def make_loop(
    loaded: Loaded, generator: Any, drawable: int, progress: ProgressCallback
) -> tuple[DecodeLoop | None, str]:
    """Capture the decode steps of a loaded model, and have the generator use them.

    Return the loop that takes the place of the generator's (None where tokens are speculated, and where nothing is
    captured), and how steps are launched, for people. ``progress`` gets the phases "capturing" and
    "capturing draft".
    """
    if not loaded.graphs:
        return None, _one_by_one(loaded.uncaptured)
    queries = loaded.draft_tokens + 1
    rows = most_rows(loaded.model, generator.max_batch_size, queries)
    why = obstacle(loaded.model, loaded.loras)
    if why is None and not rows:
        why = "its mixture of experts computes fewer rows at once than a step with speculated tokens has"
    if why is not None:
        return None, _one_by_one(why)
    try:
        graphs = _graphs(loaded, loaded.model, loaded.cache, loaded.loras, rows, queries)
    except NotReadableError as e:
        return None, _one_by_one(str(e))
    steps = None if loaded.draft_tokens else DeviceSteps(graphs, drawable)
    _capture(loaded, loaded.model, loaded.cache, loaded.loras, graphs, lambda *counts: progress("capturing", *counts))
    if loaded.draft_model is not None and obstacle(loaded.draft_model, None) is None:
        most = most_rows(loaded.draft_model, generator.max_batch_size, 1)
        draft = _graphs(loaded, loaded.draft_model, loaded.draft_cache, None, most, 1)
        _capture(
            loaded, loaded.draft_model, loaded.draft_cache, None, draft,
            lambda *counts: progress("capturing draft", *counts),
        )  # fmt: skip
    loop = None
    if steps is not None:
        loop = DecodeLoop(generator, steps, generator.iterate_gen, Pace(loaded.chunk_size, loaded.max_gap_s))
    text = "each step is one captured CUDA graph"
    if loop is not None:
        text += ", queued before the last one is read"
    if rows < generator.max_batch_size:
        text += f"; steps of more than {rows} rows are launched one kernel at a time: {MIXTURE}"
    return loop, text


def _one_by_one(why: str) -> str:
    return f"one kernel at a time: {why}" if why else "one kernel at a time"


def _graphs(loaded: Loaded, model: Any, cache: Any, loras: Any, rows: int, queries: int) -> DecodeGraphs:
    finish_tuning(loaded.core, model)
    kernel_rows = rows_of_kernels(loaded.core, model) if queries == 1 else KERNEL_ROWS
    return DecodeGraphs(
        model,
        cache,
        loras,
        HostEmbedding(model.modules[0].embedding.weight.data),
        rows=row_sizes(rows, kernel_rows),
        widths=_widths(loaded, cache),
        queries=queries,
        spare=loaded.cache_size // PAGE_TOKENS,
    )


def _capture(
    loaded: Loaded, model: Any, cache: Any, loras: Any, graphs: DecodeGraphs, progress: Callable[[int, int], None]
) -> None:
    """Capture steps and passes over prompts, and have the generator use them. ``progress``: see DecodeGraphs.capture.

    A mixture of experts is routed by the host for as many tokens as a pass has, so it has none.
    """
    passes = [
        DecodeGraphs(
            model, cache, loras, graphs.embedding, rows=[1], widths=_widths(loaded, cache, 1), queries=tokens,
            spare=graphs.spare, head=False, pools=graphs.pools,
        )
        for tokens in PASSES
        if most_rows(model, 1, tokens)
    ]  # fmt: skip
    captured, total = 0, sum(len(each.sizes) for each in (graphs, *passes))

    def tell(done: int, _: int) -> None:
        progress(captured + done, total)

    for each in (graphs, *passes):
        each.capture(tell)
        captured += len(each.sizes)
    use_graphs(model, cache, graphs, PromptPasses(passes, int(model.config.max_seq_len)) if passes else None)


def _widths(loaded: Loaded, cache: Any, more: int = 0) -> list[int]:
    """Return the widths of block tables in pages, the last of them ``more`` than a sequence may have."""
    quantised = cache.all_tensors()[0].dtype == torch.uint8
    context = min(loaded.context + loaded.draft_tokens, loaded.cache_size)
    return page_sizes(-(-context // PAGE_TOKENS) + more, quantised)
