"""Import exllamav2, and choose the attention that it uses.

Whether the package can batch depends on the module flash_attn that it finds when it is imported. So this module puts
the right flash_attn in place and then imports the package. No other module imports the package before.
"""

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch

from model_worker.engine import LoadError, ProgressCallback
from model_worker.engines import check_installed, one_line
from model_worker.engines.exllamav2 import extension
from model_worker.engines.exllamav2.meaning import layer_kinds
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.model_shape import read_shape
from model_worker.engines.paged import attention as paged_attention
from protocol.process.engine_packages import install_command


@dataclass(frozen=True)
class Package:
    """The imported package, and the name of the attention that it uses (for people)."""

    core: Any
    generator: Any
    attention: str


def import_package(progress: ProgressCallback = lambda *_: None) -> Package:
    """Import exllamav2, with flash-attn where that works, and with PyTorch's attention in its place elsewhere.

    Compile the package's extension first if that has not been done. Raises LoadError in one line for whatever is
    missing.
    """
    if not __debug__:
        raise LoadError("ExLlamaV2 checks its input with assertions: do not run Python with -O or PYTHONOPTIMIZE")
    check_installed("exllamav2")
    if not torch.cuda.is_available():
        raise LoadError(
            "no CUDA device is visible to this process: ExLlamaV2 needs one; see whether nvidia-smi finds it, and "
            f"whether torch {torch.__version__} is a CUDA build"
        )
    os.environ.setdefault("EXLLAMA_NO_XFORMERS", "1")  # unused, and a build for another torch would break the import
    if "exllamav2" not in sys.modules:
        _load_extension(progress)
    attention = _choose_attention()
    try:
        core = importlib.import_module("exllamav2")
        generator = importlib.import_module("exllamav2.generator")
    except ModuleNotFoundError as e:  # exllamav2 is there (check_installed), but a package that it needs is not
        message = f"engine exllamav2 needs the package {e.name}: run {install_command('exllamav2')}"
        raise LoadError(message) from e
    except Exception as e:
        raise LoadError(f"exllamav2 cannot be imported: {type(e).__name__}: {one_line(e)}") from e
    return Package(core, generator, attention)


def _load_extension(progress: ProgressCallback) -> None:
    """Import the compiled extension under the name where the package looks first, so that the package never
    compiles."""
    phases = {"waiting": "waiting for a compiler", "build": "compiling ExLlamaV2"}
    try:
        extension.ensure(lambda phase, done, total: progress(phases[phase], done, total, "steps"))
        if importlib.util.find_spec("exllamav2"):
            extension.import_built()
    except extension.ExtensionError as e:
        raise LoadError(str(e)) from None


def _choose_attention() -> str:
    """Leave ``flash_attn`` unchanged if it works here, else replace it. Return a name of the attention for people."""
    # With this variable the package uses no paged attention at all. Here the variable only chooses between two kinds.
    switched_off = os.environ.pop("EXLLAMA_NO_FLASH_ATTN", None) is not None
    old = [i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(i) < (8, 0)]
    if paged_attention.is_installed():
        return paged_attention.NAME
    if switched_off:
        why = "flash-attn is switched off"
    elif importlib.util.find_spec("flash_attn") is None:
        why = "flash-attn is not installed"
    elif old:
        why = "flash-attn needs an Ampere GPU or later"
    else:
        try:
            version = str(importlib.import_module("flash_attn").__version__)
            importlib.import_module("flash_attn_2_cuda")
            if [int(part) for part in version.split(".")[:3] if part.isdigit()] >= [2, 5, 7]:
                return f"flash-attn {version}, paged"
            why = f"flash-attn {version} is older than 2.5.7"
        except Exception as e:  # a build for another torch: importing the package with it would fail
            why = f"flash-attn does not load: {one_line(e)}"
    paged_attention.install()
    return f"{paged_attention.NAME}; {why}"


def check_attention(package: Package, directory: ModelDir, gpus: int, progress: ProgressCallback) -> str:
    """Try the attention of this model on each GPU. Return, for people, its name, and why it is not flash-attn."""
    if not paged_attention.is_installed():
        return package.attention
    shape, config = read_shape(directory), directory.text_config
    # the package's window does not count the token itself (``package_model``)
    window = config["sliding_window"] - 1 if any(layer_kinds(directory)) else None
    softcap = config.get("attn_logit_softcapping")
    found = ""
    for index in range(gpus):
        progress("compiling attention", index, gpus)
        for size in [window, -1] if isinstance(window, int) else [-1]:  # some models have layers of both kinds
            found = paged_attention.check(
                torch.device("cuda", index),
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                window=size,
                softcap=float(softcap or 0.0),
            )
    progress("compiling attention", gpus, gpus)
    return found + package.attention.removeprefix(paged_attention.NAME)
