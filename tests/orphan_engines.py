"""Engines that are hard to end: one starts child processes, one hangs so that no Python code of its process runs."""

import ctypes
import os
import signal
import subprocess
import sys
import time

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


DAEMON = """
import os, signal, sys, time
if sys.argv[2:] == ["twice"]:
    if os.fork():
        os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(f"{sys.argv[1]} pid {os.getpid()}.", flush=True)
time.sleep(3600)
"""


class _Escapes(DeterministicEngine):
    """An engine that starts processes that leave its group and its session. They ignore SIGTERM, and would live for an
    hour. The model's log shows the pid of each."""

    def load(self, progress: ProgressCallback) -> None:
        self.start_them()
        super().load(progress)

    def start_them(self) -> None:
        raise NotImplementedError


class EscapesBySession(_Escapes):
    """Two children: one whose parent has ended at once, and one whose parent has a session of its own and stays."""

    def start_them(self) -> None:
        subprocess.run([sys.executable, "-c", DAEMON, "daemon", "twice"], check=True)
        stays = f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {DAEMON!r}, 'inner'])\n"
        named = "import os; print(f'outer pid {os.getpid()}.', flush=True)\n"
        program = [sys.executable, "-c", named + stays + "time.sleep(3600)"]
        subprocess.Popen(program, start_new_session=True)


class EscapesByFork(_Escapes):
    """One child that goes on in the worker's own program, without an exec."""

    def start_them(self) -> None:
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print(f"daemon pid {os.getpid()}.", flush=True)
            time.sleep(3600)
            os._exit(0)
        os.wait()


class EscapesUnmarked(_Escapes):
    """One child with an empty environment, whose parent has ended at once."""

    def start_them(self) -> None:
        subprocess.run([sys.executable, "-I", "-S", "-c", DAEMON, "daemon", "twice"], env={}, check=True)
