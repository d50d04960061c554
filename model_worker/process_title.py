"""The name under which ps, top and nvidia-smi show a process of ours."""

import os

from setproctitle import setproctitle


def set_title(role: str) -> None:
    """Show this process as ``modelctl: ROLE``.

    The title replaces the command line only. By default the package also overwrites the environment that /proc shows.
    That environment holds a mark, by which the next supervisor finds the processes that a dead one has left behind.
    """
    os.environ["SPT_NOENV"] = "1"
    setproctitle(f"modelctl: {role}")
