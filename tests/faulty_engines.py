"""Engines that fail as torch and CUDA do, without torch: in load, or in a step. Named by import string."""

import os

from model_worker.engine import Job, ProgressCallback
from tests.deterministic_engine import DeterministicEngine


class OutOfMemoryError(RuntimeError):
    """Has the name that a traceback shows for torch's own exception."""


class AcceleratorError(RuntimeError):
    """Has the name that a traceback shows for torch's own exception."""


OutOfMemoryError.__module__ = AcceleratorError.__module__ = "torch"
ADVICE = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
FAULTS: dict[str, BaseException] = {
    "vram": OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 512.06 MiB "
        "is free. Including non-PyTorch memory, this process has 23.17 GiB memory in use."
    ),
    "ram": MemoryError(),
    "access": RuntimeError(f"CUDA error: an illegal memory access was encountered\n{ADVICE}"),
    "assert": AcceleratorError(f"CUDA error: device-side assert triggered\n{ADVICE}"),
    "other": ValueError("the cache is inconsistent\nsee above"),
}


class RaisesInStep(DeterministicEngine):
    """Raises an exception at token 5 of a prompt ``bad FAULT``; FAULT is a key of FAULTS."""

    def before_token(self, job: Job, k: int) -> None:
        prompt = bytes(job.prompt_ids).decode()
        if k == 5 and prompt.startswith("bad "):
            raise FAULTS[prompt[4:]]


class RunsOutInLoad(DeterministicEngine):
    """The weights do not fit."""

    def load(self, progress: ProgressCallback) -> None:
        raise FAULTS["vram"]


class LeavesInLoad(DeterministicEngine):
    """Ends its process silently."""

    def load(self, progress: ProgressCallback) -> None:
        os._exit(7)
