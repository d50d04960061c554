"""Take no new connections while descriptors are scarce: libzmq aborts the process if it finds none for a connection."""

import logging

from supervisor.ports.client_ports import ClientPorts
from supervisor.ports.descriptors import DescriptorBudget

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
