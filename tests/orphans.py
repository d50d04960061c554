"""End all processes that tests and benchmarks have started, even if the tests are killed with SIGKILL.

PR_SET_PDEATHSIG is not enough: it depends on the thread that started a process, and children do not inherit it. So a
keeper process holds the read end of a pipe. Only the tests hold the write end. When the pipe closes, the keeper kills
every process with the mark of these tests.

``end_with_us`` runs in the process of the tests. This file is also the program of the keeper, run with
``python -I -S``, so it imports the standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

OWNER = "MODELCTL_TEST_OWNER"
LOOKS, PAUSE_S = 3, 0.1
"""The keeper ends when LOOKS looks in a row find no process, PAUSE_S seconds apart. A process that is about to be
killed may just be starting another one."""
_keeper: "subprocess.Popen[bytes] | None" = None


def end_with_us() -> None:
    """Make all processes that this process starts from now on, and their children, end with it.

    Further calls do nothing.
    """
    global _keeper
    if _keeper is not None:
        return
    owner = f"{os.getpid()}-{time.monotonic_ns()}"
    _keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), owner],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env={},  # the keeper must not carry a mark itself
        cwd="/",
    )
    os.environ[OWNER] = owner


def marked(owner: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/environ", "rb") as f:
                    if f"{OWNER}={owner}\0".encode() in f.read():
                        found.append(int(name))
            except OSError:  # gone, or another user's
                continue
    return found


def _keep(owner: str) -> None:
    while os.read(0, 1):
        pass
    empty = 0
    while empty < LOOKS:
        left = marked(owner)
        empty = 0 if left else empty + 1
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    _keep(sys.argv[1])
