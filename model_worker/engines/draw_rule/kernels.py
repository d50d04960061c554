# mypy: ignore-errors
# (Triton's language is not Python: it has other types, and separates choices at compile time from those at run time)
"""Draw tokens by the rule, as Triton kernels. ``reference`` says what they compute; they give the same tokens.

One draw of all rows is four launches, one after another:

``peaks``   finds the highest logit of each block of the vocabulary
``weigh``   adds up the weights of each block, and counts them by their magnitude where the row has a cut
``gather``  copies the heaviest candidates of each row with a cut to a buffer, as many as it holds
``choose``  draws each row's token, and notes the token in the row's tables

Launch them with enable_fp_fusion=False: each operation is rounded by itself. A row is a place in the batch. A slot
holds what belongs to a request. The layout of ``step``, ``whole`` and ``real`` is that of ``batched``.
"""

import triton
import triton.language as tl

from model_worker.engines.draw_rule.search import from_row
from model_worker.engines.draw_rule.weighing import (
    BINS,
    COUNTS,
    CUTS,
    GREEDY,
    ID_BITS,
    ID_MASK,
    REPEATS,
    STEP,
    WHOLE,
    adjusted,
    product,
    share,
    weigh_ids,
)


@triton.jit
def peaks(
    logits, step, whole, real, bias, limits, ends, seen, count, tops, places, bins, filled,
    stride, DRAWABLE: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write each block's highest logit and its lowest id; the id is -1 if a logit is not a number. Clear the counters
    of the row."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = adjusted(logits, step, whole, real, bias, limits, ends, seen, count, row, ids, stride, DRAWABLE, WIDTH, WORDS)
    bad = tl.max((x != x).to(tl.int32), 0)
    x = tl.where(x != x, float("-inf"), x)
    top = tl.max(x, 0)
    place = tl.min(tl.where(x == top, ids, 2147483647), 0)
    tl.store(tops + row * BLOCKS + block, top)
    tl.store(places + row * BLOCKS + block, tl.where(bad != 0, -1, place))
    if block == 0:
        tl.store(bins + row * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
        tl.store(filled + row, 0)


@triton.jit
def _peak(tops, places, row, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the row's highest logit and its lowest id; the id is -1 if a logit is not a number."""
    column = tl.arange(0, COLUMNS)
    each = tl.load(tops + row * BLOCKS + column, mask=column < BLOCKS, other=float("-inf"))
    place = tl.load(places + row * BLOCKS + column, mask=column < BLOCKS, other=2147483647)
    top = tl.max(each, 0)
    first = tl.min(tl.where(each == top, place, 2147483647), 0)
    return top, tl.where(tl.min(place, 0) < 0, -1, first)


@triton.jit
def weigh(
    logits, step, whole, real, bias, limits, ends, seen, count, tops, places, sums, bins,
    stride, DRAWABLE: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write each block's sum of weights. Where the row has a cut, count the weights by their number of bits."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    flags = tl.load(whole + tl.load(step + row * STEP) * WHOLE)
    if (flags & GREEDY) == 0:
        top, place = _peak(tops, places, row, BLOCKS, COLUMNS)
        if (place >= 0) & (top > float("-inf")) & (top < float("inf")):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            w = weigh_ids(
                logits, step, whole, real, bias, limits, ends, seen, count, row, ids, top, stride, DRAWABLE, WIDTH,
                WORDS,
            )  # fmt: skip
            tl.store(sums + row * BLOCKS + block, tl.sum(w, 0))
            if (flags & CUTS) != 0:
                # The exponent of a float is the number of bits: a float of 24 bits may round up, so cut them off first.
                high = (w >> 20).to(tl.int32)
                head = tl.where(high > 0, high, (w & 1048575).to(tl.int32)).to(tl.float32)
                bits = ((head.to(tl.int32, bitcast=True) >> 23) - 126) + tl.where(high > 0, 20, 0)
                held = tl.histogram(tl.where(w > 0, bits, 0), BINS)
                tl.atomic_add(bins + row * BINS + tl.arange(0, BINS), held, mask=held > 0, sem="relaxed")


@triton.jit
def _least(bins, row, ROOM: tl.constexpr):
    """Return the least number of bits of the weights in the row's buffer: 1 means all weights that are not 0."""
    bit = tl.arange(0, BINS)
    held = tl.load(bins + row * BINS + bit)
    held = tl.where(bit > 0, held, 0)
    from_here = tl.sum(held, 0) - tl.cumsum(held, 0) + held  # how many weights have this many bits or more
    return tl.maximum(tl.min(tl.where(from_here <= ROOM, bit, BINS), 0), 1)


@triton.jit
def gather(
    logits, step, whole, real, bias, limits, ends, seen, count, tops, places, bins, filled, keys,
    stride, DRAWABLE: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Copy the heaviest candidates to the row's buffer, in any order. A candidate is weight << ID_BITS | id."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    flags = tl.load(whole + tl.load(step + row * STEP) * WHOLE)
    if (flags & (GREEDY | CUTS)) == CUTS:
        top, place = _peak(tops, places, row, BLOCKS, COLUMNS)
        if (place >= 0) & (top > float("-inf")) & (top < float("inf")):
            least = _least(bins, row, ROOM)
            ids = block * BLOCK + tl.arange(0, BLOCK)
            w = weigh_ids(
                logits, step, whole, real, bias, limits, ends, seen, count, row, ids, top, stride, DRAWABLE, WIDTH,
                WORDS,
            )  # fmt: skip
            taken = (w >> (least - 1)) > 0
            number = tl.sum(taken.to(tl.int32), 0)
            if number > 0:
                first = tl.atomic_add(filled + row, number, sem="relaxed")
                index = first + tl.cumsum(taken.to(tl.int32), 0) - 1
                tl.store(keys + row * ROOM + index, (w << ID_BITS) | ids, mask=taken)


@triton.jit
def _from_buffer(whole, slot, point, total, least, keys, filled, row, ROOM: tl.constexpr):
    """Return the drawn id, or -1 if the buffer does not hold all candidates that the cuts may leave."""
    place = tl.arange(0, ROOM)
    held = tl.load(filled + row)
    key = tl.load(keys + row * ROOM + place, mask=place < held, other=0)
    key = tl.sort(key, descending=True)
    w = key >> ID_BITS
    sums = tl.cumsum(w, 0)
    top_k = tl.load(whole + slot * WHOLE + 1).to(tl.int32)
    top_p = tl.load(whole + slot * WHOLE + 2)
    top_a = tl.load(whole + slot * WHOLE + 3)
    min_p = tl.load(whole + slot * WHOLE + 4)
    complete = least == 1
    known = complete | ((top_k > 0) & (top_k <= held))
    sure = complete | (top_k == 0) | (top_k <= held)  # whether ``total`` is right
    kept = held
    if top_k > 0:
        kept = tl.minimum(held, top_k)
        total = tl.where(known, tl.sum(tl.where(place < kept, w, 0), 0), total)
    if top_p != 0:
        target = tl.maximum(share(top_p, total), 1)
        size = tl.sum(((sums < target) & (place < kept)).to(tl.int32), 0) + 1
        known = known | (sure & (size <= kept))
        sure = sure & known
        kept = tl.minimum(kept, size)
        total = tl.sum(tl.where(place < kept, w, 0), 0)
    if top_a != 0:
        enough = tl.sum(((product(w, total) >= top_a) & (place < kept)).to(tl.int32), 0)
        known = known | (enough < kept)
        kept = enough
    if min_p != 0:
        enough = tl.sum(((w >= min_p) & (place < kept)).to(tl.int32), 0)
        known = known | (enough < kept)
        kept = enough
    total = tl.sum(tl.where(place < kept, w, 0), 0)
    mark = share(point, total)
    index = tl.sum(((sums <= mark) & (place < kept)).to(tl.int32), 0)
    drawn = tl.sum(tl.where(place == index, key, 0), 0) & ID_MASK
    return tl.where(known & sure & (held > 0), drawn, -1).to(tl.int32)


@triton.jit
def choose(
    logits, step, whole, real, bias, limits, ends, seen, count, tops, places, sums, bins, filled, keys, drawn, states,
    stride, DRAWABLE: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Write the row's id and state (``reference``). Note the id in the slot's tables."""
    row = tl.program_id(0)
    slot = tl.load(step + row * STEP)
    flags = tl.load(whole + slot * WHOLE)
    top, place = _peak(tops, places, row, BLOCKS, COLUMNS)
    state = tl.where(place < 0, 1, tl.where(top == float("-inf"), 2, 0))
    token = tl.where(state == 0, place, 0)
    if (state == 0) & (top < float("inf")) & ((flags & GREEDY) == 0):
        point = tl.load(step + row * STEP + 1)
        column = tl.arange(0, COLUMNS)
        each = tl.load(sums + row * BLOCKS + column, mask=column < BLOCKS, other=0)
        total = tl.sum(each, 0)
        if (flags & CUTS) == 0:
            mark = share(point, total)
            block = tl.sum(((tl.cumsum(each, 0) <= mark) & (column < BLOCKS)).to(tl.int32), 0)
            before = tl.sum(tl.where(column < block, each, 0), 0)
            offset = tl.arange(0, BLOCK)
            w = weigh_ids(
                logits, step, whole, real, bias, limits, ends, seen, count, row, block * BLOCK + offset, top, stride,
                DRAWABLE, WIDTH, WORDS,
            )  # fmt: skip
            token = block * BLOCK + tl.sum((before + tl.cumsum(w, 0) <= mark).to(tl.int32), 0)
        else:
            least = _least(bins, row, ROOM)
            token = _from_buffer(whole, slot, point, total, least, keys, filled, row, ROOM)
            if token < 0:
                token = from_row(
                    logits, step, whole, real, bias, limits, ends, seen, count, bins, row, top, point, total,
                    stride, DRAWABLE, WIDTH, WORDS, BLOCK, BLOCKS,
                )  # fmt: skip
    tl.store(drawn + row, token.to(tl.int64))
    tl.store(states + row, state)
    if state == 0:
        if (flags & REPEATS) != 0:
            tl.store(seen + slot * WIDTH + token, (tl.load(step + row * STEP + 2) + 1).to(tl.int32))
        if (flags & COUNTS) != 0:
            tl.store(count + slot * WIDTH + token, tl.load(count + slot * WIDTH + token) + 1)
