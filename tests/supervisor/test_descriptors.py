"""The budget of descriptors where there are none left: counting them takes one, too."""

import subprocess
import sys

PROGRAM = """
import logging, os, resource
from supervisor.ports.descriptors import DescriptorBudget
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
budget = DescriptorBudget(logging.getLogger())
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
