"""No prompt ends up in a core dump, of any process of ours."""

import resource
from contextlib import suppress


def forbid_core_dumps() -> None:
    """For this process and all that it starts: no core file, and none of its memory for a program that takes cores.

    The limit alone does not bind the kernel where cores are piped into a program (systemd-coredump, apport); the filter
    (core(5)) leaves them without any memory. Unlike PR_SET_DUMPABLE, both leave /proc and debuggers to the user.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/coredump_filter", "w") as f:  # a kernel without it: the limit is all
        f.write("0")
