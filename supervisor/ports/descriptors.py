"""Descriptors: libzmq aborts the whole process if it has none left for an incoming connection. We stop before.

Connections are taken by libzmq's own thread, which is ahead of us by up to ``UNSEEN`` of each port, and by those that
the kernel has ready when we stop listening. So many, and some for workers, are kept in reserve. With fewer than
COMFORTABLE there are not so many to keep: then half of them are, and it takes a fast flood, while our thread does not
get to run, to come to the end of them. That is said at start.
"""

import errno
import logging
import os
import resource

from supervisor.ports.monitors import UNSEEN

COMFORTABLE = 4096
BACKLOG = 128
"""Connections that the kernel may have ready for each socket: they come even after we stopped listening."""
FOR_OURSELVES = 64
"""Descriptors for workers that are started, files that are read, and connections that are seen in the meantime."""


def reserve_of(limit: int, ports: int) -> int:
    """Descriptors of ``limit`` that are not for clients, where so many ports listen."""
    if limit < COMFORTABLE:
        return max(32, limit // 2)
    return ports * (UNSEEN + BACKLOG) + FOR_OURSELVES


class DescriptorBudget:
    """How many descriptors this process may have, and whether so many are in use that no connection should be taken.

    ports  sockets that clients connect to
    """

    def __init__(self, log: logging.Logger, ports: int) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.limit = hard
        reserve = reserve_of(hard, ports)
        self._mark = hard - reserve
        self.backlog = min(BACKLOG, max(8, reserve // 8))
        if hard < COMFORTABLE:
            told = "few clients can be connected at once, and a flood of them could end this process"
            log.warning("only %d descriptors are allowed (ulimit -n): %s; allow %d", hard, told, COMFORTABLE)

    def scarce(self) -> bool:
        return self._in_use() > self._mark

    def plenty(self) -> bool:
        """Well below the mark, so that taking connections again does not end at once."""
        return self._in_use() < self._mark * 3 // 4

    def _in_use(self) -> int:
        try:
            return len(os.listdir("/proc/self/fd"))
        except OSError as e:
            if e.errno not in (errno.EMFILE, errno.ENFILE):  # looking takes one, too; or the system has none left
                raise
            return self.limit
