"""Attention to quantised pages where they lie, new tokens written as the package writes them, and the same bits for a
sequence whatever is computed beside it. These tests need a CUDA device."""

import importlib
import random
from dataclasses import replace

import pytest
import torch

from model_worker.engines.exllamav2.load import import_package
from model_worker.engines.exllamav2.quantised_cache import QuantisedPages, quantise
from model_worker.engines.paged.launch import AttentionShape, AttentionStep
from tests.engines import paged_cases
from tests.engines.conftest import need_gpu
from tests.engines.paged_cases import Case

pytestmark = pytest.mark.gpu

BITS = {"Q4": (4, 4), "Q6": (8, 4), "Q8": (8, 8)}


@pytest.fixture(autouse=True, scope="module")
def _gpu() -> None:
    need_gpu("exllamav2")
    import_package()


# The package's quantisation (cuda/cache_q.cuh), one rounded operation at a time.


def turned(x: torch.Tensor) -> torch.Tensor:
    """Return fp16 x [..., head_dim] transformed: the even and the odd numbers of each 64 by 32 points."""
    y = x.half().view(*x.shape[:-1], x.shape[-1] // 64, 32, 2)
    for apart in (1, 2, 4, 8, 16):
        a, b = y.unflatten(-2, (16 // apart, 2, apart)).unbind(-3)
        y = torch.stack((a + b, a - b), -3).flatten(-4, -2)
    return y.reshape(x.shape)


def quantised(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the levels, uint8 [..., head_dim * bits / 8], and scales, fp16 [..., head_dim / 32], of fp16 x."""
    c = 1 << bits - 1
    groups = turned(x).unflatten(-1, (x.shape[-1] // 32, 32)).float()
    most = groups.abs().amax(-1, keepdim=True)
    share = (groups / most).half().float()
    levels = (share * c + c).half().float().round().clamp(0, 2 * c - 1).nan_to_num(0).to(torch.uint8).flatten(-2)
    if bits == 4:
        levels = levels[..., ::2] | levels[..., 1::2] << 4
    return levels, (most.squeeze(-1) / c).half()


def restored(levels: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the fp16 numbers that the package makes of levels and scales."""
    if bits == 4:
        levels = torch.stack((levels & 15, levels >> 4), -1).flatten(-2)
    numbers = levels.half() - (1 << bits - 1)
    return turned(numbers * scales.repeat_interleave(32, -1)) * (1 / 32)


def pages_of(case: Case, mode: str) -> tuple[QuantisedPages, QuantisedPages]:
    """Return the case's pages quantised, on the GPU. What no sequence uses has NaN as its scale."""
    made = []
    for cache, bits in zip(case.caches, BITS[mode], strict=True):
        levels, scales = quantised(cache.cuda().nan_to_num(0), bits)
        scales[cache.cuda().isnan().any(-1)] = torch.nan
        made.append(QuantisedPages(levels, scales))
    return made[0], made[1]


def computed(case: Case, mode: str | None, pages: tuple[QuantisedPages, QuantisedPages] | None = None) -> torch.Tensor:
    """Return what the kernels compute. mode: that of a quantised cache, or None."""
    step = AttentionStep(case.lengths.cuda(), case.table.cuda())
    new = [t.cuda() for t in case.new if t is not None]
    with torch.inference_mode():
        if mode is None:
            attend = paged_cases.way("Triton").plan(step, case.shape)
            assert attend is not None
            return attend(case.q.cuda(), *(t.cuda() for t in case.caches), new[0], new[1])
        keys, values = pages or pages_of(case, mode)
        return keys.plan(step, case.shape, values)(case.q.cuda(), keys, values, new[0], new[1])


def check(case: Case, mode: str) -> None:
    """Assert that attention gives the answer of the restored numbers, and only new tokens are written."""
    shape = case.shape
    pages = pages_of(case, mode)
    after = [(page.levels.clone(), page.scales.clone()) for page in pages]
    expected = torch.empty_like(case.expected)
    for row, length in enumerate(case.lengths.tolist()):
        at = torch.arange(length + shape.q_len)
        slots = (case.table[row, at // shape.page_size] * shape.page_size + at % shape.page_size).cuda()
        whole = []
        for end, new, bits in zip(after, case.new, BITS[mode], strict=True):
            assert new is not None
            levels, scales = (tensor.flatten(0, 1) for tensor in end)
            past = restored(levels[slots[:length]], scales[slots[:length]], bits).cpu()
            whole.append(torch.cat((past, new[row])))
            levels[slots[length:]], scales[slots[length:]] = quantised(new[row].cuda(), bits)
        expected[row] = paged_cases.reference(case.q[row], whole[0], whole[1], shape)
    for _ in range(2):
        out = computed(case, mode, pages).cpu().double()
        error = (out - expected).abs().max().item()
        assert error <= 4e-3, f"{mode}: {error:.2e} off, {shape}, lengths {case.lengths.tolist()}"
    for page, (levels, scales) in zip(pages, after, strict=True):
        assert torch.equal(page.levels, levels), (mode, shape)
        assert torch.equal(page.scales.nan_to_num(77), scales.nan_to_num(77)), (mode, shape)


@pytest.mark.parametrize("mode", BITS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_in_place(mode: str, head_dim: int) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        kv_heads, group, batch = rng.randint(1, 3), rng.choice([1, 2, 3, 4, 7, 8]), rng.randint(1, 9)
        shape = AttentionShape(
            batch, rng.choice([1, 1, rng.randint(2, 16)]), kv_heads * group, kv_heads, head_dim, 256, True,
            rng.choice([-1, -1, 5, 300]), head_dim**-0.5, rng.choice([0.0, 0.0, 30.0]), torch.float16,
        )  # fmt: skip
        longest = rng.choice([10, 700, 3000])
        check(paged_cases.make(shape, [rng.randint(0, longest) for _ in range(batch)], seed), mode)
    shape = AttentionShape(3, 1, 8, 2, head_dim, 256, True, -1, head_dim**-0.5, 0.0, torch.float16)
    check(paged_cases.make(shape, [8000, 0, 32_000], 1), mode)


@pytest.mark.parametrize("mode", BITS)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 64), (4, 128), (2, 256)])
def test_tokens_are_written_as_by_the_package(mode: str, kv_heads: int, head_dim: int) -> None:
    """Where a token has 512 numbers or a multiple, the package's own kernel gives the same levels and scales; also for
    numbers that overflow, for zeros, and for subnormal ones."""
    ext = importlib.import_module("exllamav2.ext").exllamav2_ext
    generator = torch.Generator("cuda").manual_seed(5)
    tokens, slots = 700, 1024
    given = [torch.randn(1, slots, kv_heads, head_dim, generator=generator, device="cuda").half() for _ in "kv"]
    for tensor in given:
        tensor[0, 100:110] *= 30_000
        tensor[0, 110:120] = 0
        tensor[0, 120:130] *= 1e-6
        tensor[0, 130:140, :, ::7] *= 1000
    table, none = torch.tensor([[3, 0, 2]], dtype=torch.int32).cuda(), torch.zeros(1, dtype=torch.int32).cuda()

    def empty() -> tuple[QuantisedPages, QuantisedPages]:
        made = [
            QuantisedPages(
                torch.zeros(1, slots, kv_heads, head_dim * bits // 8, dtype=torch.uint8, device="cuda"),
                torch.zeros(1, slots, kv_heads, head_dim // 32, dtype=torch.half, device="cuda"),
            )
            for bits in BITS[mode]
        ]
        return made[0], made[1]

    ours, theirs = empty(), empty()
    with torch.inference_mode():
        quantise((given[0], given[1]), ours, none, table, tokens)
        ext.fp16_to_q_kv(
            given[0], theirs[0].levels, theirs[0].scales, given[1], theirs[1].levels, theirs[1].scales,
            1, 0, tokens, 256, none, table, {"Q4": 4, "Q6": 6, "Q8": 8}[mode],
        )  # fmt: skip
    at = torch.arange(tokens)
    written = (table.cpu()[0, at // 256] * 256 + at % 256).cuda()
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own.levels[0, written], other.levels[0, written])
        assert torch.equal(own.scales[0, written].nan_to_num(77), other.scales[0, written].nan_to_num(77))
        others = torch.ones(slots, dtype=torch.bool, device="cuda")
        others[written] = False
        assert not own.levels[0, others].any()
        assert not own.scales[0, others].any()


def joined(one: Case, other: Case, place: int) -> Case:
    """Return a case with the sequence of ``one`` at a place among those of ``other``."""
    width = max(one.table.shape[1], other.table.shape[1])
    tables = [
        torch.nn.functional.pad(table, (0, width - table.shape[1]))
        for table in (one.table, other.table + len(one.caches[0]))
    ]
    batch = other.shape.batch + 1
    order = [*range(1, place + 1), 0, *range(place + 1, batch)]

    def rows(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
        assert a is not None
        assert b is not None
        return torch.cat((a, b))[order]

    return replace(
        one,
        shape=replace(one.shape, batch=batch),
        lengths=rows(one.lengths, other.lengths),
        table=torch.cat(tables)[order],
        q=rows(one.q, other.q),
        caches=(
            torch.cat((one.caches[0], other.caches[0])),
            torch.cat((one.caches[1], other.caches[1])),
        ),
        new=(rows(one.new[0], other.new[0]), rows(one.new[1], other.new[1])),
    )


@pytest.mark.parametrize("mode", [None, *BITS])
@pytest.mark.parametrize("q_len", [1, 4])
def test_a_sequence_has_the_same_bits_alone_and_in_company(mode: str | None, q_len: int) -> None:
    """Alone, and at places among others, with tables of other widths, for lengths of one part and of many."""
    for seed, length in enumerate((5, 255, 256, 257, 3000, 20_000)):
        shape = AttentionShape(1, q_len, 32, 8, 128, 256, True, -1, 128**-0.5, 0.0, torch.float16)
        alone = paged_cases.make(shape, [length], seed)
        expected = computed(alone, mode)[0]
        for others in ([100], [9000, 1], [0] * 7, [300] * 39):
            beside = paged_cases.make(replace(shape, batch=len(others)), others, seed + 1)
            for place in (0, len(others) // 2, len(others)):
                found = computed(joined(alone, beside, place), mode)[place]
                assert torch.equal(found, expected), (length, others, place)
