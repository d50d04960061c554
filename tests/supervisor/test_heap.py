"""Memory that was needed for a short time is given back to the system."""

import platform
import subprocess
import sys

import pytest

from tests.serving import ROOT

SOURCE = """
import os
from pathlib import Path
from supervisor.reactor import trim

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

before = resident()
peak = [bytearray(1000) for _ in range(40_000)]
above = bytearray(1000)  # which keeps the C library from shrinking its heap
del peak
left = resident()
trim()
print(before, left, resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only GNU's C library can be told to")
def test_what_a_peak_has_left_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", SOURCE], capture_output=True, text=True, check=True, cwd=ROOT)
    before, left, after = map(int, done.stdout.split())
    assert left - before > 30, "MiB that stay by themselves"
    assert after - before < 10
