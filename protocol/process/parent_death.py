"""End a process when its parent ends, however the parent ends."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Have the kernel send this signal when the parent's thread that started this process ends (prctl(2)).

    Returns whether the parent still lives. The parent may have died before this call, and the kernel does not tell
    that. Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent
