"""The guard: a small process that kills what workers have started when the supervisor has ended, for any reason.

PR_SET_PDEATHSIG already kills each worker, but the worker's children do not inherit that setting. A process that a
worker started (a compiler, a data loader) would live on and hold the GPU. The guard has the read end of a pipe, and
only the supervisor has the write end. The kernel closes the write end when the supervisor ends. Then the guard kills
the workers' process groups, and every process with the mark of one of the supervisor's workers in its environment.

The guard is no ``supervisor.helper.Helper``, because it may not miss a group. A pipe takes the groups before the
process exists, a guard that ended is started again without a pause, and the guard imports nothing that could fail.

``Guard`` runs in the supervisor. The rest of the file is also the guard's own program, run with ``python -I -S``. Its
argument is the directory of setproctitle, the only package that it imports.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

SUPERVISOR_MARK = "MODELCTL_SUPERVISOR_MARK"
"""The environment variable that the workers and the helpers of a supervisor have."""
WORKER_MARK = "MODELCTL_WORKER_MARK"
"""The environment variable of a worker and of what it starts. Its value begins with the mark of the supervisor."""
LOOKS_S = 5.0
"""Seconds for which the guard looks for processes with a mark, as long as it finds some."""


class Guard:
    """The guard's process, as the supervisor sees it. ``pidfd`` lets the loop notice if somebody kills the guard.

    environment  the environment variables of the guard's process
    titles       directory in which the guard's process finds setproctitle
    """

    def __init__(self, environment: dict[str, str], titles: str) -> None:
        self._environment = environment
        self._titles = titles
        self._groups: set[int] = set()
        self.pidfd = self._pipe = -1
        self._start()

    def _start(self) -> None:
        """Start a guard process that knows the groups watched so far. Raises OSError."""
        guards_end, self._pipe = os.pipe()
        try:
            # The groups are in the pipe before the process exists. If the supervisor is killed at the next instruction,
            # the new guard still reads them. There is one group for each worker, so the pipe never fills up here.
            for group in self._groups:
                self._tell(f"+{group}\n")
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(__file__), self._titles],
                stdin=guards_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a reader that has stopped must not stop the guard
                start_new_session=True,  # a Ctrl-C, or a kill of the supervisor's group, must not take the guard along
                cwd="/",
                env=self._environment,
            )
            self.pid = self._process.pid
            try:
                self.pidfd = os.pidfd_open(self.pid)
            except OSError:  # no descriptor left. At its pipe's end this guard would kill the workers: end it first
                self._process.kill()
                self._process.wait()
                raise
        except BaseException:
            self._close_pipe()
            raise
        finally:
            os.close(guards_end)

    def watch(self, group: int) -> None:
        """Kill this process group when the supervisor dies."""
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Forget a process group that has ended. Its number may belong to another group soon."""
        self._groups.discard(group)
        self._tell(f"-{group}\n")

    def restart(self) -> None:
        """Start another guard, and give it the groups of the former one. Raises OSError; then call this again later."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
            self._process.wait()
            self._close_pipe()
        self._start()

    def kill(self) -> None:
        """Kill a guard that was stopped. The loop calls ``restart`` when its pidfd is readable."""
        self._process.kill()

    def close(self) -> None:
        """End the guard, once no worker is left, and reap it."""
        self._tell(".\n")  # so it looks for nothing
        self._close_pipe()
        try:
            self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def _tell(self, line: str) -> None:
        if self._pipe < 0:
            return  # no guard could be started yet: ``restart`` gives it all groups
        try:
            os.write(self._pipe, line.encode())
        except BrokenPipeError:
            pass  # the guard has ended: its pidfd is readable, and the loop calls ``restart``


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
