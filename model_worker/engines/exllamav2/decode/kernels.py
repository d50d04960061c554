# mypy: ignore-errors
"""The Triton kernel with which a captured step begins: it finds each row's token, and fetches its embedding."""

import triton
import triton.language as tl


@triton.jit
def embed(table, given, sources, drawn, out, QUERIES: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Write the embedding of each row's token.

    table    fp16 [vocabulary, HIDDEN], in host memory that the GPU can read
    given    int32 [rows, QUERIES]: the tokens, if the host knows them
    sources  int32 [rows]: the row of the step before that drew the row's only token, or -1 for ``given``
    drawn    int64 [rows]: tokens that the step before has drawn
    out      fp16 [rows, QUERIES, HIDDEN]
    """
    row = tl.program_id(0)
    source = tl.load(sources + row // QUERIES)
    token = tl.load(given + row).to(tl.int64)
    if source >= 0:
        token = tl.maximum(tl.load(drawn + source), 0)  # below 0 where logits were not numbers; the host raises then
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < HIDDEN
    tl.store(out + row * HIDDEN + at, tl.load(table + token * HIDDEN + at, mask=mask), mask=mask)
