"""ExLlamaV2's CUDA kernels for quantized matrices, compiled for the CPU."""

import ctypes
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.engines.exllamav2_cpu.package import import_package

_CUT_OUT = ("shuffle_kernel", "make_sequential_kernel", "reconstruct_gptq_kernel", "reconstruct_kernel")
"""The kernels that are taken from cuda/q_matrix.cu. The whole file does not compile for the CPU."""


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def compile_kernels(made: Path) -> ctypes.CDLL:
    """Compile matrix_kernels.cpp into the directory ``made`` and load it. Skip the test if that is not possible."""
    sources = Path(import_package().__file__).parent / "exllamav2_ext"
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        pytest.skip("needs g++ on x86-64, to compile the package's kernels")
    text = (sources / "cuda" / "q_matrix.cu").read_text()
    found = [re.search(rf"__global__ void {name}\n.*?^}}", text, re.DOTALL | re.MULTILINE) for name in _CUT_OUT]
    (made / "kernels_of_q_matrix.inc").write_text("\n".join(match[0] for match in found if match))
    for name in ("cuda_runtime.h", "cuda_fp16.h"):
        (made / name).write_text("")
    flags = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", f"-I{made}", f"-I{sources}"]
    file = Path(__file__).with_name("matrix_kernels.cpp")
    subprocess.run(["g++", *flags, file, "-o", made / "matrix_kernels.so"], check=True)
    return ctypes.CDLL(str(made / "matrix_kernels.so"))
