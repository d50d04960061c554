# mypy: ignore-errors
# (Triton's language is not Python)
"""The parts that all kernels of ``kernels`` share: a row's logits after penalties and limits, and their weights."""

import triton
import triton.language as tl

STEP = tl.constexpr(4)  # int64 per row: slot, point times 2**11, tokens so far, flags of the step
WHOLE = tl.constexpr(8)  # int64 per slot: flags, top_k, top_p, top_a, min_p, reach_full, reach
REAL = tl.constexpr(8)  # float32 per slot: slope, repetition, fade, frequency, presence
GREEDY = tl.constexpr(1)
SMOOTH = tl.constexpr(2)
CUTS = tl.constexpr(4)
REPEATS = tl.constexpr(8)
COUNTS = tl.constexpr(16)
BIASED = tl.constexpr(32)
TOO_SHORT = tl.constexpr(1)  # flags of the step
LIMITED = tl.constexpr(2)
BINS = tl.constexpr(64)
ID_BITS = tl.constexpr(22)
ID_MASK = tl.constexpr((1 << 22) - 1)
ONE = tl.constexpr(1 << 40)


@triton.jit
def _bit(table, slot, ids, inside, WORDS: tl.constexpr):
    word = tl.load(table + slot * WORDS + (ids >> 5), mask=inside, other=0)
    return ((word >> (ids & 31)) & 1) != 0


@triton.jit
def adjusted(
    logits, step, whole, real, bias, limits, ends, seen, count, row, ids,
    stride, DRAWABLE: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Return the logits of ``ids`` as float32, after penalties, biases and limits. -inf beyond the drawable ids."""
    NEVER: tl.constexpr = float("-inf")
    slot = tl.load(step + row * STEP)
    now = tl.load(step + row * STEP + 3)
    flags = tl.load(whole + slot * WHOLE)
    inside = ids < DRAWABLE
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=inside, other=NEVER).to(tl.float32)
    if (flags & REPEATS) != 0:
        last = tl.load(seen + slot * WIDTH + ids, mask=inside, other=0)
        back = tl.load(step + row * STEP + 2).to(tl.int32) - last
        full = tl.load(whole + slot * WHOLE + 5).to(tl.int32)
        reach = tl.load(whole + slot * WHOLE + 6).to(tl.int32)
        beyond = tl.maximum(back - full, 0).to(tl.float32)
        penalty = tl.load(real + slot * REAL + 1) + beyond * tl.load(real + slot * REAL + 2)
        hit = (last > 0) & (back < reach)
        less = tl.where(x > 0, tl.div_rn(x, tl.where(hit, penalty, 1.0)), x * penalty)
        x = tl.where(hit, less, x)
    if (flags & (BIASED | COUNTS)) != 0:
        total = tl.zeros_like(x)
        if (flags & BIASED) != 0:
            total = tl.load(bias + slot * WIDTH + ids, mask=inside, other=0.0)
        if (flags & COUNTS) != 0:
            times = tl.load(count + slot * WIDTH + ids, mask=inside, other=0)
            presence = tl.where(times > 0, tl.load(real + slot * REAL + 4), 0.0)
            total = total - (times.to(tl.float32) * tl.load(real + slot * REAL + 3) + presence)
        x = tl.where((total == NEVER) & (x == x), NEVER, x + total)
    if (now & TOO_SHORT) != 0:
        x = tl.where(_bit(ends, slot, ids, inside, WORDS) & (x == x), NEVER, x)
    if (now & LIMITED) != 0:
        allowed = _bit(limits, slot, ids, inside, WORDS)
        x = tl.where((allowed | (x != x)), x, NEVER)
    return tl.where(inside, x, NEVER)


@triton.jit
def _halvings(x, top, slope, smooth):
    """Return (mantissa, shift) of the weights: mantissa << 16 >> shift."""
    t = x - top
    if smooth:
        t = t * (-t)
    s = tl.maximum(t * slope, -64.0)
    n = tl.floor(s * 1.44269504088896341 + 0.5)
    r = (s - n * 0.693359375) - n * -2.12194440e-4
    y = tl.zeros_like(r) + 1.9875691500e-4
    y = y * r + 1.3981999507e-3
    y = y * r + 8.3334519073e-3
    y = y * r + 4.1665795894e-2
    y = y * r + 1.6666665459e-1
    y = y * r + 5.0000001201e-1
    y = (y * (r * r) + r) + 1.0
    return (y * 16777216.0).to(tl.int64), tl.minimum((-n).to(tl.int64), 63)


@triton.jit
def weigh_ids(
    logits, step, whole, real, bias, limits, ends, seen, count, row, ids, top,
    stride, DRAWABLE: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    x = adjusted(logits, step, whole, real, bias, limits, ends, seen, count, row, ids, stride, DRAWABLE, WIDTH, WORDS)
    slot = tl.load(step + row * STEP)
    smooth = (tl.load(whole + slot * WHOLE) & SMOOTH) != 0
    mantissa, shift = _halvings(x, top, tl.load(real + slot * REAL), smooth)
    weight = tl.minimum((mantissa << 16) >> shift, ONE)
    return tl.where(ids < DRAWABLE, weight, 0)


@triton.jit
def share(part, total):
    """Return part * total >> 53. ``part`` comes multiplied by 2**11."""
    return tl.umulhi(part.to(tl.uint64, bitcast=True), total.to(tl.uint64, bitcast=True)).to(tl.int64)


@triton.jit
def product(w, total):
    """Return w * total >> 40."""
    return tl.umulhi((w << 17).to(tl.uint64, bitcast=True), (total << 7).to(tl.uint64, bitcast=True)).to(tl.int64)
