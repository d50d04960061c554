"""The layout of quantised matrices, as ``products.cu`` wants it described. Pure.

A matrix has blocks of 32 inputs. Blocks with one width that follow one another, and whose groups have one size, are a
run. A run has tiles of 4 blocks; the last tile may have fewer. Tiles are numbered through all runs.
"""

import ctypes
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

WIDTHS = 8, 6, 5, 4, 3, 2
BLOCK = 32
TILE_BLOCKS = 4
MOST_RUNS = 8
MOST_PARTS = 32
STRIP = 128
"""Outputs of a block of threads."""
MOST_ROWS = 64
"""Rows of x that a product takes at once."""
THREADS = 128
STAGES = 3


class UnsuitedError(Exception):
    """A matrix whose layout the kernels cannot read. The text says what it is."""


class Run(NamedTuple):
    """Blocks of one width. Group of block b of the run: ``group + (b >> shift)``.

    bits    bits per weight
    tile    the number of the run's first tile
    tiles   the number of tiles
    word    the first row of words
    block   the number of the run's first block
    blocks  the number of blocks
    """

    bits: int
    tile: int
    tiles: int
    word: int
    block: int
    blocks: int
    group: int
    shift: int


def exl2_runs(groups: Sequence[int], words: int) -> list[Run]:
    """Return the runs of an EXL2 matrix. Raises UnsuitedError.

    groups  q_groups: for each group its bits and its first row of words
    words   rows of q_weight
    """
    sizes: list[tuple[int, int, int]] = []
    for number in range(len(groups) // 2):
        bits, word = groups[2 * number : 2 * number + 2]
        end = groups[2 * number + 3] if 2 * number + 2 < len(groups) else words
        if bits not in WIDTHS:
            raise UnsuitedError(f"a group has weights of {bits} bits")
        if (end - word) % bits or end <= word:
            raise UnsuitedError(f"a group of {(end - word) * 32 / bits:g} inputs is not one of blocks of {BLOCK}")
        sizes.append((bits, word, (end - word) // bits))
    return _runs(sizes)


def gptq_runs(inputs: int, groups: int) -> list[Run]:
    """Return the runs of a GPTQ matrix of 4 bits. The package takes the least power of two for the size of its groups
    that covers all inputs. Raises UnsuitedError."""
    size = 1
    while size * groups < inputs:
        size *= 2
    if size % BLOCK or inputs % BLOCK:
        raise UnsuitedError(f"{inputs} inputs in groups of {size} are not blocks of {BLOCK}")
    each = size // BLOCK
    return _runs([(4, first * 4, min(each, inputs // BLOCK - first)) for first in range(0, inputs // BLOCK, each)])


def _runs(groups: Sequence[tuple[int, int, int]]) -> list[Run]:
    """Join groups, (bits, first row of words, blocks), to runs."""
    runs: list[Run] = []
    block = tile = size = newest = 0
    for number, (bits, word, blocks) in enumerate(groups):
        last = runs[-1] if runs else None
        follows = last is not None and last.bits == bits and word == last.word + last.blocks * bits
        # The groups of a run have one size, a power of two. Only the last may be smaller.
        if last is not None and follows and newest == size >= blocks:
            tile -= last.tiles
            joined = last.blocks + blocks
            runs[-1] = last._replace(blocks=joined, tiles=-(-joined // TILE_BLOCKS))
        else:
            size = blocks if blocks & (blocks - 1) == 0 else 0
            tiles = -(-blocks // TILE_BLOCKS)
            runs.append(Run(bits, tile, tiles, word, block, blocks, number, (blocks - 1).bit_length()))
        newest = blocks
        block += blocks
        tile += runs[-1].tiles
    if len(runs) > MOST_RUNS:
        raise UnsuitedError(f"its groups make {len(runs)} runs of one width and size")
    return runs


def parts_of(runs: Sequence[Run], count: int) -> list[int]:
    """Return the first tile of each of ``count`` parts that take equally long to read, and the number of tiles."""
    costs = [0, *accumulate(run.bits for run in runs for _ in range(run.tiles))]
    borders = [bisect_left(costs, costs[-1] * part / count) for part in range(count)]
    return [*borders, len(costs) - 1]


def count_of_parts(strips: int, tiles: int, processors: int) -> int:
    """Return the number of parts with which a product's blocks keep a GPU busy: a power of two, so that as many tiles
    go to each, with at least two blocks for each processor if there are enough tiles."""
    parts = 1
    while parts * 2 <= min(tiles, MOST_PARTS) and strips * parts < 1.9 * processors:
        parts *= 2
    return parts


# The structures of products.cu


class _Run(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in Run._fields]


class Matrix(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "steps", "scale", "bias", "out")),
        *((name, ctypes.c_int) for name in ("n", "strips", "runs", "pitch")),
        ("run", _Run * MOST_RUNS),
        ("part", ctypes.c_int * (MOST_PARTS + 1)),
        ("pad", ctypes.c_int),
    ]


class Launch(ctypes.Structure):
    _fields_ = [
        ("matrix", Matrix * 3),
        *((name, ctypes.c_void_p) for name in ("x", "sums", "counters", "placed")),
        *((name, ctypes.c_int) for name in ("matrices", "rows", "parts", "width", "kind", "bits")),
    ]


def fill(matrix: Matrix, runs: Sequence[Run], outputs: int, parts: int) -> None:
    """Describe a matrix but for its addresses."""
    matrix.n, matrix.strips, matrix.runs = outputs, -(-outputs // STRIP), len(runs)
    for number, run in enumerate(runs):
        matrix.run[number] = _Run(*run)
    for number, tile in enumerate(parts_of(runs, parts)):
        matrix.part[number] = tile
