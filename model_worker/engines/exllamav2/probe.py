"""Say whether PyTorch and ExLlamaV2 can be used on this machine: one JSON object on stdout.

    python -m model_worker.engines.exllamav2.probe

The program imports torch, which takes seconds, and opens the driver, which may hang. So ``modelctl doctor`` runs it as
a process of its own, and waits for a limited time. Nothing is compiled. Keys:

    torch          its version; null if it is not installed
    cuda           the CUDA version that it was built for; null for a build for the CPU
    why_no_gpu     why torch can use no GPU; null if it can
    capabilities   [major, minor] of each GPU
    architectures  what its own kernels were built for, such as sm_90
    exllamav2      its version; null if it is not installed
    compiled       whether its CUDA code need not be compiled any more
    sources        files that would be compiled
    nvcc           path of the compiler, or null
    flash_attn     version, or null
    triton         version, or null
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

from model_worker.engines.exllamav2 import extension


def main() -> None:
    """Print what is known."""
    print(json.dumps({**_torch(), **_package()}))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch": _version("torch"), "cuda": None, "why_no_gpu": None, "capabilities": [], "architectures": [],
    }  # fmt: skip
    if found["torch"] is None:
        return found
    try:
        import torch

        found["cuda"] = torch.version.cuda
        if torch.cuda.is_available():
            found["capabilities"] = [
                list(torch.cuda.get_device_capability(index)) for index in range(torch.cuda.device_count())
            ]
            found["architectures"] = torch.cuda.get_arch_list()
        else:
            found["why_no_gpu"] = "torch was built for the CPU" if torch.version.cuda is None else _why_no_gpu(torch)
    except Exception as e:
        found["why_no_gpu"] = f"torch cannot be used: {type(e).__name__}: {e}"
    return found


def _why_no_gpu(torch: Any) -> str:
    try:
        torch.cuda.init()
    except Exception as e:
        return str(e).partition("\n")[0]
    return "torch sees no GPU"


def _package() -> dict[str, Any]:
    installed = _version("exllamav2")
    sources = 0
    if installed is not None and (spec := importlib.util.find_spec("exllamav2")) is not None and spec.origin:
        package = Path(spec.origin).parent / "exllamav2_ext"
        sources = sum(path.suffix in (".cpp", ".cu") for path in package.rglob("*"))
    home = os.environ.get("CUDA_HOME")
    return {
        "exllamav2": installed,
        "compiled": installed is not None and not extension.needed(),
        "sources": sources,
        "nvcc": shutil.which("nvcc") or (shutil.which("nvcc", path=f"{home}/bin") if home else None)
        or shutil.which("nvcc", path="/usr/local/cuda/bin"),
        "flash_attn": _version("flash-attn"),
        "triton": _version("triton"),
    }  # fmt: skip


if __name__ == "__main__":
    main()
