"""The package reads GPTQ weights correctly, with its own loader and its CUDA kernels compiled for the CPU."""

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import gptq, models
from tests.engines.exllamav2_cpu.matrix_kernels import compile_kernels, pointer
from tests.engines.exllamav2_cpu.package import import_package
from tests.engines.random_model import edit_json


class Matrix:
    """A matrix as ext_qmatrix.cpp and QMatrix make it from the arguments of ext.make_q_matrix."""

    def __init__(self, library: ctypes.CDLL, given: tuple[torch.Tensor | int, ...]) -> None:
        weight, perm, invperm, *exl2, zeros, scales, index, bias, _, _ = given
        assert all(isinstance(t, torch.Tensor) and t.is_meta for t in (*exl2, bias))
        assert isinstance(weight, torch.Tensor)
        assert isinstance(perm, torch.Tensor)
        assert isinstance(invperm, torch.Tensor)
        assert isinstance(zeros, torch.Tensor)
        assert isinstance(scales, torch.Tensor)
        assert isinstance(index, torch.Tensor)
        self._library, self._weight, self._zeros, self._scales = library, weight, zeros, scales
        self.height, self.width, self.groups = 8 * weight.shape[0], weight.shape[1], zeros.shape[0]
        assert (weight.dtype, zeros.dtype, scales.dtype) == (torch.int32, torch.int32, torch.half)
        assert zeros.shape == (self.groups, self.width // 8)
        assert scales.shape == (self.groups, self.width)
        self.group_size = 1
        while self.group_size * self.groups < self.height:
            self.group_size *= 2
        self._perm = None
        if not index.is_meta:  # QMatrix::make_sequential
            assert index.dtype == torch.int32
            assert perm.shape == invperm.shape == (self.height,)
            perm.copy_(index.argsort(stable=True).short())
            self._perm = perm
        library.prepare(pointer(weight), pointer(self._perm), self.height, self.width)

    def weight(self) -> torch.Tensor:
        """Return the unpacked weight, fp16 [in, out]."""
        out = torch.empty((self.height, self.width), dtype=torch.half)
        self._library.reconstruct(
            pointer(self._weight), pointer(self._perm), pointer(self._zeros), pointer(self._scales), self.height,
            self.width, self.group_size, self.groups, pointer(out),
        )  # fmt: skip
        return out

    def multiply(self, a: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(a), self.width), dtype=torch.half)
        self._library.multiply(
            pointer(a), pointer(self._weight), pointer(self._perm), pointer(self._zeros), pointer(self._scales),
            len(a), self.height, self.width, self.group_size, self.groups, pointer(out),
        )  # fmt: skip
        return out


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_kernels(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def matrices(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Matrix]]:
    """Return the list of matrices that the package makes, newest last."""
    import_package()
    extension, made = sys.modules["exllamav2_ext"], list[Matrix]()

    def make_q_matrix(*given: torch.Tensor | int) -> int:
        made.append(Matrix(library, given))
        return len(made)

    def stloader_read(file: str, offset: int, size: int, target: torch.Tensor) -> None:
        data = np.fromfile(file, np.uint8, size, offset=offset)
        target.view(-1).view(torch.uint8).copy_(torch.from_numpy(data))

    monkeypatch.setattr(extension, "make_q_matrix", make_q_matrix, raising=False)
    monkeypatch.setattr(extension, "stloader_read", stloader_read, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    yield made
    sys.modules["exllamav2.stloader"].global_stfiles.clear()


@pytest.fixture(params=["gptq", "gptq-act-order", "gptq_v2", "without g_idx"])
def directories(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """Return a GPTQ model of ``letters`` and the fp16 model with the same weights. Old files have no g_idx. Newer files
    store zero points as they are."""
    kind = request.param
    made = models.path_of(f"letters-{kind if kind in gptq.SCHEMES else 'gptq'}", tmp_path)
    tensors, file = load_file(made / "model.safetensors"), made / "model.safetensors"
    if kind == "without g_idx":
        save_file({name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")}, file)
    if kind == "gptq_v2":
        raised = {name: tensor + 0x11111111 for name, tensor in tensors.items() if name.endswith("qzeros")}
        save_file(tensors | raised, file)
        config: dict[str, Any] = json.loads((made / "config.json").read_text())["quantization_config"]
        edit_json(made / "config.json", quantization_config=config | {"checkpoint_format": "gptq_v2"})
    return made, made.with_name(f"{made.name}-dequantised")


@pytest.mark.long
def test_the_package_reads_gptq_weights_as_the_twin_has_them(
    directories: tuple[Path, Path], matrices: list[Matrix]
) -> None:
    """Unpacking, used for long prompts, gives equal bits. Products with packed weights are as close as fp16 sums."""
    made, twin = directories
    config = import_package().ExLlamaV2Config()
    config.model_dir = str(made)
    config.prepare()
    model = import_package().ExLlamaV2(config)
    weights = load_file(twin / "model.safetensors")
    seed = 3
    print(f"seed {seed}")
    random = torch.Generator().manual_seed(seed)
    read = 0
    for name, weight in weights.items():
        stem = name.removesuffix(".weight")
        if not stem.endswith(gptq.MATRICES):
            continue
        linear = model.modules_dict[stem]
        linear.set_device_idx(-1)
        linear.load(device_context=False)
        matrix = matrices[-1]
        assert (matrix.group_size, matrix.height, matrix.width) == (128, *linear.matrix_shape())
        assert torch.equal(matrix.weight(), weight.T), name
        a = torch.randn((5, matrix.height), generator=random).half()
        exact = a.double() @ weight.T.double()
        assert (matrix.multiply(a) - exact).abs().max() < 0.01 * exact.abs().max(), name
        read += 1
    assert read == len(matrices) == 28
