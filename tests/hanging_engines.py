"""Engines that hang or are slow in the ways of real ones. models.yaml names them by import string.

Each hang happens once: a file in the model's directory tells the worker's successor to skip it.
"""

import ctypes
import os
import signal
import time
from pathlib import Path

from model_worker.engine import Job, ProgressCallback
from protocol.process.worker_spec import EngineSpec
from tests.deterministic_engine import DeterministicEngine


def hang(how: str) -> None:
    """Hang: "gil" deadlocks in C and holds the GIL, "loop" loops in Python, "sleep" sleeps, "stop" sends SIGSTOP."""
    if how == "gil":
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
        libc.pthread_mutex_lock(mutex)  # unlike sleep(3), no signal ends this
        libc.pthread_mutex_lock(mutex)
    elif how == "loop":
        spin = True
        while spin:
            pass
    elif how == "sleep":
        time.sleep(3600)
    else:
        os.kill(os.getpid(), signal.SIGSTOP)


def once(spec: EngineSpec, what: str) -> bool:
    """Return whether this is the model's first call with ``what``."""
    try:
        Path(spec.model_dir, f"hung-{spec.model}-{what}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class HangsOnce(DeterministicEngine):
    """An engine that hangs at token 5 of a prompt ``hang HOW ...``, once for each prompt."""

    def before_token(self, job: Job, k: int) -> None:
        prompt = bytes(job.prompt_ids).decode()
        if k == 5 and prompt.startswith("hang ") and once(self.spec, prompt):
            hang(prompt.split()[1])


class HangsInLoad(DeterministicEngine):
    """An engine that hangs once after half of its load."""

    def load(self, progress: ProgressCallback) -> None:
        progress("loading", 0, 2)
        progress("loading", 1, 2)
        if once(self.spec, "load"):
            hang("loop")
        progress("loading", 2, 2)


class LoadsInParts(DeterministicEngine):
    """An engine that loads in ``parts`` parts. Each part takes ``part_s`` seconds without a report of progress."""

    KNOWN_OPTIONS = DeterministicEngine.KNOWN_OPTIONS | {"parts", "part_s"}

    def load(self, progress: ProgressCallback) -> None:
        parts = int(self.spec.options["parts"])
        for part in range(parts):
            progress("loading", part, parts)
            time.sleep(float(self.spec.options["part_s"]))
