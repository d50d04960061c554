"""The name under which ps, top and nvidia-smi show a process of modelctl."""

import os

from setproctitle import setproctitle


def set_title(role: str) -> None:
    """Show this process as ``modelctl: ROLE``.

    Only the command line is replaced. By default setproctitle also overwrites the environment that /proc shows. That
    environment holds a mark by which the next supervisor finds the processes that a dead supervisor has left behind.
    """
    os.environ["SPT_NOENV"] = "1"
    setproctitle(f"modelctl: {role}")
