"""Mixtures of 128 experts, which ExLlamaV2's fused function computes wrongly for more than one row.

The fused function (exllamav2_ext/cuda/q_mlp.cu, ``QMoEMLP::forward_``) copies the routing weights of row 0 to the host,
and launches only the experts that row 0 chose. It skips the experts that only later rows chose, and reports nothing.
The package calls the function for 2 to 4 rows (moe_mlp.py, ``forward``). The rows are all tokens of one forward pass:
those of two concurrent streams, speculated tokens, or the last tokens of a prompt.

With one row the function is right. With 4, 8 or 16 experts it launches every expert, and is right for up to 4 rows.
"""

import importlib
from typing import Any

EXPERTS = 128
"""The number of experts for which the fused function reads the routing of row 0 only."""
ROW_BY_ROW = 64
"""The most rows for which the fused function is called once per row. More rows take the package's PyTorch code, which
waits for the GPU 128 times per layer or more, whatever the number of rows. benchmarks/mixture.py measures both: on an
H200, one layer of Qwen3-30B-A3B takes 2.5 ms instead of 16 ms for 8 rows, and 20 ms instead of 30 ms for 64 rows."""


def keep_rows_apart() -> None:
    """Make the package compute mixtures of 128 experts correctly in all models of this process, draft models included.

    A second call changes nothing.
    """
    module: Any = importlib.import_module("exllamav2.moe_mlp")
    if hasattr(module, "modelctl_original"):
        return
    original = module.modelctl_original = module.ExLlamaV2MoEMLP.forward

    def forward(
        layer: Any,
        hidden_states: Any,
        cache: Any = None,
        attn_params: Any = None,
        past_len: Any = None,
        intermediates: bool = False,
        loras: Any = None,
        **kwargs: Any,
    ) -> Any:
        rows = hidden_states.shape[0] * hidden_states.shape[1]
        given = (cache, attn_params, past_len, intermediates, loras)
        # The fused function is right for other numbers of experts, and for one row. In the other three cases the
        # package never calls it.
        if layer.num_experts != EXPERTS or rows == 1 or layer.q_handle is None or intermediates or loras:
            return original(layer, hidden_states, *given, **kwargs)
        if rows > ROW_BY_ROW:
            return layer.forward_torch(hidden_states, *given, **kwargs)
        # The fused function adds its result to the row in place, so the rows have to be views.
        for row in hidden_states.view(rows, 1, 1, hidden_states.shape[-1]):
            original(layer, row, *given, **kwargs)
        return hidden_states

    module.ExLlamaV2MoEMLP.forward = forward
