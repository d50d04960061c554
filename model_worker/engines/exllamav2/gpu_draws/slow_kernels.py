# mypy: ignore-errors
"""Draws of rows that keep more candidates than ``kernels.gather`` collects: the same cuts over the whole vocabulary."""

import triton
import triton.language as tl

from model_worker.engines.exllamav2.gpu_draws.kernels import ONE, WORDS, _weight, _word64


@triton.jit
def _mass_of_all(powers, row, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        w = _weight(tl.load(powers + row.to(tl.int64) * VOCAB + ids, mask=ids < VOCAB, other=0.0))
        total += tl.where(w >= least, w, 0)
    return tl.sum(total, 0)


@triton.jit
def _count_of_all(powers, row, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        w = _weight(tl.load(powers + row.to(tl.int64) * VOCAB + ids, mask=ids < VOCAB, other=-1.0))
        total += (w >= least).to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def choose_slowly(
    words, powers, sums, gathered, drawn,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row whose candidates were not gathered: the same cuts over the whole vocabulary."""
    row = tl.program_id(0)
    if (tl.load(words + row * WORDS) == 0) | (tl.load(gathered + row) >= 0):
        return
    row_words = words + row * WORDS
    blocks = tl.arange(0, BLOCKS_2)
    total = tl.sum(tl.load(sums + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=0), 0)
    top_k, top_p = tl.load(row_words + 5).to(tl.int64), _word64(row_words, 10)
    min_p = _word64(row_words, 12).to(tl.int64)
    top_a = _word64(row_words, 14).to(tl.float64, bitcast=True)
    least = tl.full([], -1, tl.int64)  # all are kept
    if top_k > 0:
        least = tl.zeros([], tl.int64)
        for bit in range(40, -1, -1):
            trial = least | (tl.full([], 1, tl.int64) << bit)
            if _count_of_all(powers, row, trial, VOCAB, BLOCK) >= top_k:
                least = trial
        ties = top_k - _count_of_all(powers, row, least + 1, VOCAB, BLOCK)
        total = _mass_of_all(powers, row, least + 1, VOCAB, BLOCK) + ties * least
    if top_p > 0:
        target = tl.umulhi(total.to(tl.uint64), top_p).to(tl.int64) + 1
        least = tl.zeros([], tl.int64)
        for bit in range(40, -1, -1):
            trial = least | (tl.full([], 1, tl.int64) << bit)
            if _mass_of_all(powers, row, trial, VOCAB, BLOCK) >= target:
                least = trial
        above = _mass_of_all(powers, row, least + 1, VOCAB, BLOCK)
        total = above + (target - above + least - 1) // least * least
    if top_a > 0:
        edge = tl.minimum(tl.ceil(top_a / total.to(tl.float64)).to(tl.int64), ONE)
        if edge > least:
            least = edge - 1
            total = _mass_of_all(powers, row, edge, VOCAB, BLOCK)
    if min_p > least:
        total = _mass_of_all(powers, row, min_p, VOCAB, BLOCK)
    aim = tl.umulhi(_word64(row_words, 8), total.to(tl.uint64)).to(tl.int64)
    weight = tl.zeros([], tl.int64)
    for bit in range(40, -1, -1):
        trial = weight | (tl.full([], 1, tl.int64) << bit)
        if _mass_of_all(powers, row, trial, VOCAB, BLOCK) > aim:
            weight = trial
    nth = (aim - _mass_of_all(powers, row, weight + 1, VOCAB, BLOCK)) // weight
    found, left = tl.full([], -1, tl.int32), nth  # the nth of equal weights by descending id: from the last block
    for back in range(BLOCKS):
        ids = (BLOCKS - 1 - back) * BLOCK + tl.arange(0, BLOCK)
        w = _weight(tl.load(powers + row.to(tl.int64) * VOCAB + ids, mask=ids < VOCAB, other=-1.0))
        same = (w == weight) & (ids < VOCAB)
        here = tl.sum(same.to(tl.int64), 0)
        if (found < 0) & (left < here):
            behind = here - tl.cumsum(same.to(tl.int64), 0)  # equal ones with a higher id in this block
            found = tl.max(tl.where(same & (behind == left), ids, -1), 0)
        left -= here
    tl.store(drawn + row, found.to(tl.int64))
