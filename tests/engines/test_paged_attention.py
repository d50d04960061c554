"""The stand-in for flash-attn against a reference in float64 that knows nothing of pages."""

import importlib.util
import math
import random
import subprocess
import sys

import pytest
import torch

from model_worker.engines import paged_attention
from model_worker.engines.paged_attention import flash_attn_with_kvcache

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """One sequence, one head: q [n, d] are the last n of the positions of k and v [m, d]."""
    n, m = q.shape[0], k.shape[0]
    out = torch.empty(n, v.shape[1], dtype=torch.float64)
    for i in range(n):
        position = m - n + i
        first = max(0, position - window) if window >= 0 else 0
        scores = (k[first : position + 1].double() @ q[i].double()) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out[i] = scores.softmax(0) @ v[first : position + 1].double()
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(24))
def test_random_pages_lengths_heads_and_windows(device: str, seed: int) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = torch.float16 if device == "cuda" else torch.float32
    page_size = rng.choice([16, 256]) if seed % 4 else 256
    batch, kv_heads, group = rng.randint(1, 5), rng.randint(1, 3), rng.choice([1, 2, 4, 7])
    heads, dim = kv_heads * group, rng.choice([32, 64, 128])
    q_len = 1 if seed % 3 else rng.randint(2, 70)
    before = [rng.randint(0, 4 * page_size) for _ in range(batch)]
    appends = bool(rng.randrange(2))
    window = rng.choice([-1, -1, 0, 5, 300])
    softcap = rng.choice([0.0, 0.0, 30.0])
    scale = rng.choice([None, 0.2])

    needed = [math.ceil((length + q_len) / page_size) for length in before]
    free = list(range(sum(needed) + 3))
    rng.shuffle(free)
    table = torch.zeros((batch, max(needed)), dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    pages = sum(needed) + 3
    k_cache = torch.randn(pages, page_size, kv_heads, dim).to(dtype)
    v_cache = torch.randn(pages, page_size, kv_heads, dim).to(dtype)
    q = torch.randn(batch, q_len, heads, dim).to(dtype)
    new_k = torch.randn(batch, q_len, kv_heads, dim).to(dtype)
    new_v = torch.randn(batch, q_len, kv_heads, dim).to(dtype)

    def place(cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The cache with the new tokens in it, token by token."""
        cache = cache.clone()
        for row, length in enumerate(before):
            for i in range(q_len):
                at = length + i
                cache[int(table[row, at // page_size]), at % page_size] = new[row, i]
        return cache

    k_after, v_after = place(k_cache, new_k), place(v_cache, new_v)
    expected = torch.empty(batch, q_len, heads, dim, dtype=torch.float64)
    for row, length in enumerate(before):
        order = table[row, : needed[row]].long()
        keys = k_after[order].flatten(0, 1)[: length + q_len]
        values = v_after[order].flatten(0, 1)[: length + q_len]
        for head in range(heads):
            kv = head // group
            expected[row, :, head] = reference(
                q[row, :, head], keys[:, kv], values[:, kv], scale or dim**-0.5, window, softcap
            )

    caches = [t.to(device) for t in ((k_cache, v_cache) if appends else (k_after, v_after))]
    seqlens = torch.tensor([length + (0 if appends else q_len) for length in before], dtype=torch.int32)
    with torch.inference_mode():
        out = flash_attn_with_kvcache(
            q=q.to(device),
            k=new_k.to(device) if appends else None,
            v=new_v.to(device) if appends else None,
            k_cache=caches[0],
            v_cache=caches[1],
            cache_seqlens=seqlens.to(device),
            block_table=table.to(device),
            causal=True,
            softmax_scale=scale,
            window_size=(window, window) if window >= 0 else (-1, -1),
            softcap=softcap,
        )
    assert out.shape == (batch, q_len, heads, dim)
    assert out.is_contiguous()
    torch.testing.assert_close(caches[0].cpu(), k_after, rtol=0, atol=0)
    torch.testing.assert_close(caches[1].cpu(), v_after, rtol=0, atol=0)
    tolerance = 4e-3 if dtype == torch.float16 else 2e-5
    torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def test_what_a_step_shares_is_computed_once_and_not_kept_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = paged_attention.StepPlan.__init__

    def counted(self: paged_attention.StepPlan, *args: object) -> None:
        made.append(args)
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(paged_attention.StepPlan, "__init__", counted)
    k_cache, v_cache = torch.randn(2, 4, 16, 1, 8)
    q = torch.randn(1, 1, 2, 8)
    outputs = []
    for step in range(3):
        seqlens, table = torch.tensor([step + 1], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32)
        outputs += [
            flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens, block_table=table, causal=True)
            for _layer in range(4)
        ]
    assert len(made) == 3
    assert not torch.equal(outputs[0], outputs[4])


def test_attention_that_sees_the_future_is_refused() -> None:
    t = torch.zeros(1, 1, 1, 8)
    seqlens, table = torch.tensor([1], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32)
    with pytest.raises(NotImplementedError):
        flash_attn_with_kvcache(t, t, t, cache_seqlens=seqlens, block_table=table)


def test_the_stand_ins_are_what_exllamav2_looks_for() -> None:
    """In a process of its own, since it replaces modules."""
    program = """
import inspect
from model_worker.engines import paged_attention
assert not paged_attention.is_installed()
paged_attention.install()
assert paged_attention.is_installed()
import flash_attn, flash_attn_2_cuda, importlib.util
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
assert [int(t) for t in flash_attn.__version__.split(".") if t.isdigit()] >= [2, 5, 7]
assert {"window_size", "softcap"} <= set(inspect.signature(flash_attn_func).parameters)
assert importlib.util.find_spec("flash_attn") is not None
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert importlib.util.find_spec("flash_attn_2_cuda") is None or "flash_attn_2_cuda" not in sys.modules
