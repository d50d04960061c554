"""Decide when so many descriptors are in use that ports must take no new connections.

libzmq aborts the whole process if it finds no descriptor for an incoming connection. libzmq's own thread takes
connections. That thread is ahead of the supervisor's thread by up to ``UNSEEN`` connections of each port. It also takes
those that the kernel has ready when the port stops listening. So that many descriptors are kept in reserve, and some
more for workers and for operators.

A process that may have fewer than COMFORTABLE descriptors cannot keep that reserve. It keeps half of them, and logs a
warning at start: a fast flood could use up the reserve while the supervisor's thread does not get to run.

The port for operators has a share of its own. It goes on taking connections while the others take none.
"""

import errno
import logging
import os
import resource

from supervisor.ports.client_port import ClientPorts
from supervisor.ports.sockets import UNSEEN

COMFORTABLE = 4096
"""The lowest limit on descriptors with which the whole reserve can be kept."""
BACKLOG = 128
"""Connections that the kernel may have ready for each socket. They come even after the socket stopped listening."""
FOR_OURSELVES = 64
"""Descriptors for workers that are started, files that are read, and connections that are seen in the meantime."""
FOR_OPERATORS = 32
"""Connections to the port for operators that may exist while the other ports take none."""
OF_SUPERVISOR = 48
"""Descriptors of a supervisor without workers and clients. 31 were counted; reading a models.yaml takes a few more."""
OF_WORKER = 8
"""Descriptors for each worker. 5 were counted; starting one takes a few more."""
FEWEST_CLIENTS = 32
"""The number of client connections for which there must always be descriptors."""
LAST = 16
"""Descriptors that are kept free even from operators."""


class TooFewDescriptors(Exception):
    """The limit is so low that the supervisor could not work. The message is one line with a remedy."""


def reserve_of(limit: int, ports: int) -> int:
    """Return how many descriptors of ``limit`` are not for clients.

    ports  how many sockets clients connect to
    """
    if limit < COMFORTABLE:
        return limit // 2
    return ports * (UNSEEN + BACKLOG) + FOR_OURSELVES


def needed(workers: int, ports: int) -> int:
    """Return the lowest limit at which a supervisor with this number of workers and ports can work."""
    used = OF_SUPERVISOR + OF_WORKER * workers + FOR_OPERATORS + FEWEST_CLIENTS
    return 2 * used if 2 * used < COMFORTABLE else max(COMFORTABLE, used + reserve_of(COMFORTABLE, ports))


def raise_limit(workers: int, ports: int) -> int:
    """Raise the limit of this process as far as the system lets it, and return it. Raises TooFewDescriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < (fewest := needed(workers, ports)):
        raise TooFewDescriptors(
            f"only {hard} descriptors are allowed, and {fewest} are needed for {workers} workers and some clients: "
            "raise the limit (`ulimit -Hn`, LimitNOFILE= of systemd, --ulimit nofile= of docker), best to "
            f"{COMFORTABLE} or more"
        )
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class DescriptorBudget:
    """Says when ports should take no new connections, and when they may take connections again.

    limit  descriptors that this process may have, see ``raise_limit``
    ports  sockets that clients connect to
    """

    def __init__(self, limit: int, ports: int, log: logging.Logger) -> None:
        self.limit = limit
        reserve = reserve_of(limit, ports)
        self._mark = limit - reserve - FOR_OPERATORS
        self.backlog = min(BACKLOG, max(8, reserve // 8))
        if limit < COMFORTABLE:
            message = "few clients can be connected at once, and a flood of them could end this process"
            log.warning("only %d descriptors are allowed (ulimit -n): %s; allow %d", limit, message, COMFORTABLE)

    def scarce(self, clients: int) -> bool:
        """Return whether to take no new clients. ``clients``: how many are connected."""
        in_use = self._in_use()
        return in_use > self.limit - LAST or (in_use > self._mark and clients > 0)

    def plenty(self, clients: int) -> bool:
        """Return whether to take clients again: a quarter of the room for them is free, or none is connected.

        Only clients go away by themselves. Other uses may need more descriptors than was estimated at the start.
        """
        in_use = self._in_use()
        room = max(0, self._mark - (in_use - clients))
        return in_use <= self.limit - 2 * LAST and clients <= room * 3 // 4

    def scarce_for_operators(self, operators: int) -> bool:
        """Return whether to take no new operators. ``operators``: how many are connected."""
        in_use = self._in_use()
        return in_use > self.limit - LAST or (in_use > self._mark and operators > FOR_OPERATORS)

    def plenty_for_operators(self, operators: int) -> bool:
        """Return whether to take operators again."""
        in_use = self._in_use()
        return in_use <= self.limit - 2 * LAST and (in_use <= self._mark or operators <= FOR_OPERATORS // 2)

    def _in_use(self) -> int:
        try:
            return len(os.listdir("/proc/self/fd"))
        except OSError as e:
            if e.errno not in (errno.EMFILE, errno.ENFILE):  # to list a directory takes a descriptor, too
                raise
            return self.limit


# Take no new connections while descriptors are scarce: libzmq aborts the process if it finds none for a connection.


CHECK_S = 1.0
"""Seconds between two checks. The loop also checks after each few new connections."""


class DescriptorWatch:
    """Pauses and resumes the ports, as the budget says. The port for operators has a share of its own."""

    def __init__(self, budget: DescriptorBudget, clients: ClientPorts, log: logging.Logger) -> None:
        self._budget = budget
        self._clients = clients
        self._log = log

    def check(self) -> None:
        """Pause the ports for which too few descriptors are left, and resume those for which enough are free again."""
        self._check_requests()
        self._check_operators()

    def _check_requests(self) -> None:
        ports, budget = self._clients.for_requests, self._budget
        connected, listening = sum(port.accepted for port in ports), self._clients.front.listening
        if listening and budget.scarce(connected):
            self._log.error("almost all of %d descriptors are in use: no new connections of clients", budget.limit)
            for port in ports:
                port.pause()
        elif not listening and budget.plenty(connected):
            self._log.info("descriptors are free again: taking connections of clients")
            for port in ports:
                port.resume()

    def _check_operators(self) -> None:
        admin, budget = self._clients.admin, self._budget
        if admin.listening and budget.scarce_for_operators(admin.accepted):
            message = (
                "almost all of %d descriptors are in use, with %d operators connected: no new connections of operators"
            )
            self._log.error(message, budget.limit, admin.accepted)
            admin.pause()
        elif not admin.listening and budget.plenty_for_operators(admin.accepted):
            self._log.info("taking connections of operators again")
            admin.resume()
