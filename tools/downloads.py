"""Print the size of a large download, and the time that it takes, before ``make`` begins it.

Nothing is printed if the packages are installed already.

    python tools/downloads.py run|test [TORCH_INDEX]

Run it with the Python of the environment that is installed into. The figures are those of torch 2.13 and transformers 5
for Linux on x86-64, measured in November 2026. Of them the packages of the gateway are 5 MB to download and 18 MB on
disk, and openai, with which the demo ends, 3 MB and 31 MB.
"""

import importlib.util
import sys

CPU = "https://download.pytorch.org/whl/cpu"
CUDA_BUILD = f"""\
PyTorch and transformers are installed into .venv. PyPI's PyTorch is a CUDA build: 2.8 GB to download, 5.7 GB on disk.
That takes about 5 minutes at 20 MB/s, or 10 on a busy machine. Without a GPU the CPU build is enough: 0.3 GB to
download, 1 GB on disk, 1 minute. For that, stop this (Ctrl-C) and add TORCH_INDEX={CPU}"""
CPU_BUILD = """\
PyTorch for the CPU and transformers are installed into .venv: 0.3 GB to download and 1 GB on disk. That takes about
1 minute at 20 MB/s, or 3 on a busy machine."""
OTHER_BUILD = """\
PyTorch from {index} and transformers are installed into .venv. A CUDA build is about 3 GB to download and
6 GB on disk. That takes about 5 minutes at 20 MB/s, or 10 on a busy machine."""
TEST_TOOLS = """\
The tools of the tests are installed into .venv: 0.3 GB to download and 0.9 GB on disk, most of it triton, which a CUDA
build of PyTorch has brought already. That takes about 1 minute at 20 MB/s, or 3 on a busy machine."""


def announcement(step: str, torch_index: str) -> str | None:
    """Return the text to print before a step of the Makefile. None if nothing large is missing.

    step         "run" for the packages of the demo, "test" for the further packages of the tests
    torch_index  the package index that PyTorch comes from; empty for pip's own
    """
    if importlib.util.find_spec("torch" if step == "run" else "pytest") is not None:
        return None
    if step == "test":
        return TEST_TOOLS
    if not torch_index:
        return CUDA_BUILD
    return CPU_BUILD if torch_index.rstrip("/").endswith("/cpu") else OTHER_BUILD.format(index=torch_index)


if __name__ == "__main__":
    if (message := announcement(*sys.argv[1:], *[""] * (3 - len(sys.argv)))) is not None:
        print(message, flush=True)
