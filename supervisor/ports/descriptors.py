"""Descriptors: libzmq aborts the whole process if it has none left for an incoming connection. We stop before."""

import errno
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
        # Connections are taken by libzmq's own thread, which is ahead of us by what it takes (up to some 20,000 a
        # second) until the kernel lets our thread run: tens of milliseconds on a busy machine.
        reserve = max(32, min(1024, hard // 2))
        self._mark = hard - reserve
        self.backlog = max(8, reserve // 8)
        """Connections that the kernel may have ready for each socket: they come even after we stopped listening."""
        if hard < COMFORTABLE:
            log.warning("only %d descriptors are allowed (ulimit -n): few clients can be connected at once", hard)

    def scarce(self) -> bool:
        return self._in_use() > self._mark

    def plenty(self) -> bool:
        """Well below the mark, so that taking connections again does not end at once."""
        return self._in_use() < self._mark * 3 // 4

    def _in_use(self) -> int:
        try:
            return len(os.listdir("/proc/self/fd"))
        except OSError as e:
            if e.errno != errno.EMFILE:  # looking takes one, too
                raise
            return self.limit
