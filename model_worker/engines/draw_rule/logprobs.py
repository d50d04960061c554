# mypy: ignore-errors
# (Triton's language is not Python)
"""Log-probabilities by the model alone, of the drawn ids and of the likeliest ids, as Triton kernels.

``block_tops`` finds the likeliest ids and the sum of exponentials of each block, ``merge`` those of the row. Of equal
logits the lowest id is first. Values are floats, which may differ in the last bits from the host's.
"""

import triton
import triton.language as tl

MOST = tl.constexpr(32)  # room for likeliest ids of a block and of a row; a request may ask for 20


@triton.jit
def _likeliest(x, ids, n):
    """Return the n highest values and their ids, [MOST] each, highest first. Values beyond n are -inf."""
    place = tl.arange(0, MOST)
    values = tl.full([MOST], float("-inf"), tl.float32)
    found = tl.full([MOST], 2147483647, tl.int32)
    left = ids == ids
    i = n * 0
    while i < n:
        top = tl.max(tl.where(left, x, float("-inf")), 0)
        first = tl.min(tl.where(left & (x == top), ids, 2147483647), 0)
        values = tl.where(place == i, top, values)
        found = tl.where(place == i, first, found)
        left = left & (ids != first)
        i += 1
    return values, found


@triton.jit
def block_tops(
    logits, wanted, block_values, block_ids, block_sums, stride,
    DRAWABLE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid: blocks, rows. ``wanted`` int32 [rows]: -1 for a row without log-probabilities, else its likeliest ids."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    n = tl.load(wanted + row)
    if n >= 0:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < DRAWABLE, other=float("-inf")).to(tl.float32)
        values, found = _likeliest(x, ids, tl.maximum(n, 1))
        top = tl.max(values, 0)
        total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0)
        place = (row * BLOCKS + block) * MOST + tl.arange(0, MOST)
        tl.store(block_values + place, values)
        tl.store(block_ids + place, found)
        tl.store(block_sums + row * BLOCKS + block, total)


@triton.jit
def merge(
    logits, wanted, drawn, block_values, block_ids, block_sums, own, values_out, ids_out, stride,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Grid: rows. Write the drawn id's log-probability, and the likeliest ids with theirs."""
    row = tl.program_id(0)
    n = tl.load(wanted + row)
    if n >= 0:
        NEVER: tl.constexpr = float("-inf")
        column = tl.arange(0, COLUMNS)
        tops = tl.load(block_values + (row * BLOCKS + column) * MOST, mask=column < BLOCKS, other=NEVER)
        sums = tl.load(block_sums + row * BLOCKS + column, mask=column < BLOCKS, other=0.0)
        top = tl.max(tops, 0)
        total = top + tl.log(tl.sum(tl.where(tops == NEVER, 0.0, sums * tl.exp(tops - top)), 0))
        token = tl.load(drawn + row)
        x = tl.load(logits + row.to(tl.int64) * stride + token).to(tl.float32)
        tl.store(own + row, x - total)
        candidate = tl.arange(0, CANDIDATES)
        inside = candidate < BLOCKS * MOST
        each = tl.load(block_values + row * BLOCKS * MOST + candidate, mask=inside, other=NEVER)
        ids = tl.load(block_ids + row * BLOCKS * MOST + candidate, mask=inside, other=2147483647)
        values, found = _likeliest(each, ids, n)
        place = row * MOST + tl.arange(0, MOST)
        tl.store(values_out + place, values - total)
        tl.store(ids_out + place, found)
