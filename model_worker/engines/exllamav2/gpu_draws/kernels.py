"""The rule of ``rule`` as Triton kernels, over all rows of a step at once.

``adjust`` reads the logits: penalties, bias, and the largest of each block. ``weigh`` computes the weights. It sums
those of each block, and counts and sums those above each of LEVELS thresholds. ``gather`` takes the highest threshold
above which all candidates of a row must be, and collects the tokens above it. ``choose`` draws from these, with one
program for each row. Kernels further below draw for rows that keep too many tokens, and for typical_p.

Weights are kept as float32 powers of 2, and made integers where they are summed. The kernels must be launched without
fusing multiplication and addition (``enable_fp_fusion=False``), as each operation is rounded by itself.

Words of a row, int32, written by the host for each step (``rows.RowWords``):

    0  kind: 0 the host draws, 1 greedy, 2 by weights       8, 9    point, 64 bits: the 53 bits, shifted left by 11
    1  slot of the row's tables; -1: none                   10, 11  top_p, of 2**64; 0: off
    2  position: tokens of the sequence so far              12, 13  least weight of min_p; 0: off
    3  penalty_range; -1: all                               14, 15  top_a * 2**80, float64; 0: off
    4  penalty_end                                          16      scale, float32
    5  top_k; 0: off                                        17      penalty, float32; 1: off
    6  1: smoothed                                          18      fade, float32
    7  1: any cut                                           19, 20  frequency and presence, float32
                                                            21      mask of allowed tokens; -1: none
                                                            22, 23  typical_p, of 2**64; 0: off
"""

import triton
import triton.language as tl

# mypy: ignore-errors


WORDS = tl.constexpr(24)
ONE = tl.constexpr(1 << 40)
HUGE = tl.constexpr(3e38)
LEVELS = tl.constexpr(8)
FIRST_BIN = tl.constexpr((127 + 9) << 7)
"""The upper half of the float32 number 2**9. Weights below the next such number are in bin 0, those up to the one
behind it in bin 1, and so on: 32 powers of 2, with 128 bins each."""


