# mypy: ignore-errors
"""The rule of ``rule`` as Triton kernels, over all rows of a step at once.

``adjust`` reads the logits: penalties, bias, and the largest of each block. ``weigh`` computes the weights. It sums
those of each block, and counts and sums those above each of LEVELS thresholds. ``gather`` takes the highest threshold
above which all candidates of a row must be, and collects the tokens above it. ``choose`` draws from these, with one
program for each row. ``slow_kernels`` has the draws of rows that keep too many tokens, and those of typical_p.

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
