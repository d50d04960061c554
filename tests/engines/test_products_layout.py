"""The layout of quantised matrices, as the kernels of products are told it."""

import random
from itertools import pairwise

import pytest

from model_worker.engines.exllamav2.products import layout
from model_worker.engines.exllamav2.products.layout import Run, UnsuitedError, count_of_parts, exl2_runs, gptq_runs


def groups_of(plan: list[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Return q_groups and the rows of words of a matrix. ``plan``: (bits, inputs, inputs of a group)."""
    groups, word = [], 0
    for bits, inputs, size in plan:
        while inputs:
            own = min(size, inputs)
            groups += [bits, word]
            word += own * bits // 32
            inputs -= own
    return groups, word


def test_a_matrix_of_one_width_is_one_run() -> None:
    assert exl2_runs(*groups_of([(4, 4096, 128)])) == [Run(4, 0, 32, 0, 0, 128, 0, 2)]


def test_each_width_is_a_run_and_begins_a_tile() -> None:
    """The second matrix of SmolLM2's MLP: an 8-bit segment of one block, and short tiles at two ends."""
    runs = exl2_runs(*groups_of([(8, 32, 32), (4, 128, 128), (3, 416, 128)]))
    assert runs == [Run(8, 0, 1, 0, 0, 1, 0, 0), Run(4, 1, 1, 8, 1, 4, 1, 2), Run(3, 2, 4, 24, 5, 13, 2, 2)]


def test_groups_of_odd_sizes_are_runs_of_their_own() -> None:
    runs = exl2_runs([4, 0, 4, 12, 4, 28], 36)  # groups of 3, 4 and 2 blocks
    assert [(run.blocks, run.group, run.tiles) for run in runs] == [(3, 0, 1), (6, 1, 2)]


@pytest.mark.parametrize("seed", range(20))
def test_every_block_is_in_one_tile_and_finds_its_group(seed: int) -> None:
    draw = random.Random(seed)
    widths = sorted(draw.sample(layout.WIDTHS, draw.randint(1, 4)), reverse=True)
    plan = [(bits, 32 * draw.randint(1, 40), draw.choice((32, 64, 128))) for bits in widths]
    groups, words = groups_of(plan)
    wanted = []  # for each block: bits, first row of words, group
    for number in range(len(groups) // 2):
        bits, word = groups[2 * number : 2 * number + 2]
        end = groups[2 * number + 3] if 2 * number + 2 < len(groups) else words
        wanted += [(bits, at, number) for at in range(word, end, bits)]
    found, tile = [], 0
    for run in exl2_runs(groups, words):
        assert run.tile == tile
        assert run.block == len(found)
        assert 0 <= run.tiles * layout.TILE_BLOCKS - run.blocks < layout.TILE_BLOCKS
        found += [(run.bits, run.word + b * run.bits, run.group + (b >> run.shift)) for b in range(run.blocks)]
        tile += run.tiles
    assert found == wanted, f"seed {seed}"


def test_groups_of_gptq() -> None:
    assert gptq_runs(4096, 32) == [Run(4, 0, 32, 0, 0, 128, 0, 2)]
    assert gptq_runs(576, 5) == [Run(4, 0, 5, 0, 0, 18, 0, 2)]
    assert gptq_runs(512, 1) == [Run(4, 0, 4, 0, 0, 16, 0, 4)]
    with pytest.raises(UnsuitedError, match="in groups of 16"):
        gptq_runs(512, 32)


@pytest.mark.parametrize(
    ("groups", "words", "why"),
    [
        ([7, 0], 28, "weights of 7 bits"),
        ([4, 0], 14, "not one of blocks"),
        ([bits for word in range(0, 120, 12) for bits in (4, word)], 120, "make 10 runs"),
    ],
)
def test_what_the_kernels_cannot_read_is_named(groups: list[int], words: int, why: str) -> None:
    with pytest.raises(UnsuitedError, match=why):
        exl2_runs(groups, words)


def test_parts_take_equally_long_to_read() -> None:
    runs = exl2_runs(*groups_of([(8, 512, 128), (4, 3072, 128)]))
    borders = layout.parts_of(runs, 4)
    assert borders[0] == 0
    assert borders[-1] == 28
    costs = [8] * 4 + [4] * 24
    assert [sum(costs[a:b]) for a, b in pairwise(borders)] == [32, 32, 32, 32]


@pytest.mark.parametrize(
    ("strips", "tiles", "parts"), [(48, 32, 8), (32, 112, 8), (224, 32, 2), (1002, 32, 1), (1, 4, 4)]
)
def test_parts_are_as_many_as_keep_a_gpu_busy(strips: int, tiles: int, parts: int) -> None:
    assert count_of_parts(strips, tiles, 132) == parts
