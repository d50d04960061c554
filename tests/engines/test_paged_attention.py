"""Each path of paged attention agrees with a reference in float64 that uses no pages."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model_worker.engines.paged import attention as paged_attention
from model_worker.engines.paged import attention as paged_sdpa
from model_worker.engines.paged.attention import flash_attn_with_kvcache
from model_worker.engines.paged.launch import AttentionShape, AttentionStep
from tests.engines import paged_cases

ROOT = Path(__file__).parents[2]
SDPA = paged_cases.way("PyTorch SDPA")


def needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")


@pytest.mark.parametrize("seed", range(32))
def test_random_pages_lengths_heads_windows_and_caps_with_sdpa(seed: int) -> None:
    assert paged_cases.compare(paged_cases.random_case(seed, torch.float32, True, garbage=50), SDPA, "cpu")


@pytest.mark.long
def test_random_pages_lengths_heads_windows_and_caps_in_tritons_interpreter() -> None:
    """This runs in a process of its own, since Triton's interpreter must be chosen before Triton is imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.paged_cases", "32"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=115,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "32 of 32 computed"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("way", paged_attention.WAYS, ids=lambda way: way.name)
def test_random_pages_lengths_heads_windows_and_caps_on_the_gpu(
    way: paged_attention.AttentionPath, dtype: torch.dtype
) -> None:
    needs_gpu()
    reads_in_place = "in place" in way.name
    done = [
        paged_cases.compare(
            paged_cases.random_case(seed, dtype, **({} if reads_in_place else {"garbage": 50.0})), way, "cuda"
        )
        for seed in range(24)
    ]
    if not any(done):
        pytest.skip(f"this PyTorch has no {way.name}")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("q_len", "before"),
    [
        (1, [8000]),
        (1, [200 + 7800 * i // 63 for i in range(64)]),
        (5, [8000, 0, 1, 4000]),
        (1, [0] * 64),
        (256, [8000]),
        (2048, [0]),
    ],
    ids=["long", "64", "drafts", "first", "chunk", "prompt"],
)
def test_long_sequences_and_many_on_the_gpu(head_dim: int, q_len: int, before: list[int]) -> None:
    needs_gpu()
    scale = head_dim**-0.5
    shape = AttentionShape(len(before), q_len, 8, 2, head_dim, 256, len(before) > 1, -1, scale, 0.0, torch.float16)
    case = paged_cases.make(shape, before, 1)
    assert paged_cases.compare(case, paged_cases.way("Triton"), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_check_of_this_gpu_finds_the_kernels_right(head_dim: int) -> None:
    needs_gpu()
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU is older than Ampere: SDPA is used")
    said = paged_attention.check(torch.device("cuda", 0), heads=8, kv_heads=2, head_dim=head_dim, window=100)
    assert said == f"paged: {paged_cases.way('Triton').name}"


def test_what_a_step_shares_is_computed_once_and_not_kept_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(step: AttentionStep, shape: AttentionShape) -> object:
        made.append(shape)
        return paged_sdpa.plan(step, shape)

    monkeypatch.setattr(paged_attention, "WAYS", (replace(SDPA, plan=counted),))
    k_cache, v_cache = torch.randn(2, 4, 16, 1, 8)
    q = torch.randn(1, 1, 2, 8)
    lengths, table = torch.tensor([0], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32)
    outputs = []
    for step in range(4):
        if step < 2:
            lengths, table = torch.tensor([step + 1], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32)
        else:
            lengths += 1  # the package does this between the steps of a draft
        outputs += [
            flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True)
            for _layer in range(4)
        ]
    assert len(made) == 4
    assert torch.equal(outputs[0], outputs[3])
    assert not torch.equal(outputs[0], outputs[4])
    assert not torch.equal(outputs[8], outputs[12])


def test_tensor_parallel_attention_writes_into_its_output() -> None:
    shape = AttentionShape(2, 1, 4, 2, 32, 16, True, -1, 0.2, 0.0, torch.float32)
    case = paged_cases.make(shape, [5, 20], 3, garbage=50)
    out = torch.empty_like(case.q)
    none = None
    paged_attention.fwd_kvcache(
        case.q, *case.caches, *case.new, case.lengths, none, none, none, none, case.table, none, out, 0.2, True,
        10000000, -1, 0.0, True, 0,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), case.expected, rtol=2e-5, atol=2e-5)


def test_attention_that_sees_the_future_is_refused() -> None:
    t = torch.zeros(1, 1, 1, 8)
    seqlens, table = torch.tensor([1], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32)
    with pytest.raises(NotImplementedError):
        flash_attn_with_kvcache(t, t, t, cache_seqlens=seqlens, block_table=table)


@pytest.mark.parametrize("fault", ["raises", "is wrong", "writes elsewhere"])
def test_a_way_that_does_not_work_is_left_out_and_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(step: AttentionStep, shape: AttentionShape) -> object:
        good = paged_sdpa.plan(step, shape)

        def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *new: torch.Tensor) -> torch.Tensor:
            if fault == "raises":
                raise RuntimeError("no compiler")
            out = good(q, k_cache, v_cache, *new)
            if fault == "writes elsewhere":
                k_cache[0, 0] += 1
            return out + (0.5 if fault == "is wrong" else 0)

        return attend

    monkeypatch.setattr(paged_attention, "WAYS", (paged_attention.AttentionPath("a new way", plan), SDPA))
    monkeypatch.setattr(paged_attention, "_left_out", {})
    monkeypatch.setattr(paged_attention, "_found", {})
    said = paged_attention.check(torch.device("cpu"), head_dim=32, dtype=torch.float32)
    reason = {"raises": "RuntimeError: no compiler", "is wrong": "differs from SDPA by 5.0e-01"}
    assert said == f"paged: {SDPA.name}; not a new way: {reason.get(fault, 'writes other pages than SDPA')}"
    assert paged_attention.describe() == said
    shape = AttentionShape(1, 1, 2, 1, 32, 256, False, -1, 0.2, 0.0, torch.float32)
    case = paged_cases.make(shape, [5], 1, garbage=50)
    assert paged_attention.choose(AttentionStep(case.lengths, case.table), shape)[0] == SDPA.name


def test_the_stand_ins_are_what_exllamav2_looks_for() -> None:
    """This runs in a process of its own, since it replaces modules."""
    program = """
import inspect
from model_worker.engines.paged import attention as paged_attention
assert not paged_attention.is_installed()
paged_attention.install()
assert paged_attention.is_installed()
import flash_attn, flash_attn_2_cuda, importlib.util
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
assert [int(t) for t in flash_attn.__version__.split(".") if t.isdigit()] >= [2, 5, 7]
assert {"window_size", "softcap"} <= set(inspect.signature(flash_attn_func).parameters)
assert importlib.util.find_spec("flash_attn") is not None
assert callable(flash_attn_2_cuda.fwd_kvcache)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert importlib.util.find_spec("flash_attn_2_cuda") is None or "flash_attn_2_cuda" not in sys.modules
