"""Why a model's decode step cannot be captured."""

from typing import Any

from model_worker.engines.exllamav2.options import ExLlamaV2Options

MIXTURE_ROWS = 4
"""The most rows for which the package computes a mixture of experts without the host (moe_mlp.py, forward)."""
MIXTURE = f"a mixture of experts is routed by the host for more than {MIXTURE_ROWS} rows"
FUSED_MIXTURES = 4, 8, 16
"""Numbers of experts whose routing stays on the GPU."""


def obstacle_before_loading(options: ExLlamaV2Options, attention: str) -> str | None:
    """Return why no step can be captured, as far as that is known before the model is loaded; else None.

    attention  the way in which decoding computes attention, by name
    """
    if not options.graphs:
        return "graphs is false"
    if options.tensor_parallel:
        return "tensor_parallel: the GPUs of a layer wait for each other on the host"
    if "Triton" not in attention:
        return f"attention is computed by {attention}, whose launches depend on the lengths"
    return None


def obstacle(model: Any, loras: Any) -> str | None:
    """Return why no step of a loaded model can be captured; else None. ``model`` and ``loras`` are the package's."""
    embedding = getattr(model.modules[0], "embedding", None)
    if embedding is None or embedding.weight.is_cuda or embedding.weight.element_size() != 2:
        return "its embedding is not a table of 16-bit numbers in host memory"
    if any(type(module).__name__ == "ExLlamaV2PosEmbedding" for module in model.modules):
        return "its positions are embedded by the host"
    if loras and loras[0].embed_tokens is not None:
        return "its adapter replaces the embedding"
    experts = {module.num_experts for module in model.modules if hasattr(module, "num_experts")}
    if experts and (not experts <= set(FUSED_MIXTURES) or loras):
        return f"its mixture of {max(experts)} experts is routed by the host"
    return None


def most_rows(model: Any, rows: int, queries: int) -> int:
    """Return the most rows of ``queries`` tokens that can be captured: ``rows``, or fewer for a mixture of experts."""
    if any(hasattr(module, "num_experts") for module in model.modules):
        return min(rows, MIXTURE_ROWS // queries)
    return rows
