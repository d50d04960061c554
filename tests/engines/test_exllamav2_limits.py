"""Shapes and sizes that ExLlamaV2's kernels compute wrongly are refused by name."""

import re
from pathlib import Path
from typing import Any

import pytest

from model_worker.engine import LoadError
from model_worker.engines.exllamav2.check import check_limits, open_draft
from model_worker.engines.exllamav2.options import Sizes, read_options, sizes_of
from model_worker.engines.model_dir import ModelDir
from protocol.process.worker_spec import EngineSpec
from tests.engines.random_model import edit_json
from tests.engines.synthetic_model import write_llama

MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}  # fmt: skip


def sizes(**changes: int) -> Sizes:
    given = {"context": 2048, "chunk_size": 2048, "cache_size": 4096, "rows": 8, "positions": 2048}
    return Sizes(**given | changes)


def check(path: Path, mode: str = "FP16", **changes: int) -> None:
    check_limits(ModelDir(str(path)), sizes(**changes), mode)


def refused(path: Path, *words: str) -> None:
    with pytest.raises(LoadError) as caught:
        check(path)
    assert "\n" not in str(caught.value)
    for word in words:
        assert re.search(word, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(("width", "fits"), [(64, True), (96, False), (128, True), (160, False), (90, False)])
def test_mlps_whose_last_columns_would_not_be_activated(width: int, fits: bool, tmp_path: Path) -> None:
    write_llama(tmp_path / "plain", intermediate_size=width)
    check(tmp_path / "plain")
    write_llama(tmp_path / "exl2", quantized=True, intermediate_size=width // 32 * 32)
    edit_json(tmp_path / "exl2" / "config.json", intermediate_size=width)
    if fits:
        check(tmp_path / "exl2")
    else:
        refused(tmp_path / "exl2", f"the MLP's size is {width}", "multiple of 64", "16-bit")
    write_llama(tmp_path / "mixture", quantized=True, **MIXTURE | {"moe_intermediate_size": width // 32 * 32})
    if not fits and width % 32 == 0:
        refused(tmp_path / "mixture", f"the MLP's size is {width}")


@pytest.mark.parametrize(("head_dim", "fits"), [(32, False), (64, True), (96, False), (128, True), (320, False)])
def test_norms_of_heads_that_no_whole_warp_sums(head_dim: int, fits: bool, tmp_path: Path) -> None:
    write_llama(tmp_path / "without", head_dim=head_dim)
    check(tmp_path / "without")
    write_llama(tmp_path / "with", head_dim=head_dim, **MIXTURE)  # a layer has q_norm and k_norm
    if fits:
        check(tmp_path / "with")
    else:
        refused(tmp_path / "with", f"heads of {head_dim}", "64, 128, 192 and 256")


def test_vectors_without_a_norm(tmp_path: Path) -> None:
    write_llama(tmp_path)
    edit_json(tmp_path / "config.json", hidden_size=32800)
    refused(tmp_path, "hidden_size is 32800", "up to 32768")


@pytest.mark.parametrize("given", [False, None])
def test_mixtures_whose_weights_do_not_add_up_to_one(given: bool | None, tmp_path: Path) -> None:
    write_llama(tmp_path, **MIXTURE)
    check(tmp_path)
    edit_json(tmp_path / "config.json", norm_topk_prob=given)  # None removes it; transformers then assumes false
    refused(tmp_path, "norm_topk_prob is False", "sum of 1")


def test_dbrx_whose_weights_do_not_add_up_to_one(tmp_path: Path) -> None:
    write_llama(tmp_path, architectures=["DbrxForCausalLM"])
    experts = {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 512}
    edit_json(tmp_path / "config.json", ffn_config=experts | {"moe_normalize_expert_weights": 1.0})
    check(tmp_path)
    edit_json(tmp_path / "config.json", ffn_config=experts | {"moe_normalize_expert_weights": 2.0})
    refused(tmp_path, "moe_normalize_expert_weights is 2.0")


@pytest.mark.parametrize(
    ("changes", "mode", "words"),
    [
        ({"chunk_size": 65280}, "FP16", None),
        ({"chunk_size": 65536}, "FP16", "chunk_size is 65536.* at most 65280"),
        ({"rows": 6_710_886}, "FP16", None),
        ({"rows": 6_710_887}, "FP16", "6710887 tokens a step, each of 320 logits"),
        ({"cache_size": 1 << 24}, "FP16", None),
        ({"cache_size": (1 << 24) - 256}, "Q4", None),
        ({"cache_size": 1 << 24}, "Q4", "cache_size is 16777216.*cache_mode Q4.*at most 16776960, or use FP16"),
    ],
)
def test_sizes_that_kernels_cannot_count(changes: dict[str, int], mode: str, words: str | None, tmp_path: Path) -> None:
    write_llama(tmp_path, quantized=True)  # 128 elements of keys for each token
    if words is None:
        check(tmp_path, mode, **changes)
        return
    with pytest.raises(LoadError, match=words):
        check(tmp_path, mode, **changes)


def test_chunks_of_wide_models_are_shorter(tmp_path: Path) -> None:
    write_llama(tmp_path)
    edit_json(tmp_path / "config.json", intermediate_size=53248)
    with pytest.raises(LoadError, match=r"at most 40329 tokens.*at most 40192"):
        check(tmp_path, chunk_size=40448)


def test_draft_models_are_held_to_the_same(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    write_llama(tmp_path / "draft", quantized=True)
    edit_json(tmp_path / "draft" / "config.json", intermediate_size=96)
    asked = EngineSpec(
        "m", "exllamav2", str(tmp_path / "model"), "cuda", options={"draft_model": str(tmp_path / "draft")}
    )
    directory, options = ModelDir(asked.model_dir), read_options(asked)
    with pytest.raises(LoadError, match=r"draft_model: .*the MLP's size is 96"):
        open_draft(options, directory, sizes_of(asked, options, directory))
