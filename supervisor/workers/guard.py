"""The guard: a small process that kills what workers have started when the supervisor has ended, for any reason.

PR_SET_PDEATHSIG already kills each worker, but the worker's children do not inherit that setting. A process that a
worker started (a compiler, a data loader) would live on and hold the GPU. The guard has the read end of a pipe, and
only the supervisor has the write end. The kernel closes the write end when the supervisor ends. Then the guard kills
the workers' process groups, and every process with the mark of one of the supervisor's workers in its environment.

This file is the guard's own program, run with ``python -I -S``. Its argument is the directory of setproctitle, the only
package that it imports. ``supervisor.workers.local.Guard`` is the guard as the supervisor sees it. The supervisor uses
the functions that kill, too.
"""

import os
import signal
import sys
import time
from collections.abc import Callable

SUPERVISOR_MARK = "MODELCTL_SUPERVISOR_MARK"
"""The environment variable that the workers and the helpers of a supervisor have."""
WORKER_MARK = "MODELCTL_WORKER_MARK"
"""The environment variable of a worker and of what it starts. Its value begins with the mark of the supervisor."""
LOOKS_S = 5.0
"""Seconds for which the guard looks for processes with a mark, as long as it finds some."""


def kill_group(group: int, signal_number: int) -> None:
    """Send a signal to a process group, or to its future leader if that has not called setsid yet.

    Do nothing if neither exists.
    """
    try:
        os.killpg(group, signal_number)
    except (ProcessLookupError, PermissionError):
        try:
            os.kill(group, signal_number)
        except (ProcessLookupError, PermissionError):
            pass


def value_of(pid: int, variable: str) -> str:
    """Return the value of an environment variable with which the program of a process was started.

    Return "" if it was not set, and if the process has ended or is another user's.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:
        return ""
    wanted = f"{variable}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(wanted):
            return entry[len(wanted) :].decode(errors="replace")
    return ""


def kill_if(pid: int, condition: Callable[[], bool]) -> bool:
    """Kill a process if the condition holds, and return whether it was killed.

    The process is taken hold of before the condition is asked. So a later process with the same pid is never hit.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False  # it has ended
    try:
        if condition():
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return True
    except OSError:
        pass  # it has ended meanwhile
    finally:
        os.close(handle)
    return False


def _kill_marked(prefix: str) -> None:
    """Kill every process with a mark that begins so, until there is none. Such a process may just start another."""
    deadline, found = time.monotonic() + LOOKS_S, True
    while found and time.monotonic() < deadline:
        found = False
        for name in os.listdir("/proc"):
            if name.isdecimal() and value_of(pid := int(name), WORKER_MARK).startswith(prefix):
                found = True
                kill_if(pid, lambda pid=pid: value_of(pid, WORKER_MARK).startswith(prefix))  # type: ignore[misc]
        if found:
            time.sleep(0.002)


def _main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    sys.path.append(sys.argv[1])
    os.environ["SPT_NOENV"] = "1"  # as ``birth.set_title`` in the workers
    from setproctitle import setproctitle

    setproctitle("modelctl: guard")
    groups: set[int] = set()
    rest = b""
    while chunk := os.read(0, 65536):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line == b".":
                return
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        kill_group(group, signal.SIGKILL)
    if mark := os.environ.get(SUPERVISOR_MARK):
        _kill_marked(f"{mark}-")


if __name__ == "__main__":
    _main()
