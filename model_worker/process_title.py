"""The name under which ps, top and nvidia-smi show a process of ours."""

import os

from setproctitle import setproctitle


def set_title(role: str) -> None:
    """Show this process as ``modelctl: ROLE``.

    The title takes the place of the command line only. By default the package writes it over the environment as well,
    as /proc shows that: the mark there tells the next supervisor which processes a dead one has left behind.
    """
    os.environ["SPT_NOENV"] = "1"
    setproctitle(f"modelctl: {role}")
