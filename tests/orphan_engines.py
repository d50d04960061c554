"""Engines that make a clean end difficult: families of processes, and a hang that no Python code can end."""

import ctypes
import signal
import subprocess
import sys

from model_worker.engine import Job, ProgressCallback
from tests.deterministic_engine import DeterministicEngine

CHILD = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(3600)
"""


class ForksFamily(DeterministicEngine):
    """Starts a child that starts a child. Both ignore SIGTERM, and would live for an hour."""

    def load(self, progress: ProgressCallback) -> None:
        subprocess.Popen([sys.executable, "-c", CHILD, CHILD])
        super().load(progress)


class HangsWithTheLock(DeterministicEngine):
    """Never returns from step(), at token 5 of any prompt that begins with ``bad``, and holds the interpreter's lock
    meanwhile: no other thread of it ever runs. Deaf to SIGTERM."""

    def load(self, progress: ProgressCallback) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().load(progress)

    def before_token(self, job: Job, k: int) -> None:
        while k == 5 and bytes(job.prompt_ids).startswith(b"bad"):
            ctypes.PyDLL(None).sleep(3600)
