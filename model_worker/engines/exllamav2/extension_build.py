"""The process that compiles exllamav2's extension. ``extension`` starts it with its own pid as argument.

It imports the package's module exllamav2.ext, which calls PyTorch's builder with the right sources and flags. Only the
builder is changed to print what it does.
"""

import functools
import importlib
import os
import signal
import subprocess
import sys
from typing import Any

from model_worker.engines.exllamav2.extension import end_session
from protocol.process.birth import die_with, set_title


def _die_with(parent: int) -> None:
    """End this process's session when the parent ends, because the compilers would not notice."""
    signal.signal(signal.SIGTERM, _end)
    if not die_with(parent, signal.SIGTERM):
        sys.exit(1)


def _end(*_: object) -> None:
    end_session(os.getsid(0))
    os._exit(1)


def main() -> int:
    _die_with(int(sys.argv[1]))
    set_title("builder")
    # ninja and its compilers inherit the lock, so it is held until they are gone, even if this process dies earlier.
    subprocess.run = functools.partial(subprocess.run, close_fds=False)  # type: ignore[assignment]
    import torch
    from torch.utils import cpp_extension

    if torch.version.cuda and not os.environ.get("TORCH_CUDA_ARCH_LIST") and not torch.cuda.device_count():
        print("RuntimeError: no GPU is visible to compile for: set TORCH_CUDA_ARCH_LIST, such as 8.6 or 9.0")
        return 1

    load, built = cpp_extension.load, []

    def load_aloud(*args: Any, **kwargs: Any) -> Any:
        kwargs["verbose"] = True  # ninja counts its steps on our stdout
        module = load(*args, **kwargs)
        built.append(module)
        return module

    cpp_extension.load = load_aloud
    try:
        importlib.import_module("exllamav2.ext")
    except Exception:
        if not built:  # an error after the build is not this program's concern
            raise
    if not built:
        print("RuntimeError: exllamav2.ext did not ask for a build")
        return 1
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except Exception as e:
        print(f"{type(e).__name__}: {e}", flush=True)
        code = 1
    sys.stdout.flush()
    os._exit(code)  # the package leaves threads of its own behind
