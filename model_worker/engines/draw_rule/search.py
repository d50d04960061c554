# mypy: ignore-errors
# (Triton's language is not Python)
"""The draw of a row with a cut whose candidates do not fit into the buffer. One program reads the row many times.

Equal weights need no order here: the index among equals is a quotient.
"""

import triton
import triton.language as tl

from model_worker.engines.draw_rule.weighing import BINS, ONE, STEP, WHOLE, product, share, weigh_ids


@triton.jit
def _find_weight(
    logits, step, whole, real, bias, limits, ends, seen, count, row, top, goal,
    MASS: tl.constexpr, stride, DRAWABLE: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return (weight, number of candidates above it, their sum). The weight is the highest w such that the candidates
    of weight w or more number ``goal``, or with MASS sum up to ``goal``.

    Each pass halves the range and then narrows it to weights that exist. So a row of few different weights is quick.
    """
    low = goal * 0 + 1
    high = goal * 0 + ONE + 1
    above = goal * 0
    mass = goal * 0
    while high - low > 1:
        middle = (low + high) >> 1
        number = goal * 0
        total = goal * 0
        next_up = goal * 0 + ONE + 1
        next_down = goal * 0
        for block in range(0, BLOCKS):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            w = weigh_ids(
                logits, step, whole, real, bias, limits, ends, seen, count, row, ids, top, stride, DRAWABLE, WIDTH,
                WORDS,
            )  # fmt: skip
            up = w >= middle
            number += tl.sum(up.to(tl.int32), 0)
            total += tl.sum(tl.where(up, w, 0), 0)
            next_up = tl.minimum(next_up, tl.min(tl.where(up, w, ONE + 1), 0))
            next_down = tl.maximum(next_down, tl.max(tl.where(up, 0, w), 0))
        reached = total >= goal if MASS else number >= goal
        low = tl.where(reached, next_up, low)
        high = tl.where(reached, high, tl.maximum(next_down, low) + 1)
        above = tl.where(reached, above, number)
        mass = tl.where(reached, mass, total)
    return low, above, mass


@triton.jit
def _nth_from_end(
    logits, step, whole, real, bias, limits, ends, seen, count, row, top, weight, n,
    stride, DRAWABLE: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the n-th id (from 0), counted from the highest, of those that have this weight."""
    found = tl.load(step + row * STEP).to(tl.int32) * 0 - 1
    for back in range(0, BLOCKS):
        if found < 0:
            ids = (BLOCKS - 1 - back) * BLOCK + tl.arange(0, BLOCK)
            w = weigh_ids(
                logits, step, whole, real, bias, limits, ends, seen, count, row, ids, top, stride, DRAWABLE, WIDTH,
                WORDS,
            )  # fmt: skip
            equal = (w == weight).to(tl.int32)
            number = tl.sum(equal, 0)
            if n < number:
                from_start = number - 1 - n.to(tl.int32)
                found = tl.sum(tl.where((tl.cumsum(equal, 0) == from_start + 1) & (equal != 0), ids, 0), 0)
            n -= number
    return found


@triton.jit
def from_row(
    logits, step, whole, real, bias, limits, ends, seen, count, bins, row, top, point, total,
    stride, DRAWABLE: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the drawn id of a row with a cut that the buffer does not suffice for. Reads the row many times."""
    slot = tl.load(step + row * STEP)
    top_k = tl.load(whole + slot * WHOLE + 1)
    top_p = tl.load(whole + slot * WHOLE + 2)
    top_a = tl.load(whole + slot * WHOLE + 3)
    min_p = tl.load(whole + slot * WHOLE + 4)
    bit = tl.arange(0, BINS)
    nonzero = tl.sum(tl.where(bit > 0, tl.load(bins + row * BINS + bit), 0), 0)
    zero = total * 0
    last = zero + 1  # the weight of the last candidate
    if (top_k > 0) & (top_k < nonzero):
        last, above, mass = _find_weight(
            logits, step, whole, real, bias, limits, ends, seen, count, row, top, top_k, False,
            stride, DRAWABLE, WIDTH, WORDS, BLOCK, BLOCKS,
        )  # fmt: skip
        total = mass + (top_k - above) * last
    if top_p != 0:
        target = tl.maximum(share(top_p, total), 1)
        last, above, mass = _find_weight(
            logits, step, whole, real, bias, limits, ends, seen, count, row, top, target, True,
            stride, DRAWABLE, WIDTH, WORDS, BLOCK, BLOCKS,
        )  # fmt: skip
        total = mass + (target - mass + last - 1) // last * last
    least = tl.maximum(min_p, 1)
    if top_a != 0:
        low = zero
        high = zero + ONE
        while high - low > 1:  # a weight of ``high`` is kept, one of ``low`` is not
            middle = (low + high) >> 1
            enough = product(middle, total) >= top_a
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle)
        least = tl.maximum(least, high)
    if least > last:
        total = zero
        for block in range(0, BLOCKS):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            w = weigh_ids(
                logits, step, whole, real, bias, limits, ends, seen, count, row, ids, top, stride, DRAWABLE, WIDTH,
                WORDS,
            )  # fmt: skip
            total += tl.sum(tl.where(w >= least, w, 0), 0)
    mark = share(point, total)
    drawn, above, mass = _find_weight(
        logits, step, whole, real, bias, limits, ends, seen, count, row, top, mark + 1, True,
        stride, DRAWABLE, WIDTH, WORDS, BLOCK, BLOCKS,
    )  # fmt: skip
    return _nth_from_end(
        logits, step, whole, real, bias, limits, ends, seen, count, row, top, drawn, (mark - mass) // drawn,
        stride, DRAWABLE, WIDTH, WORDS, BLOCK, BLOCKS,
    )  # fmt: skip
