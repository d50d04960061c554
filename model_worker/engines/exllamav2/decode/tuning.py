"""Let ExLlamaV2 finish choosing the kernels of quantised matrices before a step is captured.

For each shape of an EXL2 matrix, and for 1 to 4 rows, the package measures two block sizes over its first 200 calls
(cuda/q_gemm.cu, q_gemm_autotune.cuh). Measuring waits for the GPU, which a capture does not allow, and a captured step
keeps whatever size was in use. More than 4 rows use the size of the largest number of rows that has been measured.
"""

from collections.abc import Iterator
from typing import Any

import torch

CALLS = 201
"""The package decides at the call after its 200 measured ones."""
MOST_ROWS = 4


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


def _quantised(model: Any) -> Iterator[Any]:
    for module in model.modules:
        for part in (module, *module.submodules):
            if isinstance(getattr(part, "q_tensors", None), dict) and "q_weight" in part.q_tensors:
                yield part
