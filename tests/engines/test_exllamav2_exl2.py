"""ExLlamaV2's own kernels, compiled for the CPU, read the EXL2 weights that benchmarks.exl2 makes."""

import ctypes
import sys

import pytest
import torch

from benchmarks import exl2
from tests.engines.exllamav2_cpu.matrix_kernels import compile_kernels, pointer
from tests.engines.exllamav2_cpu.package import import_package


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("size", [(96, 128), (256, 320)])
def test_the_kernels_read_what_was_written(size: tuple[int, int], library: ctypes.CDLL) -> None:
    """Unpacking, used for many rows, gives equal bits. Products of a few rows with packed weights are as close as fp16
    sums."""
    import_package()
    seed = 5
    print(f"seed {seed}")
    random = torch.Generator().manual_seed(seed)
    outputs, inputs = size
    rounded = exl2.round_to_nearest(torch.randn(size, generator=random) / 10)
    weight, stored = rounded.weight(), rounded.packed()
    groups = inputs // exl2.GROUP
    # as module.py, ext.py and QMatrix::QMatrix do: input order, smaller scales, a map of groups, shuffled bits
    perm, scale_max = stored["q_invperm"].argsort().short(), stored["q_scale_max"] / 256
    group_map = sys.modules["exllamav2.ext"].make_group_map_py(stored["q_groups"], len(stored["q_weight"]))
    assert tuple(group_map.shape) == (2 * inputs,)
    library.prepare(pointer(stored["q_weight"]), pointer(None), inputs, outputs)
    matrix = [pointer(t) for t in (stored["q_weight"], perm, stored["q_scale"], scale_max, group_map)]
    out = torch.empty((inputs, outputs), dtype=torch.half)
    library.reconstruct_exl2(*matrix, inputs, outputs, groups, pointer(out))
    assert torch.equal(out, weight.T)
    a = torch.randn((5, inputs), generator=random).half()
    exact = a.double() @ weight.T.double()
    for multiply in (library.multiply_exl2_32, library.multiply_exl2_64):
        product = torch.empty((5, outputs), dtype=torch.half)
        multiply(pointer(a), *matrix, 5, inputs, outputs, groups, pointer(product))
        assert (product - exact).abs().max() < 0.01 * exact.abs().max()
