"""What tests and benchmarks have started ends with them, also when they are killed with SIGKILL.

PR_SET_PDEATHSIG would not do: it goes with the thread that started a process, and is not inherited. A process of its
own holds the read end of a pipe whose write end only we have, and kills everything with our mark when it closes.

``end_with_us`` runs in the process of the tests. The rest of the file is also that process's own program, run with
``python -I -S``: it imports the standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

OWNER = "MODELCTL_TEST_OWNER"
LOOKS, PAUSE_S = 3, 0.1
"""So many looks in a row have to find nothing: what is about to be killed may be about to start something."""
_keeper: "subprocess.Popen[bytes] | None" = None


def end_with_us() -> None:
    """Let everything that this process starts from now on, and the children of that, end with it. May be called
    again."""
    global _keeper
    if _keeper is not None:
        return
    owner = f"{os.getpid()}-{time.monotonic_ns()}"
    _keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__), owner],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env={},  # no mark of anybody's
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
