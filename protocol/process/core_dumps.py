"""Keep prompts out of core dumps."""

import resource
from contextlib import suppress


def forbid_core_dumps() -> None:
    """Prevent core dumps of this process and of all processes that it starts.

    The kernel ignores the limit if it pipes cores into a program (systemd-coredump, apport). The filter (core(5))
    leaves such a core without any memory. With both, unlike with PR_SET_DUMPABLE, the user can use /proc and debuggers.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/coredump_filter", "w") as f:  # some kernels have no filter
        f.write("0")
