"""Compile CUDA source with NVRTC, which comes with PyTorch, and launch its kernels. This needs no CUDA toolkit."""

import contextlib
import ctypes
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class NoKernelsError(Exception):
    """The kernels cannot be compiled or loaded here. The text says why, for people."""


_HEADER = Path(__file__).with_name("tensor_cores.cuh")


class Module:
    """The kernels of one source, on one GPU.

    source   CUDA C++ without includes, behind ``tensor_cores.cuh``
    defines  macros, such as "A=1"
    device   the GPU's index

    Raises NoKernelsError.
    """

    def __init__(self, source: str, defines: Sequence[str], device: int) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise NoKernelsError(f"a GPU of compute capability {major}.{minor} is older than Ampere")
        options = [
            f"--gpu-architecture=sm_{major}{minor}",
            "--std=c++17",
            "-default-device",  # for lambdas
            *(f"-D{define}" for define in defines),
        ]
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._module = ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        cubin = _compiled(_HEADER.read_text() + source, options)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the GPU's context, and makes it the current one
            self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), cubin))

    def _check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise NoKernelsError(f"CUDA: {(text.value or b'unknown error').decode()}")

    def function(self, name: str, shared: int = 0) -> ctypes.c_void_p:
        """Return a kernel that may use up to ``shared`` bytes of dynamic shared memory. Raises NoKernelsError."""
        found = self._functions.get(name)
        if found is None:
            found = self._functions[name] = ctypes.c_void_p()
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(found), self._module, name.encode()))
            if shared > 48 << 10:
                self._check(self._driver.cuFuncSetAttribute(found, _MAX_DYNAMIC_SHARED, shared))
        return found

    def launch(
        self, function: ctypes.c_void_p, grid: tuple[int, int, int], threads: int, shared: int, *arguments: Any
    ) -> None:
        """Queue a kernel on the current stream of the current GPU. ``arguments`` are objects of ctypes."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._check(self._driver.cuLaunchKernel(function, *grid, threads, 1, 1, shared, stream, pointers, None))


def _compiled(source: str, options: Sequence[str]) -> bytes:
    """Return the cubin of a source, from the user's cache if it is there. Raises NoKernelsError."""
    library = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = "\0".join((source, *options, f"{major.value}.{minor.value}"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelctl" / "kernels"
    path = cache / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    cubin = _compile(library, source, options)
    # A cache that cannot be written costs some seconds at the next start.
    with contextlib.suppress(OSError):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
            file.write(cubin)
        os.replace(file.name, path)
    return cubin


def _nvrtc() -> ctypes.CDLL:
    version = str(torch.version.cuda).partition(".")[0]
    for name in (f"libnvrtc.so.{version}", "libnvrtc.so"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise NoKernelsError(f"libnvrtc.so.{version}, a part of CUDA that comes with PyTorch, cannot be loaded")


def _compile(library: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            why = log.value.decode(errors="replace").strip()
            raise NoKernelsError(f"NVRTC cannot compile the kernels ({options[0]}): {why}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
