"""Run ``modelctl`` like ``python -m supervisor``. After SIGUSR2, write suspicious audit events to $WITNESS_TO.

A serving supervisor has no reason to cause these events: it reads only /proc, its own log and its sockets.
"""

import os
import runpy
import signal
import sys

WATCHED = (
    "pickle.", "marshal.", "exec", "compile", "import", "os.", "subprocess.", "socket.connect", "socket.bind",
    "ctypes.", "shutil.", "open", "mmap.", "urllib.", "pty.", "cpython.",
)  # fmt: skip
_armed = False


def arm(*_: object) -> None:
    global _armed
    _armed = True
    os.close(os.open(os.environ["WITNESS_TO"], os.O_WRONLY | os.O_CREAT))


def hook(event: str, arguments: tuple[object, ...]) -> None:
    if not _armed or not event.startswith(WATCHED):
        return
    looks = event in ("open", "os.listdir", "os.scandir")
    if looks and str(arguments[0]).startswith(("/proc/", "/sys/", os.environ["WITNESS_TO"])):
        return
    with open(os.environ["WITNESS_TO"], "a") as f:
        f.write(f"{event} {arguments!r}\n"[:500])


if __name__ == "__main__":  # workers import this file again as their __mp_main__
    sys.addaudithook(hook)
    signal.signal(signal.SIGUSR2, arm)
    runpy.run_module("supervisor", run_name="__main__", alter_sys=True)