@triton.jit
def _word64(row_words, at):
    low = tl.load(row_words + at).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(row_words + at + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low


@triton.jit
def _float(row_words, at):
    return tl.load(row_words + at).to(tl.float32, bitcast=True)


@triton.jit
def _weight(power):
    return (power * 1099511627776.0).to(tl.int64)  # 2**40


@triton.jit
def adjust(
    logits, words, bias, last_seen, counts, masks, largest, where, wrong,
    ROW: tl.constexpr, VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the largest adjusted logit of a block, its lowest id, and whether the block has a NaN.

    logits     fp16 [rows, ROW]
    bias       float32 [slots, VOCAB]; last_seen, counts int32 [slots, VOCAB]
    masks      uint8 [masks, VOCAB / 8, rounded up]: a bit for each id that may be drawn
    largest    float32 [rows, BLOCKS]; where, wrong int32
    """
    row, block = tl.program_id(0), tl.program_id(1)
    row_words = words + row * WORDS
    if tl.load(row_words) == 0:
        return
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = _adjusted(logits, row_words, bias, last_seen, counts, masks, row, ids, ROW, VOCAB)
    at = row * BLOCKS + block
    bad = tl.sum((x != x).to(tl.int32), 0)
    x = tl.where(x != x, float("-inf"), x)
    top = tl.max(x, 0)
    tl.store(largest + at, top)
    tl.store(where + at, tl.min(tl.where(x == top, ids, VOCAB), 0))
    tl.store(wrong + at, bad)


@triton.jit
def _adjusted(logits, row_words, bias, last_seen, counts, masks, row, ids, ROW: tl.constexpr, VOCAB: tl.constexpr):
    """Return float32 logits after penalties and bias; -inf beyond the vocabulary."""
    inside = ids < VOCAB
    x = tl.load(logits + row.to(tl.int64) * ROW + ids, mask=inside, other=float("-inf")).to(tl.float32)
    slot = tl.load(row_words + 1)
    if slot >= 0:
        table = slot.to(tl.int64) * VOCAB + ids
        penalty = _float(row_words, 17)
        if penalty != 1.0:
            seen = tl.load(last_seen + table, mask=inside, other=0)
            distance = tl.load(row_words + 2) - seen
            limit = tl.load(row_words + 3)
            beyond = tl.where(limit >= 0, tl.maximum(distance - limit, 0), 0)
            p = penalty + _float(row_words, 18) * beyond.to(tl.float32)
            p = tl.where((seen > 0) & (distance < tl.load(row_words + 4)), p, 1.0)
            x = tl.where(x > 0, tl.div_rn(x, p), x * p)
            x = tl.where(x > HUGE, HUGE, tl.where(x < -HUGE, -HUGE, x))  # inf - inf, for a banned token, is no number
            x = tl.where(inside, x, float("-inf"))
        frequency, presence = _float(row_words, 19), _float(row_words, 20)
        if (frequency != 0.0) | (presence != 0.0):
            n = tl.load(counts + table, mask=inside, other=0)
            x = x - tl.where(n > 0, frequency * n.to(tl.float32) + presence, 0.0)
        x = x + tl.load(bias + table, mask=inside, other=0.0)
    allowed = tl.load(row_words + 21)
    if allowed >= 0:
        at = allowed.to(tl.int64) * ((VOCAB + 7) // 8) + ids // 8
        bits = tl.load(masks + at, mask=inside, other=0).to(tl.int32)
        x = x + tl.where((bits >> (ids % 8)) % 2 == 1, 0.0, float("-inf"))
    return x


@triton.jit
def _top(largest, row, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr):
    blocks = tl.arange(0, BLOCKS_2)
    return tl.max(tl.load(largest + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=float("-inf")), 0)


@triton.jit
def weigh(
    logits, words, bias, last_seen, counts, masks, largest, powers, sums, above, mass_above,
    ROW: tl.constexpr, VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the weights of a block.

    powers             float32 [rows, VOCAB]
    sums               int64 [rows, BLOCKS]: of the block's weights
    above, mass_above  int32, int64 [rows, LEVELS, BLOCKS]: number and sum of the weights above each threshold
    """
    row, block = tl.program_id(0), tl.program_id(1)
    row_words = words + row * WORDS
    if tl.load(row_words) != 2:
        return
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = _adjusted(logits, row_words, bias, last_seen, counts, masks, row, ids, ROW, VOCAB)
    top = _top(largest, row, BLOCKS, BLOCKS_2)
    below = tl.where(x == top, 0.0, x - top)
    z = tl.where(tl.load(row_words + 6) != 0, -(below * below), below)
    y = tl.where(x == float("-inf"), float("-inf"), z * _float(row_words, 16))
    power = _exp2(y)
    tl.store(powers + row.to(tl.int64) * VOCAB + ids, power, mask=ids < VOCAB)
    w = _weight(power)
    tl.store(sums + row * BLOCKS + block, tl.sum(w, 0))
    if tl.load(row_words + 7) != 0:
        for level in tl.static_range(LEVELS):
            likely = w >= _threshold(level)
            at = (row * LEVELS + level) * BLOCKS + block
            tl.store(above + at, tl.sum(likely.to(tl.int32), 0))
            tl.store(mass_above + at, tl.sum(tl.where(likely, w, 0), 0))


@triton.jit
def _threshold(level):  # 2**-4 of the largest weight, 2**-8, ...
    return tl.full([], 1, tl.int64) << (36 - 4 * level)


@triton.jit
def gather(
    words, powers, sums, above, mass_above, likely, likely_ids, gathered, counted, summed,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """Collect the tokens among which all candidates of a row are, by ids. If they are too many, fill the row's bins.

    likely, likely_ids  int64, int32 [rows, MOST]: weights and ids
    gathered            int32 [rows]: how many there are; -1: they would be more than MOST, or typical_p is on
    counted, summed     int32, int64 [rows, BINS], which are zeros before: numbers and sums of all weights, by bin. The
                        numbers are for top_k
    """
    row, block = tl.program_id(0), tl.program_id(1)
    row_words = words + row * WORDS
    if (tl.load(row_words) != 2) | (tl.load(row_words + 7) == 0):
        return
    blocks = tl.arange(0, BLOCKS_2)
    there = blocks < BLOCKS
    total = tl.sum(tl.load(sums + row * BLOCKS + blocks, mask=there, other=0), 0)
    top_k, top_p = tl.load(row_words + 5), _word64(row_words, 10)
    min_p = _word64(row_words, 12).to(tl.int64)
    top_a = _word64(row_words, 14).to(tl.float64, bitcast=True)
    target = tl.umulhi(total.to(tl.uint64), top_p).to(tl.int64) + 1
    edge = tl.maximum(min_p, tl.minimum(tl.ceil(top_a / total.to(tl.float64)).to(tl.int64), ONE))
    taken = tl.full([], -1, tl.int32)
    number = tl.zeros([], tl.int32)
    for level in tl.static_range(LEVELS):
        at = (row * LEVELS + level) * BLOCKS + blocks
        count = tl.sum(tl.load(above + at, mask=there, other=0), 0)
        mass = tl.sum(tl.load(mass_above + at, mask=there, other=0), 0)
        if top_k > 0:
            suffices = count >= top_k
        elif top_p > 0:
            suffices = mass >= target
        else:
            suffices = edge >= _threshold(level)
        if (taken < 0) & suffices:
            taken = tl.full([], level, tl.int32)
            number = count
    ids = block * BLOCK + tl.arange(0, BLOCK)
    power = tl.load(powers + row.to(tl.int64) * VOCAB + ids, mask=ids < VOCAB, other=0.0)
    w = _weight(power)
    if (taken < 0) | (number > MOST) | (_word64(row_words, 22) != 0):
        tl.store(gathered + row, -1)
        weight = power * 1099511627776.0
        number_of_bin = (weight.to(tl.int32, bitcast=True) >> 16) - FIRST_BIN
        bins = row * BINS + tl.minimum(
            tl.maximum(number_of_bin, 0), BINS - 1
        )  # a weight that is no number has any bits
        tl.atomic_add(summed + bins, w, mask=w > 0, sem="relaxed")
        if top_k > 0:
            tl.atomic_add(counted + bins, tl.full([BLOCK], 1, tl.int32), mask=ids < VOCAB, sem="relaxed")
        return
    tl.store(gathered + row, number)
    at = (row * LEVELS + taken) * BLOCKS
    before = tl.sum(tl.load(above + at + blocks, mask=there & (blocks < block), other=0), 0)
    keep = w >= _threshold(taken.to(tl.int64))
    place = row.to(tl.int64) * MOST + before + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(likely + place, w, mask=keep)
    tl.store(likely_ids + place, ids, mask=keep)


@triton.jit
def _exp2(y):
    zero = y < -60.0
    y = tl.where(zero, 0.0, y)
    whole = tl.floor(y)
    part = y - whole
    value = 1.5252733804059840e-05 * part + 0.00015403530393381608
    value = value * part + 0.0013333558146428443
    value = value * part + 0.009618129107628477
    value = value * part + 0.05550410866482158
    value = value * part + 0.24022650695910072
    value = value * part + 0.6931471805599453
    value = value * part + 1.0
    scale = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(zero, 0.0, value * scale)


@triton.jit
def _mass(w, least):
    return tl.sum(tl.where(w >= least, w, 0), 0)


@triton.jit
def choose(
    words, largest, where, wrong, powers, sums, likely, likely_ids, gathered, drawn,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_2: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row, unless its candidates were not gathered.

    drawn  int64 [rows]; -1 where the logits are not numbers. ``gathered`` becomes -2 there if it was -1
    """
    row = tl.program_id(0)
    row_words = words + row * WORDS
    kind = tl.load(row_words)
    if kind == 0:
        return
    blocks = tl.arange(0, BLOCKS_2)
    there = blocks < BLOCKS
    tops = tl.load(largest + row * BLOCKS + blocks, mask=there, other=float("-inf"))
    top = tl.max(tops, 0)
    bad = tl.sum(tl.load(wrong + row * BLOCKS + blocks, mask=there, other=0), 0)
    if (bad > 0) | (top == float("-inf")):
        tl.store(drawn + row, -1)
        tl.store(gathered + row, tl.where(tl.load(gathered + row) < 0, -2, 0))
        return
    if kind == 1:
        first = tl.load(where + row * BLOCKS + blocks, mask=there, other=VOCAB)
        tl.store(drawn + row, tl.min(tl.where(tops == top, first, VOCAB), 0).to(tl.int64))
        tl.store(gathered + row, 0)
        return
    point = _word64(row_words, 8)
    by_block = tl.load(sums + row * BLOCKS + blocks, mask=there, other=0)
    total = tl.sum(by_block, 0)
    if tl.load(row_words + 7) == 0:
        aim = tl.umulhi(point, total.to(tl.uint64)).to(tl.int64)
        block = tl.sum((there & (tl.cumsum(by_block, 0) <= aim)).to(tl.int32), 0)
        before = tl.sum(tl.where(blocks < block, by_block, 0), 0)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        w = _weight(tl.load(powers + row.to(tl.int64) * VOCAB + ids, mask=ids < VOCAB, other=0.0))
        passed = tl.sum((tl.cumsum(w, 0) <= aim - before).to(tl.int32), 0)
        tl.store(drawn + row, (block * BLOCK + passed).to(tl.int64))
        tl.store(gathered + row, 0)
        return
    number = tl.load(gathered + row)
    if number < 0:
        return
    entry = tl.arange(0, MOST)
    w = tl.load(likely + row.to(tl.int64) * MOST + entry, mask=entry < number, other=-1)
    ids = tl.load(likely_ids + row.to(tl.int64) * MOST + entry, mask=entry < number, other=-1)
    top_k, top_p = tl.load(row_words + 5).to(tl.int64), _word64(row_words, 10)
    min_p = _word64(row_words, 12).to(tl.int64)
    top_a = _word64(row_words, 14).to(tl.float64, bitcast=True)
    # Candidates are those with larger weights than ``least``, and some of those with equal ones.
    least = tl.full([], -1, tl.int64)
    if top_k > 0:
        least = tl.zeros([], tl.int64)
        for bit in range(40, -1, -1):
            trial = least | (tl.full([], 1, tl.int64) << bit)
            if tl.sum((w >= trial).to(tl.int64), 0) >= top_k:
                least = trial
        ties = top_k - tl.sum((w > least).to(tl.int64), 0)
        total = _mass(w, least + 1) + ties * least
    if top_p > 0:
        target = tl.umulhi(total.to(tl.uint64), top_p).to(tl.int64) + 1
        least = tl.zeros([], tl.int64)
        for bit in range(40, -1, -1):
            trial = least | (tl.full([], 1, tl.int64) << bit)
            if _mass(w, trial) >= target:
                least = trial
        larger = _mass(w, least + 1)
        total = larger + (target - larger + least - 1) // least * least
    if top_a > 0:
        edge = tl.minimum(tl.ceil(top_a / total.to(tl.float64)).to(tl.int64), ONE)
        if edge > least:
            least = edge - 1
            total = _mass(w, edge)
    if min_p > least:
        total = _mass(w, min_p)
    aim = tl.umulhi(point, total.to(tl.uint64)).to(tl.int64)
    weight = tl.zeros([], tl.int64)
    for bit in range(40, -1, -1):
        trial = weight | (tl.full([], 1, tl.int64) << bit)
        if _mass(w, trial) > aim:
            weight = trial
    nth = (aim - _mass(w, weight + 1)) // weight
    same = w == weight
    token = tl.zeros([], tl.int32)
    for bit in range(20, -1, -1):
        trial_id = token | (tl.full([], 1, tl.int32) << bit)
        if tl.sum((same & (ids >= trial_id)).to(tl.int64), 0) > nth:
            token = trial_id
    tl.store(drawn + row, token.to(tl.int64))


@triton.jit
def note(words, drawn, last_seen, counts, VOCAB: tl.constexpr):
    """Enter the drawn tokens into the tables of their rows."""
    row = tl.program_id(0)
    row_words = words + row * WORDS
    slot, token = tl.load(row_words + 1), tl.load(drawn + row)
    if (slot >= 0) & (tl.load(row_words) != 0) & (token >= 0):
        at = slot.to(tl.int64) * VOCAB + token
        tl.store(last_seen + at, tl.load(row_words + 2) + 1)
        tl.store(counts + at, tl.load(counts + at) + 1)


# Draws of rows that keep more candidates than ``kernels.gather`` collects: the same cuts over the whole vocabulary.
# typical_p is computed here only: it may leave out the likeliest tokens, and needs a mean over all.
#
# A row has one program of many threads. It looks for the weight at which a count or a sum passes a goal. For such rows
# ``gather`` has counted and summed the weights in bins, 128 for each power of 2, so that weight lies between two edges
# of bins. Each pass over the row then tries three weights: the next one above the lowest that is possible, and two
# between that and the highest. It also finds the smallest weight of the row above each of them, and goes on from
# there. So a bin with few different weights takes few passes.
#
# Weights are compared as float32 numbers, ``power * 2**40``, which are not rounded down: a threshold is a whole
# number.


# mypy: ignore-errors


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
