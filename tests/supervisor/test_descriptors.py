"""The budget of descriptors works even if none is left, although counting them takes one, too."""

import errno
import logging
import os
import subprocess
import sys

import pytest

from supervisor.ports.descriptors import (
    BACKLOG,
    COMFORTABLE,
    FEWEST_CLIENTS,
    FOR_OPERATORS,
    OF_SUPERVISOR,
    OF_WORKER,
    DescriptorBudget,
    needed,
    reserve_of,
)
from supervisor.ports.sockets import UNSEEN

PROGRAM = """
import logging, os, resource
from supervisor.ports.descriptors import DescriptorBudget
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
budget = DescriptorBudget(256, 2, logging.getLogger())
def show():
    print(budget.scarce(0), budget.plenty(0), budget.scarce_for_operators(0), budget.plenty_for_operators(0))
show()
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
show()
for descriptor in taken:
    os.close(descriptor)
show()
"""


def test_none_left_is_scarce_and_no_error() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    calm, none_left = "False True False True", "True False True False"
    assert done.stdout.splitlines() == [calm, none_left, calm], done.stderr


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_system_that_has_none_left_is_no_error_either(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = DescriptorBudget(1024, 2, logging.getLogger())

    def refused(path: str) -> list[str]:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr("supervisor.ports.descriptors.os.listdir", refused)
    assert budget.scarce(0)
    assert not budget.plenty(0)


def test_from_what_is_comfortable_on_there_is_room_for_all_who_come_unseen() -> None:
    for ports in (2, 3):
        reserve = reserve_of(COMFORTABLE, ports)
        assert ports * (UNSEEN + BACKLOG) < reserve < COMFORTABLE - 512
    assert reserve_of(COMFORTABLE - 1, 2) == COMFORTABLE // 2 - 1


@pytest.mark.parametrize("ports", [2, 3])
@pytest.mark.parametrize("workers", [0, 1, 8, 64, 300])
def test_what_is_needed_leaves_room_for_clients(workers: int, ports: int) -> None:
    limit = needed(workers, ports)
    used = OF_SUPERVISOR + OF_WORKER * workers
    assert limit - reserve_of(limit, ports) - FOR_OPERATORS - used >= FEWEST_CLIENTS


class Counted(DescriptorBudget):
    """A counter that reports ``used`` descriptors in use."""

    used = 0

    def _in_use(self) -> int:
        return self.used


def test_clients_are_taken_again_when_they_are_gone_however_much_else_is_in_use() -> None:
    budget = Counted(256, 2, logging.getLogger())
    for others in (10, 60, 95, 96, 97, 150):
        mark = 256 - 128 - FOR_OPERATORS
        clients = max(mark - others, 0) + 1
        budget.used = others + clients
        assert budget.scarce(clients)
        assert not budget.plenty(clients)
        budget.used = others
        assert budget.plenty(0)
        assert not budget.scarce(0)


def test_operators_have_a_share_of_their_own() -> None:
    budget = Counted(256, 2, logging.getLogger())
    budget.used = 200
    assert budget.scarce(100)
    assert not budget.scarce_for_operators(FOR_OPERATORS)
    assert budget.scarce_for_operators(FOR_OPERATORS + 1)
    assert budget.plenty_for_operators(FOR_OPERATORS // 2)
    assert not budget.plenty_for_operators(FOR_OPERATORS // 2 + 1)
    budget.used = 90
    assert not budget.scarce_for_operators(60), "there is room for more"
    assert budget.plenty_for_operators(60)
    budget.used = 250
    assert budget.scarce_for_operators(0)
