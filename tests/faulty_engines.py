"""Engines that fail in load or in a step as torch and CUDA do, without torch. models.yaml has their import strings."""

import errno
import logging
import os
import threading
from pathlib import Path

from model_worker.engine import EngineEvent, Finished, Job, LoadError, NewTokens, ProgressCallback
from model_worker.engines.constraint_compiler import TurnsThread
from tests.deterministic_engine import DeterministicEngine

CLIPBOARD = "\x1b]52;c;aGVsbG8=\x07"
"""The sequence that writes "hello" into the clipboard."""


class OutOfMemoryError(RuntimeError):
    """An exception with the same name in a traceback as torch.OutOfMemoryError."""


class AcceleratorError(RuntimeError):
    """An exception with the same name in a traceback as torch.AcceleratorError."""


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
    """An engine that raises an exception at token 5 of a prompt ``bad FAULT``. FAULT is a key of FAULTS."""

    def before_token(self, job: Job, k: int) -> None:
        prompt = bytes(job.prompt_ids).decode()
        if k == 5 and prompt.startswith("bad "):
            raise FAULTS[prompt[4:]]


class FailsInThread(DeterministicEngine):
    """An engine with two threads that fail at token 5: one of a package for a prompt ``package``, which is its own
    matter, and one of ours, which others wait for, for a prompt ``ours``."""

    def before_token(self, job: Job, k: int) -> None:
        if k != 5:
            return
        fault = FAULTS["other"]

        def fails(*_: object) -> None:
            raise fault

        if bytes(job.prompt_ids) == b"package":
            failing = threading.Thread(target=fails)
            failing.start()
            failing.join()
        elif bytes(job.prompt_ids) == b"ours":
            turns: TurnsThread[None] = TurnsThread("fails", fails)
            turns.start()
            turns.put(0, None)


class RunsOutInLoad(DeterministicEngine):
    """An engine that runs out of GPU memory in load."""

    def load(self, progress: ProgressCallback) -> None:
        raise FAULTS["vram"]


class ReadsItsDirectory(DeterministicEngine):
    """An engine that reads ``state`` in its model's directory: "fine", or the name of an error that reading gives."""

    def load(self, progress: ProgressCallback) -> None:
        file = Path(self.spec.model_dir) / "state"
        if not file.exists():
            raise LoadError(f"{file.parent} has no file state")
        if (state := file.read_text()) != "fine":
            raise OSError(getattr(errno, state), os.strerror(getattr(errno, state)), str(file))
        super().load(progress)


class LeavesInLoad(DeterministicEngine):
    """An engine that ends its process in load, without a message."""

    def load(self, progress: ProgressCallback) -> None:
        os._exit(7)


class SaysSequences(DeterministicEngine):
    """An engine whose answers and log write the clipboard of the user's terminal."""

    def step(self) -> list[EngineEvent]:
        events = super().step()
        for event in events:
            assert isinstance(event, NewTokens | Finished)
            event.text = CLIPBOARD
            print(f"said {CLIPBOARD}", flush=True)
        return events


class Talkative(DeterministicEngine):
    """An engine that tells everybody its token, and cannot be loaded."""

    def load(self, progress: ProgressCallback) -> None:
        token, path = str(self.spec.options["template"]), self.spec.model_dir
        logging.getLogger("model_worker").warning("the token is %s, the directory %s", token, path)
        print(f"the token is {token}")
        raise RuntimeError(f"the server of {path}/weights refuses the token {token}")
