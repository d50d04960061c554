"""Descriptors: libzmq aborts the whole process if it has none left for an incoming connection. We stop before."""

import logging
import os
import resource

COMFORTABLE = 4096
"""Fewer than this allow few connections, which is said at start."""


class DescriptorBudget:
    """How many descriptors this process may have, and whether so many are in use that no connection should be taken."""

    def __init__(self, log: logging.Logger) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.limit = hard
        # Connections are taken by libzmq's own thread, which can be a burst ahead of us.
        self._reserve = max(32, min(1024, hard // 4))
        self.backlog = max(8, self._reserve // 4)
        """Connections that the kernel may have ready for each socket: they come even after we stopped listening."""
        if hard < COMFORTABLE:
            log.warning("only %d descriptors are allowed (ulimit -n): few clients can be connected at once", hard)

    def scarce(self) -> bool:
        return _in_use() > self.limit - self._reserve

    def plenty(self) -> bool:
        """Well below the mark, so that taking connections again does not end at once."""
        return _in_use() < self.limit - 2 * self._reserve


def _in_use() -> int:
    return len(os.listdir("/proc/self/fd"))
