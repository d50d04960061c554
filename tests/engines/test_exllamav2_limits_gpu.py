"""ExLlamaV2's kernels compute refused shapes wrongly, and some suspicious shapes correctly. Needs a CUDA device.

A test with "do not" in its name fails when the package has been corrected. Then a refusal can be removed.
"""

import importlib
import itertools
from typing import Any

import pytest
import torch

from benchmarks import exl2, gptq
from tests.engines.conftest import need_gpu

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu() -> None:
    need_gpu("exllamav2")


@pytest.fixture
def package() -> Any:
    """Return the package's module ``ext`` with the compiled extension."""
    importlib.import_module("model_worker.engines.exllamav2.load").import_package()
    return importlib.import_module("exllamav2.ext")


_seeds = itertools.count()


def random(*size: int, scale: float = 1.0) -> torch.Tensor:
    return (
        torch.randn(size, generator=torch.Generator("cuda").manual_seed(next(_seeds)), device="cuda").mul(scale).half()
    )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


class Matrix:
    """A quantized matrix of the package, and its values in fp32 [in, out]. This object keeps the tensors alive."""

    def __init__(self, package: Any, outputs: int, inputs: int, form: str) -> None:
        weight = random(outputs, inputs, scale=0.1)
        rounded: Any = (
            exl2.round_to_nearest(weight) if form == "exl2" else gptq.round_to_nearest(weight, gptq.SCHEMES["gptq"])
        )
        self.weight = rounded.weight().float().T
        self.stored = {name: tensor.cuda() for name, tensor in rounded.packed().items()}
        if form == "exl2":
            self.stored["q_perm"] = self.stored["q_invperm"].argsort().int()
        self.scratch = torch.empty(outputs * inputs, dtype=torch.half, device="cuda")
        self.handle = package.make_q_matrix(self.stored, self.scratch, max_dq_rows=inputs)


@pytest.mark.parametrize("vocabulary", [1024, 128256, 151936])
def test_products_are_right_before_and_while_and_after_block_sizes_are_tuned(vocabulary: int, package: Any) -> None:
    """1 to 4 rows use a block size that the package measures over 200 calls, 5 to 32 rows borrow one, more rows unpack.

    With vocabularies of 65,536 and more, the key of a measurement mixes in the number of rows (q_gemm_autotune.cuh).
    """
    matrix = Matrix(package, vocabulary, 256, "exl2")
    worst = 0.0
    for call in range(230):
        for rows in (1, 2, 3, 4, 5, 31, 32, 33) if call % 20 == 0 else (1, 2, 3, 4):
            a = random(rows, 256)
            out = torch.empty((rows, vocabulary), dtype=torch.half, device="cuda")
            package.ext_c.gemm_half_q_half(a, matrix.handle, out, False)
            if call % 20 == 0:
                worst = max(worst, relative(out, a.float() @ matrix.weight))
    assert worst < 0.02


def mlp(package: Any, inner: int, rows: int, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum that the package's quantized MLP adds to its input, and the right one."""
    hidden = 256
    gate, up = (Matrix(package, inner, hidden, form) for _ in range(2))
    down = Matrix(package, hidden, inner, form)
    norm, temp = torch.ones(hidden, dtype=torch.half, device="cuda"), [random(rows * 2 * hidden) for _ in range(3)]
    scratch = torch.empty(hidden * inner, dtype=torch.half, device="cuda")
    none = package.none_tensor
    handle = package.ext_c.make_q_mlp(
        norm, none, True, 1e-6, gate.handle, up.handle, down.handle, *temp, scratch, rows, False, True, none, none,
        False, False,
    )  # fmt: skip
    x = random(rows, hidden)
    normal = torch.nn.functional.rms_norm(x.float(), (hidden,), eps=1e-6)
    inside = torch.nn.functional.silu(normal @ gate.weight) * (normal @ up.weight)
    found = x.clone()
    package.ext_c.q_mlp_forward_(handle, found, [], none)
    torch.cuda.synchronize()
    package.ext_c.free_q_mlp(handle)
    return found.float() - x.float(), inside @ down.weight


@pytest.mark.parametrize("rows", [1, 4, 5, 40])
def test_quantized_mlps_do_not_activate_the_last_columns_of_odd_multiples_of_32(rows: int, package: Any) -> None:
    for inner, form in ((128, "exl2"), (128, "gptq"), (192, "exl2")):
        found, expected = mlp(package, inner, rows, form)
        assert relative(found, expected) < 0.05
    for inner in (96, 160):
        found, expected = mlp(package, inner, rows, "gptq")
        assert relative(found, expected) > 0.2


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("rms", [True, False])
def test_norms_of_heads_of_whole_warps_are_right(head_dim: int, rms: bool, package: Any) -> None:
    """With 32 and 96 elements a warp exchanges values with threads that do not exist. Those errors are only printed."""
    for size in (head_dim, 32, 96):
        x, weight = random(300, 5, size), random(5, size)
        y = torch.empty_like(x)
        package.ext_c.head_norm(x, weight, package.none_tensor, y, 1e-6, rms)
        full = x.float() if rms else x.float() - x.float().mean(-1, keepdim=True)
        expected = full * (full.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.float()
        print(f"rms {rms}, heads of {size}: {relative(y, expected)}")
        if size == head_dim:
            assert relative(y, expected) < 0.01


@pytest.mark.parametrize("width", [1024, 8192])
def test_layer_norms_of_many_rows_are_right(width: int, package: Any) -> None:
    """layer_norm.cu lacks a barrier between reading the first sums and writing the second ones."""
    x, weight = random(4096, width), random(width)
    expected = torch.nn.functional.layer_norm(x.float(), (width,), weight.float(), eps=1e-5)
    for _ in range(200):
        y = torch.empty_like(x)
        package.ext_c.layer_norm(x, weight, package.none_tensor, y, 1e-5)
        assert (y.float() - expected).abs().max() < 0.02


def test_norms_make_numbers_of_what_is_none(package: Any) -> None:
    """rms_norm.cu turns a row with a NaN into numbers, so the routing of later layers gets numbers, too."""
    x, weight = random(3, 256), random(256)
    x[1, 7] = float("nan")
    y = torch.empty_like(x)
    package.ext_c.rms_norm(x, weight, y, 1e-6)
    assert y.isfinite().all()
