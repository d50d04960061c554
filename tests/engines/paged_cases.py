"""Random calls of paged attention, with the right answers in float64 that are computed without pages.

``python -m tests.engines.paged_cases SEEDS`` runs the Triton kernels on the CPU in Triton's interpreter. It needs a
process of its own, since ``TRITON_INTERPRET=1`` must be set before Triton is imported.
"""

import math
import random
import sys
from dataclasses import dataclass

import torch

from model_worker.engines.paged import attention as paged_attention
from model_worker.engines.paged.launch import AttentionShape, AttentionStep


def way(name: str) -> paged_attention.AttentionPath:
    """Return the attention path whose name begins with ``name``."""
    (found,) = [w for w in paged_attention.WAYS if w.name.startswith(name)]
    return found


@dataclass
class Case:
    """One call of paged attention, with tensors on the CPU. ``after``: the caches with the new tokens in them."""

    shape: AttentionShape
    lengths: torch.Tensor
    table: torch.Tensor
    q: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    new: tuple[torch.Tensor | None, torch.Tensor | None]
    after: tuple[torch.Tensor, torch.Tensor]
    expected: torch.Tensor


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Compute the attention of one sequence in float64. q [n, heads, d] are the last n positions of k and v
    [m, kv_heads, d]."""
    n, m = q.shape[0], k.shape[0]
    keys, values = (t.double().repeat_interleave(shape.group, dim=1) for t in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), keys) * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    position, key = torch.arange(m - n, m)[:, None], torch.arange(m)[None, :]
    hidden = key > position
    if shape.window >= 0:
        hidden |= key < position - shape.window
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)


def make(shape: AttentionShape, before: list[int], seed: int, garbage: float = math.nan) -> Case:
    """Return a case whose sequences have ``before`` tokens before the new ones. Their pages are in random order.

    Pages and parts of pages that no sequence uses hold ``garbage``. NaN shows whether they are read. Paths that gather
    pages multiply such values by zero, and need numbers there (the package's caches begin as zeros).
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(shape.dtype)

    page, q_len = shape.page_size, shape.q_len
    needed = [math.ceil((length + q_len) / page) for length in before]
    free = list(range(sum(needed) + 3))
    rng.shuffle(free)
    table = torch.zeros((shape.batch, max(needed) + 1), dtype=torch.int32)
    after = [torch.full((len(free), page, shape.kv_heads, shape.head_dim), garbage, dtype=shape.dtype) for _ in "kv"]
    caches = [t.clone() for t in after]
    new = [numbers(shape.batch, q_len, shape.kv_heads, shape.head_dim) for _ in "kv"]
    q = numbers(shape.batch, q_len, shape.heads, shape.head_dim)
    expected = torch.empty(q.shape, dtype=torch.float64)
    for row, (length, count) in enumerate(zip(before, needed, strict=True)):
        mine = [free.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(mine)
        whole = []
        for i in range(2):
            tokens = torch.cat((numbers(length, shape.kv_heads, shape.head_dim), new[i][row]))
            whole.append(tokens)
            for at in range(0, length + q_len, page):
                part = tokens[at : at + page]
                after[i][mine[at // page], : len(part)] = part
                part = tokens[at : min(at + page, length)]
                caches[i][mine[at // page], : len(part)] = part
        expected[row] = reference(q[row], whole[0], whole[1], shape)
    lengths = torch.tensor([n + (0 if shape.appends else q_len) for n in before], dtype=torch.int32)
    start = caches if shape.appends else [t.clone() for t in after]
    added = (new[0], new[1]) if shape.appends else (None, None)
    return Case(shape, lengths, table, q, (start[0], start[1]), added, (after[0], after[1]), expected)


def random_case(seed: int, dtype: torch.dtype, few_tokens: bool = False, garbage: float = math.nan) -> Case:
    """Return a random case. ``few_tokens`` keeps it small enough for Triton's interpreter."""
    rng = random.Random(seed)
    page = 256 if seed % 4 == 0 else rng.choice([16, 64, 256])
    kv_heads, group = rng.randint(1, 3), rng.choice([1, 2, 3, 4, 7, 8, 16])
    batch = rng.randint(1, 3 if few_tokens else 9)
    q_len = [1, rng.randint(17, 70 if few_tokens else 600), 1, rng.randint(2, 16)][seed % 4]
    if few_tokens:
        kv_heads, group = rng.randint(1, 2), rng.choice([1, 2, 3, 7])
    head_dim = rng.choice([32, 64, 80, 96, 128, 256])
    shape = AttentionShape(
        batch=batch,
        q_len=q_len,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page,
        appends=bool(rng.randrange(2)),
        window=rng.choice([-1, -1, 0, 5, 300]),
        scale=rng.choice([head_dim**-0.5, 0.2]),
        softcap=rng.choice([0.0, 0.0, 30.0]),
        dtype=dtype,
    )
    longest = rng.choice([10, 700]) if few_tokens else rng.choice([10, 700, 3000])
    return make(shape, [rng.randint(0, longest) for _ in range(batch)], seed, garbage)


def compare(case: Case, taken: paged_attention.AttentionPath, device: str) -> bool:
    """Assert that an attention path gives the case's answer, twice. Return False if it does not support the shape."""
    step = AttentionStep(case.lengths.to(device), case.table.to(device))
    with torch.inference_mode():
        attend = taken.plan(step, case.shape)
        if attend is None:
            return False
        for _ in range(2):  # the second call is like a second layer: kernels are launched in another way
            caches = [t.to(device, copy=True) for t in case.caches]
            new = [None if t is None else t.to(device) for t in case.new]
            out = attend(case.q.to(device), caches[0], caches[1], new[0], new[1])
            assert out.shape == case.q.shape, case.shape
            assert out.is_contiguous()
            for cache, after in zip(caches, case.after, strict=True):
                assert torch.equal(cache.cpu().nan_to_num(77), after.nan_to_num(77)), (
                    f"{taken.name}: pages, {case.shape}"
                )
            tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[case.shape.dtype]
            error = (out.cpu().double() - case.expected).abs().max().item()
            assert error <= tolerance, f"{taken.name}: {error:.2e} off, {case.shape}, lengths {case.lengths.tolist()}"
    return True


if __name__ == "__main__":
    done = [
        compare(random_case(seed, torch.float32, few_tokens=True), way("Triton"), "cpu")
        for seed in range(int(sys.argv[1]))
    ]
    print(f"{sum(done)} of {len(done)} computed")
