# mypy: ignore-errors
# ruff: noqa: SIM102
# (Triton's language is not Python: it has other types, and separates choices at compile time from those at run time)
"""Attention over pages as Triton kernels, which read the pages in place.

``split`` is for few queries per sequence (decoding, speculation). The keys of a sequence are divided into parts, which
``schedule`` lists for the whole step. The program that finishes a sequence's last part merges them, in their order. The
parts depend on the sequence's own length alone, so its result has the same bits whatever sequences are beside it.
``split`` also writes the step's new keys and values into the pages. ``prompt`` is for many queries: one program per
tile of queries. All query heads that share a key head are rows of one tile: row r is query r // GROUP of head
r % GROUP.

The softmax is online and in base 2 (Milakov and Gimelshein 2018; Dao 2023). The split over keys is that of
flash-decoding (2023). Shapes are those of ``launch``. In every kernel ``scale`` multiplies q @ k, ``window`` is the
number of keys before its own that a query sees, and ``softcap`` limits scores to softcap * tanh(score / softcap).
"""

import triton
import triton.language as tl

# int32 numbers per work item: sequence, first key, end of its keys, the sequence's items, the first of them, and the
# number of all items
FIELDS = tl.constexpr(8)
LEAST_KEYS = tl.constexpr(512)


@triton.jit
def _fold(q, k, v, visible, acc, top, total, scale, softcap, CAPPED: tl.constexpr, MASKED: tl.constexpr):
    """Add one block of keys [D, N] and values [N, D] to the running softmax of the rows q [M, D]."""
    LOG2E: tl.constexpr = 1.4426950408889634
    scores = tl.dot(q, k, input_precision="ieee")
    if CAPPED:
        e = tl.exp2(scores * (scale * 2 * LOG2E / softcap))
        scores = (softcap * LOG2E) * (1 - 2 / (e + 1))  # tanh, also where e is infinite
    else:
        scores *= scale * LOG2E
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    shift = new
    if MASKED:
        shift = tl.where(new == float("-inf"), 0.0, new)  # rows that have seen no key yet
    p = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(p, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new, total


@triton.jit(do_not_specialize=["batch", "q_len", "window", "parts", "room"])
def schedule(
    lengths, work, batch, q_len, window, parts, room,
    APPENDS: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """List the parts of all sequences as items: of LEAST_KEYS keys, twice that from 8 parts on, or as many times that
    as make at most ``parts``. Short parts keep a GPU busy with one sequence; each costs some microseconds.

    The host does not read the lengths for this. ``work`` has room for ``room`` items.
    """
    row = tl.arange(0, BLOCK_B)
    inside = row < batch
    past = tl.load(lengths + row, mask=inside, other=0)
    if APPENDS:
        stop = past  # the new keys are not read from the pages
    else:
        stop = past
        past -= q_len
    first = tl.zeros_like(past)
    if WINDOWED:
        first = tl.maximum(past - window, 0) // BLOCK_N * BLOCK_N
    keys = tl.where(inside, tl.maximum(stop - first, 0), 0)
    size = tl.maximum(tl.cdiv(keys, parts * LEAST_KEYS), tl.where(keys > 8 * LEAST_KEYS, 2, 1)) * LEAST_KEYS
    splits = tl.where(inside, tl.maximum(tl.cdiv(keys, size), 1), 0)
    behind = tl.cumsum(splits)
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    sequence = tl.sum((behind[None, :] <= item[:, None]).to(tl.int32), 1)  # number of sequences before the item
    mine = row[None, :] == sequence[:, None]
    its_keys = tl.sum(tl.where(mine, keys[None, :], 0), 1)
    its_size = tl.sum(tl.where(mine, size[None, :], 0), 1)
    its_first_key = tl.sum(tl.where(mine, first[None, :], 0), 1)
    its_first_item = tl.sum(tl.where(mine, (behind - splits)[None, :], 0), 1)
    begin = its_first_key + (item - its_first_item) * its_size
    entry = work + item * FIELDS
    there = item < room
    tl.store(entry, sequence, mask=there)
    tl.store(entry + 1, begin, mask=there)
    tl.store(entry + 2, tl.minimum(begin + its_size, its_first_key + its_keys), mask=there)
    tl.store(entry + 3, tl.sum(tl.where(mine, splits[None, :], 0), 1), mask=there)
    tl.store(entry + 4, its_first_item, mask=there)
    tl.store(entry + 5, tl.max(behind) + tl.zeros_like(item), mask=there)


@triton.jit
def _merge(
    out, part_acc, part_top, part_total, sequence, first_item, splits, q_len, kv, tile,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr,
):  # fmt: skip
    """Write one tile's result from the parts of all its items. Only the first MERGE_ROWS rows are in use."""
    r = tl.arange(0, MERGE_ROWS)
    row = tile * BLOCK_M + r
    query = row // GROUP
    there = query < q_len
    merged = tl.zeros([MERGE_ROWS, BLOCK_D], dtype=tl.float32)
    top_r = tl.full([MERGE_ROWS], float("-inf"), dtype=tl.float32)
    total_r = tl.zeros([MERGE_ROWS], dtype=tl.float32)
    s = tl.arange(0, MERGE_PARTS)
    d = tl.arange(0, BLOCK_D)
    whole = d < DIM
    tiles = tl.num_programs(2)
    for part_0 in range(0, splits, MERGE_PARTS):
        exists = (part_0 + s < splits)[:, None] & there[None, :]
        parts = ((first_item + part_0 + s) * KV_HEADS + kv) * tiles + tile
        cell = parts[:, None] * MERGE_ROWS + r[None, :]
        # Bypass the first-level cache, which the writes of other programs do not reach.
        tops = tl.load(part_top + cell, mask=exists, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(part_total + cell, mask=exists, other=0.0, cache_modifier=".cg")
        accs = tl.load(
            part_acc + cell[:, :, None] * BLOCK_D + d[None, None, :],
            mask=exists[:, :, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top_r, tl.max(tops, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(tops - shift[None, :])
        fade = tl.exp2(top_r - shift)
        total_r = total_r * fade + tl.sum(totals * weight, 0)
        merged = merged * fade[:, None] + tl.sum(accs * weight[:, :, None], 0)
        top_r = new_top
    q_row = ((sequence * q_len + query) * KV_HEADS + kv) * GROUP + row % GROUP
    result = merged / total_r[:, None]
    tl.store(
        out + q_row[:, None] * DIM + d[None, :],
        result.to(out.dtype.element_ty), mask=there[:, None] & whole[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=["q_len", "table_stride", "window"])
def split(
    q, k_pages, v_pages, k_new, v_new, out, table, lengths, work, part_acc, part_top, part_total, done,
    q_len, table_stride, window, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    APPENDS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_NEW: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr,
):  # fmt: skip
    """Compute attention of few queries. Grid: programs that share the items, key heads, tiles of BLOCK_M rows."""
    kv = tl.program_id(1)
    tile = tl.program_id(2)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    whole = d < DIM
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUP
    there = query < q_len
    for item in range(tl.program_id(0), tl.load(work + 5), tl.num_programs(0)):
        entry = work + item * FIELDS
        sequence = tl.load(entry)
        first = tl.load(entry + 1)
        last = tl.load(entry + 2)
        splits = tl.load(entry + 3)
        first_item = tl.load(entry + 4)
        past = tl.load(lengths + sequence)
        if not APPENDS:
            past -= q_len
        q_row = ((sequence * q_len + query) * KV_HEADS + kv) * GROUP + row % GROUP
        rows = tl.load(q + q_row[:, None] * DIM + d[None, :], mask=there[:, None] & whole[None, :], other=0.0)
        position = past + query
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        sequence_table = table + sequence * table_stride
        for start in range(first, last, BLOCK_N):
            page = tl.load(sequence_table + start // PAGE).to(tl.int64)
            base = ((page * PAGE + start % PAGE) * KV_HEADS + kv) * DIM
            key = start + n
            known = key < last
            k = tl.load(
                k_pages + base + n[None, :] * (KV_HEADS * DIM) + d[:, None],
                mask=known[None, :] & whole[:, None], other=0.0,
            )  # fmt: skip
            v = tl.load(
                v_pages + base + n[:, None] * (KV_HEADS * DIM) + d[None, :],
                mask=known[:, None] & whole[None, :], other=0.0,
            )  # fmt: skip
            visible = known[None, :] & (key[None, :] <= position[:, None])
            if WINDOWED:
                visible &= key[None, :] >= position[:, None] - window
            acc, top, total = _fold(rows, k, v, visible, acc, top, total, scale, softcap, CAPPED, True)
        if APPENDS:
            if item == first_item + splits - 1:
                j = tl.arange(0, BLOCK_NEW)
                new = j < q_len
                base = (sequence * q_len + j) * (KV_HEADS * DIM) + kv * DIM
                k = tl.load(k_new + base[None, :] + d[:, None], mask=new[None, :] & whole[:, None], other=0.0)
                v = tl.load(v_new + base[:, None] + d[None, :], mask=new[:, None] & whole[None, :], other=0.0)
                visible = new[None, :] & (j[None, :] <= query[:, None])
                if WINDOWED:
                    visible &= j[None, :] >= query[:, None] - window
                acc, top, total = _fold(rows, k, v, visible, acc, top, total, scale, softcap, CAPPED, True)
                if tile == 0:
                    at = past + j
                    page = tl.load(sequence_table + at // PAGE, mask=new, other=0).to(tl.int64)
                    slot = ((page * PAGE + at % PAGE) * KV_HEADS + kv) * DIM
                    tl.store(k_pages + slot[None, :] + d[:, None], k, mask=new[None, :] & whole[:, None])
                    tl.store(v_pages + slot[:, None] + d[None, :], v, mask=new[:, None] & whole[None, :])
        if splits == 1:
            result = acc / total[:, None]
            tl.store(
                out + q_row[:, None] * DIM + d[None, :],
                result.to(out.dtype.element_ty), mask=there[:, None] & whole[None, :],
            )  # fmt: skip
        else:
            tiles = tl.num_programs(2)
            cell = ((item * KV_HEADS + kv) * tiles + tile) * MERGE_ROWS + tl.arange(0, BLOCK_M)
            tl.store(part_acc + cell[:, None] * BLOCK_D + d[None, :], acc, mask=there[:, None])
            tl.store(part_top + cell, top, mask=there)
            tl.store(part_total + cell, total, mask=there)
            tl.debug_barrier()  # all threads must have stored before the count
            count = done + (sequence * KV_HEADS + kv) * tiles + tile
            if tl.atomic_add(count, 1, sem="acq_rel") == splits - 1:
                tl.store(count, 0)  # the next layer expects zero
                _merge(
                    out, part_acc, part_top, part_total, sequence, first_item, splits, q_len, kv, tile,
                    KV_HEADS, GROUP, DIM, BLOCK_M, BLOCK_D, MERGE_ROWS, MERGE_PARTS,
                )  # fmt: skip


@triton.jit(do_not_specialize=["q_len", "table_stride"])
def append(
    k_pages, v_pages, k_new, v_new, table, lengths, q_len, table_stride,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write new keys and values, WIDTH numbers per token, behind the first lengths[b] tokens of each sequence.

    Grid: q_len, sequences.
    """
    token = tl.program_id(0)
    sequence = tl.program_id(1)
    at = tl.load(lengths + sequence) + token
    page = tl.load(table + sequence * table_stride + at // PAGE).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    inside = w < WIDTH
    source = (sequence * q_len + token) * WIDTH + w
    target = (page * PAGE + at % PAGE) * WIDTH + w
    tl.store(k_pages + target, tl.load(k_new + source, mask=inside), mask=inside)
    tl.store(v_pages + target, tl.load(v_new + source, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["q_len", "table_stride", "window"])
def prompt(
    q, k_pages, v_pages, out, table, lengths, q_len, table_stride, window, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    APPENDS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute attention of many queries. The pages already hold the new keys and values.

    Grid: key heads times sequences, tiles of BLOCK_M rows.
    """
    pair = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the tiles with most keys first
    sequence = pair // KV_HEADS
    kv = pair % KV_HEADS
    past = tl.load(lengths + sequence)
    if not APPENDS:
        past -= q_len
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUP
    there = query < q_len
    q_row = ((sequence * q_len + query) * KV_HEADS + kv) * GROUP + row % GROUP
    rows = tl.load(q + q_row[:, None] * DIM + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    position = past + query
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    sequence_table = table + sequence * table_stride
    first_query = tile * BLOCK_M // GROUP
    last_query = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    stop = past + last_query + 1
    begin = 0
    free = (past + first_query + 1) // BLOCK_N * BLOCK_N  # every row sees all keys before this one
    if WINDOWED:
        begin = tl.maximum(past + first_query - window, 0) // BLOCK_N * BLOCK_N
        free = begin
    for start in range(begin, free, BLOCK_N):
        page = tl.load(sequence_table + start // PAGE).to(tl.int64)
        base = ((page * PAGE + start % PAGE) * KV_HEADS + kv) * DIM
        k_at = k_pages + base + n[None, :] * (KV_HEADS * DIM) + d[:, None]
        v_at = v_pages + base + n[:, None] * (KV_HEADS * DIM) + d[None, :]
        if DIM == BLOCK_D:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=(d < DIM)[:, None], other=0.0)
            v = tl.load(v_at, mask=(d < DIM)[None, :], other=0.0)
        acc, top, total = _fold(rows, k, v, 0, acc, top, total, scale, softcap, CAPPED, False)
    for start in range(free, stop, BLOCK_N):
        page = tl.load(sequence_table + start // PAGE).to(tl.int64)
        base = ((page * PAGE + start % PAGE) * KV_HEADS + kv) * DIM
        key = start + n
        known = key < stop
        k = tl.load(
            k_pages + base + n[None, :] * (KV_HEADS * DIM) + d[:, None],
            mask=known[None, :] & (d < DIM)[:, None], other=0.0,
        )  # fmt: skip
        v = tl.load(
            v_pages + base + n[:, None] * (KV_HEADS * DIM) + d[None, :],
            mask=known[:, None] & (d < DIM)[None, :], other=0.0,
        )  # fmt: skip
        visible = key[None, :] <= position[:, None]
        if WINDOWED:
            visible &= key[None, :] >= position[:, None] - window
        acc, top, total = _fold(rows, k, v, visible, acc, top, total, scale, softcap, CAPPED, True)
    tl.store(
        out + q_row[:, None] * DIM + d[None, :],
        (acc / total[:, None]).to(out.dtype.element_ty), mask=there[:, None] & (d < DIM)[None, :],
    )  # fmt: skip
