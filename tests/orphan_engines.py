"""Engines that are hard to end: one starts child processes, one hangs so that no Python code of its process runs."""

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
    """An engine that starts a child that starts another child. Both ignore SIGTERM, and would live for an hour."""

    def load(self, progress: ProgressCallback) -> None:
        subprocess.Popen([sys.executable, "-c", CHILD, CHILD])
        super().load(progress)


class HangsWithTheLock(DeterministicEngine):
    """An engine that hangs in step() at token 5 of a prompt that begins with ``bad``. It ignores SIGTERM.

    It holds the interpreter's lock while it hangs, so no other thread of the worker runs.
    """

    def load(self, progress: ProgressCallback) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        super().load(progress)

    def before_token(self, job: Job, k: int) -> None:
        while k == 5 and bytes(job.prompt_ids).startswith(b"bad"):
            ctypes.PyDLL(None).sleep(3600)
