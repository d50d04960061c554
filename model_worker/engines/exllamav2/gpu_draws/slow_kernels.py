# mypy: ignore-errors
"""Draws of rows that keep more candidates than ``kernels.gather`` collects: the same cuts over the whole vocabulary.
typical_p is computed here only: it may leave out the likeliest tokens, and needs a mean over all.

A row has one program of many threads. It looks for the weight at which a count or a sum passes a goal. For such rows
``gather`` has counted and summed the weights in bins, 128 for each power of 2, so that weight lies between two edges of
bins. Each pass over the row then tries three weights: the next one above the lowest that is possible, and two between
that and the highest. It also finds the smallest weight of the row above each of them, and goes on from there. So a bin
with few different weights takes few passes.

Weights are compared as float32 numbers, ``power * 2**40``, which are not rounded down: a threshold is a whole number.
"""

import triton
import triton.language as tl

from model_worker.engines.exllamav2.gpu_draws.kernels import FIRST_BIN, ONE, WORDS, _word64

ABOVE_ALL = tl.constexpr(float(1 << 41))
FRACTIONS = tl.constexpr(float(1 << 23))
"""Float32 numbers from here on are whole, and the next one is the next whole number that there is."""
WIDE = tl.constexpr(2048)
UNROLLED = tl.constexpr(4)


@triton.jit
def _weights(powers, ids, VOCAB: tl.constexpr):
    """Return the weights of some tokens, not rounded down; 0 beyond the vocabulary."""
    return tl.load(powers + ids, mask=ids < VOCAB, other=0.0) * 1099511627776.0


@triton.jit
def _sum_from(powers, least, VOCAB: tl.constexpr):
    """Return the sum of the weights of ``least``, an integer, or more."""
    total = tl.zeros([WIDE], tl.int64)
    for start in range(0, VOCAB, WIDE * UNROLLED):
        for part in tl.static_range(UNROLLED):
            w = _weights(powers, start + part * WIDE + tl.arange(0, WIDE), VOCAB).to(tl.int64)
            total += tl.where(w >= least, w, 0)
    return tl.sum(total, 0)


