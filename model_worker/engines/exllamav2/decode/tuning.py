"""Choose the kernels of quantised matrices before a step is captured.

For each shape of an EXL2 matrix, and for 1 to 4 rows, the package measures two block sizes over its first 200 calls
(cuda/q_gemm.cu, q_gemm_autotune.cuh). Measuring waits for the GPU, which a capture does not allow, and a captured step
keeps whatever size was in use. More than 4 rows use the size of the largest number of rows that has been measured.

Up to 32 rows the package multiplies with the quantised matrix as it is, in time that grows with the rows. For more rows
it makes an fp16 matrix first, and multiplies with that, which takes the same time for 33 rows as for 64. On an H200 the
second way is the quicker one from about 17 rows on.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from model_worker.engines.exllamav2.decode.buckets import FEWEST_KERNEL_ROWS, KERNEL_ROWS, WIDE

CALLS = 201
"""The package decides at the call after its 200 measured ones."""
MOST_ROWS = 4
TIMED = 20
"""Calls that are timed together."""


def finish_tuning(core: Any, model: Any) -> int:
    """Call each kind of EXL2 matrix of ``model`` until its block size is decided. Return the number of kinds.

    core  the package's module exllamav2
    """
    call = core.ext.exllamav2_ext.gemm_half_q_half
    kinds: dict[tuple[int, int, int], Any] = {}
    for linear in _quantised(model):
        kinds.setdefault((linear.device_idx, linear.in_features, linear.out_features), linear)
    for (device, inputs, outputs), linear in kinds.items():
        with torch.cuda.device(device), torch.cuda.stream(model.get_device_context(device, scratch=False).stream):
            for rows in range(1, MOST_ROWS + 1):
                x = torch.zeros(rows, inputs, dtype=torch.half, device=device)
                out = torch.empty(rows, outputs, dtype=torch.half, device=device)
                for _ in range(CALLS):
                    call(x, linear.q_handle, out, False)
            torch.cuda.synchronize(device)
    return len(kinds)


@torch.inference_mode()
def rows_of_kernels(core: Any, model: Any) -> int:
    """Return the most rows, from FEWEST_KERNEL_ROWS to KERNEL_ROWS, that all quantised matrices of ``model`` together
    multiply quicker as they are than by way of fp16. Call this when tuning is finished."""
    call = core.ext.exllamav2_ext.gemm_half_q_half
    kinds: dict[tuple[int, int, int], list[Any]] = {}
    for linear in _with_handle(model):
        kinds.setdefault((linear.device_idx, linear.in_features, linear.out_features), []).append(linear)

    def seconds(rows: int) -> float:
        return sum(
            len(linears) * _time(call, linears[0], rows, model.get_device_context(kind[0], scratch=False).stream)
            for kind, linears in kinds.items()
        )

    most, by_fp16 = FEWEST_KERNEL_ROWS, seconds(WIDE)
    while most < KERNEL_ROWS and seconds(most + 4) <= by_fp16:
        most += 4
    return most if kinds else KERNEL_ROWS


def _time(call: Callable[..., None], linear: Any, rows: int, stream: Any) -> float:
    """Return the milliseconds of a multiplication with as many rows, as part of a captured step."""
    with torch.cuda.device(linear.device_idx), torch.cuda.stream(stream):
        x = torch.zeros(rows, linear.in_features, dtype=torch.half, device=stream.device)
        out = torch.empty(rows, linear.out_features, dtype=torch.half, device=stream.device)
        call(x, linear.q_handle, out, False)  # kernels are loaded at their first use
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(TIMED):
                call(x, linear.q_handle, out, False)
        finally:
            graph.capture_end()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()
        begin.record(stream)
        graph.replay()
        end.record(stream)
        torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / TIMED


def _with_handle(model: Any) -> Iterator[Any]:
    for module in model.modules:
        for part in (module, *module.submodules):
            if isinstance(getattr(part, "q_handle", None), int) and hasattr(part, "in_features"):
                yield part


def _quantised(model: Any) -> Iterator[Any]:
    for module in model.modules:
        for part in (module, *module.submodules):
            if isinstance(getattr(part, "q_tensors", None), dict) and "q_weight" in part.q_tensors:
                yield part
