"""The estimate of VRAM agrees with the package's own arithmetic and with figures measured on a GPU."""

from pathlib import Path
from typing import Any

import pytest

from model_worker.engine import LoadError
from model_worker.engines.exllamav2 import vram
from model_worker.engines.exllamav2.options import Sizes, read_options
from model_worker.engines.exllamav2.vram import Estimate, cache_bytes, estimate, scratch_space, weight_bytes
from model_worker.engines.model_dir import ModelDir, read_shape
from protocol.process.worker_spec import EngineSpec
from tests.engines.exllamav2_cpu.package import import_package
from tests.engines.synthetic_model import write_llama

LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "1B": LLAMA_1B,
    "8B": LLAMA_8B,
    "wide attention": {"architectures": ["MistralForCausalLM"], "num_attention_heads": 16, "vocab_size": 1000},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
    "gemma": {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 4096, "query_pre_attn_scalar": 64.0},
}  # fmt: skip


def spec(path: Path, **options: Any) -> EngineSpec:
    return EngineSpec("m", "exllamav2", str(path), device="cuda", max_seq_len=2048, options=options)


def package_model(path: Path, chunk: int) -> Any:
    config = import_package().ExLlamaV2Config()
    config.model_dir = str(path)
    config.prepare()
    config.max_input_len = chunk
    return import_package().ExLlamaV2(config)


@pytest.mark.parametrize("case", CASES)
def test_scratch_memory_is_what_the_package_computes(case: str, tmp_path: Path) -> None:
    write_llama(tmp_path, quantized=True, tied=case == "gemma", **CASES[case])
    for chunk in (256, 2048):
        model = package_model(tmp_path, chunk)
        theirs = max(module.scratch_space_fixed() for module in model.modules)
        assert scratch_space(read_shape(ModelDir(str(tmp_path))), chunk) == theirs


@pytest.mark.parametrize("mode", ["FP16", "Q8", "Q6", "Q4"])
@pytest.mark.parametrize("case", ["wide attention", "experts"])
def test_caches_are_what_the_package_allots(case: str, mode: str, tmp_path: Path) -> None:
    write_llama(tmp_path, **CASES[case])
    model = package_model(tmp_path, 256)
    model.cache_map = dict.fromkeys(range(model.config.num_hidden_layers), "cpu")
    kind = "ExLlamaV2Cache" + ("" if mode == "FP16" else f"_{mode}")
    cache = getattr(import_package(), kind)(model, batch_size=1, max_seq_len=4096)
    tensors = [*cache.all_tensors(), *(t for pair in getattr(cache, "temp_tensors", {}).values() for t in pair)]
    theirs = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert cache_bytes(read_shape(ModelDir(str(tmp_path))), mode, 4096) == theirs


@pytest.mark.parametrize(
    ("mode", "measured"), [("FP16", 3_376_414_720), ("Q6", 3_099_590_656)]
)  # one H200, torch 2.11, NVML less the CUDA context, after load and warm-up
def test_a_1b_as_measured(mode: str, measured: int, tmp_path: Path) -> None:
    write_llama(tmp_path, **LLAMA_1B)
    asked = EngineSpec(
        "m",
        "exllamav2",
        str(tmp_path),
        device="cuda",
        max_seq_len=4096,
        options={"cache_size": 16384, "cache_mode": mode, "graphs": False},
    )
    assert estimate(asked).total == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(
    ("mode", "batch", "context", "measured"),
    [("FP16", 32, 2048, 3316), ("FP16", 8, 2048, 2866), ("Q4", 32, 8192, 3032)],
)  # MiB on one H200, torch 2.11, what mem_get_info counts less a context, after a long prompt and a full batch
def test_a_1b_with_captured_steps_as_measured(
    mode: str, batch: int, context: int, measured: int, tmp_path: Path
) -> None:
    write_llama(tmp_path, **LLAMA_1B)
    options = {"cache_size": max(batch * 512, context), "cache_mode": mode}
    asked = EngineSpec(
        "m", "exllamav2", str(tmp_path), device="cuda", max_seq_len=context, max_batch_size=batch, options=options
    )
    assert estimate(asked).total / 2**20 == pytest.approx(measured, rel=0.015)


def test_weights_stay_as_they_are_kept(tmp_path: Path) -> None:
    write_llama(tmp_path / "plain", **LLAMA_1B)
    # torch.cuda.memory_allocated() after the weights were loaded, on a GPU
    assert weight_bytes(ModelDir(str(tmp_path / "plain"))) == 2_472_677_376
    write_llama(tmp_path / "tied", tied=True, **LLAMA_1B)
    assert weight_bytes(ModelDir(str(tmp_path / "tied"))) == 2_472_677_376, "the head is the embedding once more"


def test_every_part_counts(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_llama(path)
    base = estimate(spec(path, graphs=False))
    assert base.total == base.weights + base.cache + base.draft + base.workspace
    assert base.draft == 0
    assert estimate(spec(path, cache_size=8192, graphs=False)).cache == 4 * base.cache
    captured = estimate(spec(path))
    assert captured.cache == base.cache // 8 * 9, "and a spare page"
    assert captured.workspace > base.workspace
    assert estimate(spec(path, draft_model=str(path))).draft > base.weights + base.cache
    assert estimate(spec(path, graphs=False), gpus=2).total == base.total + base.per_gpu
    with pytest.raises(LoadError, match="less than the context"):
        estimate(spec(path, cache_size=1024))


def test_what_does_not_fit_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    write_llama(tmp_path)
    gib = 2**30
    asked = spec(tmp_path, cache_mode="Q4", cache_size=4096)
    sizes = Sizes(context=2048, chunk_size=2048, cache_size=4096, rows=8, positions=2048)
    error = vram.refusal(Estimate(12 * gib, 8 * gib, gib, 2 * gib), 19 * gib, 24 * gib, read_options(asked), sizes)
    assert str(error).startswith(
        "not enough VRAM: needs 23.0 GiB: weights 12.0, cache 8.0 (Q4, 4096 tokens), draft 1.0, workspace 2.0; "
        "the GPU has 19.0 free of 24.0: lower "
    )
