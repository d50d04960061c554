"""The budget of descriptors where there are none left: counting them takes one, too."""

import errno
import logging
import os
import subprocess
import sys

import pytest

from supervisor.ports.descriptors import BACKLOG, COMFORTABLE, DescriptorBudget, reserve_of
from supervisor.ports.monitors import UNSEEN

PROGRAM = """
import logging, os, resource
from supervisor.ports.descriptors import DescriptorBudget
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
budget = DescriptorBudget(logging.getLogger(), ports=2)
print(budget.scarce(), budget.plenty())
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print(budget.scarce(), budget.plenty())
for descriptor in taken:
    os.close(descriptor)
print(budget.scarce(), budget.plenty())
"""


def test_none_left_is_scarce_and_no_error() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["False True", "True False", "False True"], done.stderr


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_system_that_has_none_left_is_no_error_either(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = DescriptorBudget(logging.getLogger(), ports=2)

    def refused(path: str) -> list[str]:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr("supervisor.ports.descriptors.os.listdir", refused)
    assert budget.scarce()
    assert not budget.plenty()


def test_from_what_is_comfortable_on_there_is_room_for_all_who_come_unseen() -> None:
    for ports in (2, 3):
        reserve = reserve_of(COMFORTABLE, ports)
        assert ports * (UNSEEN + BACKLOG) < reserve < COMFORTABLE - 512
    assert reserve_of(COMFORTABLE - 1, 2) == COMFORTABLE // 2 - 1