@triton.jit
def _next(low):
    """Return the next whole float32 number."""
    above = (low.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.where(low < FRACTIONS, low + 1.0, above)


@triton.jit
def _between(low, high, thirds: tl.constexpr):
    """Return the whole number that is so many thirds of the way from one whole number to another, as their bits go."""
    first, last = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    return tl.floor((first + (last - first) // 3 * thirds).to(tl.float32, bitcast=True))


@triton.jit
def _edge(number):
    """Return the least weight of a bin."""
    return ((number + FIRST_BIN) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _largest(powers, bins, goal, VOCAB: tl.constexpr, BINS: tl.constexpr, COUNT: tl.constexpr):
    """Return the largest weight such that the weights from it on sum to ``goal`` or more, float32, and the sum of those
    above it.

    powers  those of the row
    bins    int64 or int32 [BINS]: sums or numbers of the row's weights, by bin
    COUNT   whether tokens are counted instead of their weights summed
    """
    numbers = tl.arange(0, BINS)
    sums = tl.load(bins + numbers).to(tl.int64)
    place = tl.sum((tl.sum(sums, 0) - tl.cumsum(sums, 0) + sums >= goal).to(tl.int32), 0) - 1
    beyond = tl.sum(tl.where(numbers > place, sums, 0), 0)  # the sum from ``high`` on, which is less than the goal
    low, high = tl.where(place > 0, _edge(place), 0.0), _edge(place + 1)
    first = _next(low)
    while first < high:
        second, third = _between(first, high, 1), _between(first, high, 2)
        sum_1, sum_2, sum_3 = tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.int64)
        least_1 = tl.full([WIDE], ABOVE_ALL, tl.float32)
        least_2, least_3 = least_1, least_1
        for start in range(0, VOCAB, WIDE * UNROLLED):
            for part in tl.static_range(UNROLLED):
                x = _weights(powers, start + part * WIDE + tl.arange(0, WIDE), VOCAB)
                one = tl.full([WIDE], 1, tl.int64) if COUNT else x.to(tl.int64)
                sum_1 += tl.where(x >= first, one, 0)
                sum_2 += tl.where(x >= second, one, 0)
                sum_3 += tl.where(x >= third, one, 0)
                least_1 = tl.minimum(least_1, tl.where(x >= first, x, ABOVE_ALL))
                least_2 = tl.minimum(least_2, tl.where(x >= second, x, ABOVE_ALL))
                least_3 = tl.minimum(least_3, tl.where(x >= third, x, ABOVE_ALL))
        total_1, total_2, total_3 = tl.sum(sum_1, 0), tl.sum(sum_2, 0), tl.sum(sum_3, 0)
        if total_3 >= goal:
            low = tl.floor(tl.min(least_3, 0))
        elif total_2 >= goal:
            low, high, beyond = tl.floor(tl.min(least_2, 0)), third, total_3
        elif total_1 >= goal:
            low, high, beyond = tl.floor(tl.min(least_1, 0)), second, total_2
        else:
            high, beyond = first, total_1
        first = _next(low)
    return low, beyond


@triton.jit
def _nth_of_equals(powers, weight, nth, VOCAB: tl.constexpr, BLOCKS_2: tl.constexpr, BLOCK: tl.constexpr):
    """Return the id of the token of a weight that has ``nth`` others of that weight with higher ids."""
    above = _next(weight)
    blocks = tl.arange(0, BLOCKS_2)
    equals = tl.zeros([BLOCKS_2, 128], tl.int64)
    for start in range(0, BLOCK, 128):
        x = _weights(powers, blocks[:, None] * BLOCK + start + tl.arange(0, 128)[None, :], VOCAB)
        equals += ((x >= weight) & (x < above)).to(tl.int64)
    by_block = tl.sum(equals, 1)
    behind = tl.sum(by_block, 0) - tl.cumsum(by_block, 0)  # in the blocks behind each block
    here = (behind <= nth) & (nth < behind + by_block)
    block = tl.sum(tl.where(here, blocks, 0), 0)
    left = nth - tl.sum(tl.where(here, behind, 0), 0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = _weights(powers, ids, VOCAB)
    same = ((x >= weight) & (x < above)).to(tl.int64)
    return tl.max(tl.where((same > 0) & (tl.sum(same, 0) - tl.cumsum(same, 0) == left), ids, -1), 0)


@triton.jit
def _log2(w):
    """Return the logarithms of int64 weights, see ``rule.log2_of``."""
    bits = tl.maximum(w, 1).to(tl.float32).to(tl.int32, bitcast=True)
    m = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    s = tl.div_rn(m - 1.0, m + 1.0)
    t = s * s
    value = 0.2623081889252388 * t + 0.3205988979753252
    value = value * t + 0.4121985831111324
    value = value * t + 0.5770780163555853
    value = value * t + 0.9617966927259756
    value = value * t + 2.8853900817779268
    return (((bits >> 23) - 127) << 16).to(tl.int64) + tl.floor(value * s * 65536.0).to(tl.int64)


@triton.jit
def _typical(powers, least, total, share, VOCAB: tl.constexpr):
    """Return (sum of the weights left out before the first that typical_p keeps, sum of those kept).

    least, total  the candidates: all weights above ``least``, and some of those equal to it; and the sum of all
    share         of 2**64
    """
    larger, high, low = tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.int64)
    for start in range(0, VOCAB, WIDE):
        w = _weights(powers, start + tl.arange(0, WIDE), VOCAB).to(tl.int64)
        w = tl.where(w > least, w, 0)
        logs = _log2(w)
        larger += w
        high += (w >> 20) * logs
        low += (w & 0xFFFFF) * logs
    rest = total - tl.sum(larger, 0)
    log_least = _log2(least)
    of_high = tl.sum(high, 0) + (rest >> 20) * log_least
    of_low = tl.sum(low, 0) + (rest & 0xFFFFF) * log_least
    mean = tl.floor((of_high.to(tl.float64) * 1048576.0 + of_low.to(tl.float64)) / total.to(tl.float64)).to(tl.int64)
    target = tl.umulhi(total.to(tl.uint64), share).to(tl.int64) + 1
    rest_deviates = tl.abs(log_least - mean)
    # The deviation that is looked for lies above ``under``, and is at most ``within``.
    under, within = tl.full([], -1, tl.int64), tl.full([], 41 << 16, tl.int64)
    while within - under > 1:
        step = (within - under + 3) // 4
        first, second, third = under + step, under + 2 * step, under + 3 * step
        sum_1, sum_2, sum_3 = tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.int64)
        for start in range(0, VOCAB, WIDE):
            w = _weights(powers, start + tl.arange(0, WIDE), VOCAB).to(tl.int64)
            deviates = tl.abs(_log2(w) - mean)
            w = tl.where(w > least, w, 0)
            sum_1 += tl.where(deviates <= first, w, 0)
            sum_2 += tl.where(deviates <= second, w, 0)
            sum_3 += tl.where(deviates <= third, w, 0)
        if tl.sum(sum_1, 0) + tl.where(rest_deviates <= first, rest, 0) >= target:
            within = tl.minimum(first, within)
        elif tl.sum(sum_2, 0) + tl.where(rest_deviates <= second, rest, 0) >= target:
            under, within = first, tl.minimum(second, within)
        elif tl.sum(sum_3, 0) + tl.where(rest_deviates <= third, rest, 0) >= target:
            under, within = second, tl.minimum(third, within)
        else:
            under = third
    skipped, left = tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.int64)
    for start in range(0, VOCAB, WIDE):
        w = _weights(powers, start + tl.arange(0, WIDE), VOCAB).to(tl.int64)
        logs = _log2(w)
        w = tl.where(w > least, w, 0)
        skipped += tl.where(logs > mean + within, w, 0)
        left += tl.where(tl.abs(logs - mean) <= within, w, 0)
    return tl.sum(skipped, 0), tl.sum(left, 0) + tl.where(rest_deviates <= within, rest, 0)


@triton.jit
def _empty(counted, summed, BINS: tl.constexpr):
    bins = tl.arange(0, BINS)
    tl.store(counted + bins, tl.zeros([BINS], tl.int32))
    tl.store(summed + bins, tl.zeros([BINS], tl.int64))


@triton.jit
def choose_slowly(
    words, powers, sums, counted, summed, gathered, drawn,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row whose candidates were not gathered, and empty its bins for the next step.

    counted, summed  int32, int64 [rows, BINS]
    """
    row = tl.program_id(0)
    row_words = words + row * WORDS
    state = tl.load(gathered + row)
    if (tl.load(row_words) == 0) | (state >= 0):
        return
    counted += row * BINS
    summed += row * BINS
    if state == -2:
        _empty(counted, summed, BINS)
        return
    powers += row.to(tl.int64) * VOCAB
    blocks = tl.arange(0, BLOCKS_2)
    total = tl.sum(tl.load(sums + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=0), 0)
    top_k, top_p, typical_p = tl.load(row_words + 5).to(tl.int64), _word64(row_words, 10), _word64(row_words, 22)
    min_p = _word64(row_words, 12).to(tl.int64)
    top_a = _word64(row_words, 14).to(tl.float64, bitcast=True)
    least = tl.full([], -1, tl.int64)  # all are kept
    if top_k > 0:
        found, larger = _largest(powers, counted, top_k, VOCAB, BINS, True)
        least = found.to(tl.int64)
        total = _sum_from(powers, least + 1, VOCAB) + (top_k - larger) * least
    if top_p > 0:
        target = tl.umulhi(total.to(tl.uint64), top_p).to(tl.int64) + 1
        found, larger = _largest(powers, summed, target, VOCAB, BINS, False)
        least = found.to(tl.int64)
        total = larger + (target - larger + least - 1) // least * least
    if top_a > 0:
        edge = tl.minimum(tl.ceil(top_a / total.to(tl.float64)).to(tl.int64), ONE)
        if edge > least:
            least = edge - 1
            total = _sum_from(powers, edge, VOCAB)
    if min_p > least:
        least = min_p - 1
        total = _sum_from(powers, min_p, VOCAB)
    skipped = tl.zeros([], tl.int64)
    if typical_p > 0:
        skipped, total = _typical(powers, least, total, typical_p, VOCAB)
    aim = skipped + tl.umulhi(_word64(row_words, 8), total.to(tl.uint64)).to(tl.int64)
    weight, larger = _largest(powers, summed, aim + 1, VOCAB, BINS, False)
    nth = (aim - larger) // weight.to(tl.int64)
    tl.store(drawn + row, _nth_of_equals(powers, weight, nth, VOCAB, BLOCKS_2, BLOCK).to(tl.int64))
    _empty(counted, summed, BINS)
