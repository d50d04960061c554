"""Keep prompts out of core dumps."""

import resource
from contextlib import suppress


def forbid_core_dumps() -> None:
    """Let this process, and all that it starts, write no core dump.

    The kernel ignores the limit if it pipes cores into a program (systemd-coredump, apport). The filter (core(5))
    leaves such a core without any memory. Unlike PR_SET_DUMPABLE, both leave /proc and debuggers to the user.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/coredump_filter", "w") as f:  # some kernels have no filter
        f.write("0")
