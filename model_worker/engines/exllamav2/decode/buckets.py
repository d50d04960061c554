"""The sizes of step for which graphs are captured. Pure."""

from bisect import bisect_left
from collections.abc import Sequence

KERNEL_ROWS = 32
"""The most rows that the package's kernels for quantised matrices compute. For more it first makes fp16 matrices of
them (config.h, MAX_Q_GEMM_ROWS)."""


FEWEST_KERNEL_ROWS = 16
"""Steps of as many rows are always computed by these kernels."""


WIDE = 40
"""The fewest rows above KERNEL_ROWS for which a graph is captured."""


PASSES = 64, 256
"""Tokens of the passes over prompts that are captured, ascending. The pace counts prompts in pages of 256 tokens."""


FEWEST_PAGES = 4
"""Pages of the narrowest block table. Kernels for quantised caches cost little for a kilobyte of tokens."""


def row_sizes(most: int, kernel_rows: int = KERNEL_ROWS) -> list[int]:
    """Return the numbers of rows to capture, ascending, the last of them at least ``most``.

    kernel_rows  the most rows that quantised matrices multiply quicker as they are than by way of fp16. More rows, up
                 to KERNEL_ROWS, are captured as WIDE, so that the package makes fp16 matrices

    Up to 4 rows EXL2 has one kernel per number of rows, and beyond that it computes tiles of 4 rows. So every number up
    to 4 is captured, and multiples of 4 beyond: rows that fill up a tile cost nothing. The distance grows with the
    size.
    """
    sizes, size = [], 1
    last = WIDE if kernel_rows < most <= KERNEL_ROWS else most
    while size < last:
        if size <= kernel_rows or size > KERNEL_ROWS:
            sizes.append(size)
        size += 1 if size < 4 else 4 if size < KERNEL_ROWS else 8 if size < 64 else 16
    return [*sizes, last]


def most_captured(most: int, quantised: bool) -> int:
    """Return the most rows that a captured step of ``most`` rows may have, padding included."""
    return WIDE if quantised and FEWEST_KERNEL_ROWS < most <= KERNEL_ROWS else most


def reads_in_place(head_dim: int) -> bool:
    """Return whether steps read quantised pages of such heads where they lie (``paged.launch.reads_quantised``)."""
    return head_dim in (64, 128, 256)


def page_sizes(most: int, depends_on_width: bool) -> list[int]:
    """Return the widths of block tables to capture, in pages, ascending, the last of them ``most``.

    depends_on_width  whether the cost depends on the table's width (the package copies a quantised cache), and not only
                      on the lengths
    """
    if not depends_on_width:
        return [most]
    sizes, size = [], FEWEST_PAGES
    while size < most:
        sizes.append(size)
        size *= 2
    return [*sizes, most]


def fitting(sizes: Sequence[int], needed: int) -> int | None:
    """Return the smallest of ascending ``sizes`` that is at least ``needed``; None if all are smaller."""
    index = bisect_left(sizes, needed)
    return sizes[index] if index < len(sizes) else None
