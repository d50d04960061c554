"""Make the environments, then run the tests of this package where there is no network but loopback.

python -m tests.agents [options of pytest]
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

import pytest

from tests.agents.harness import make_all

INSIDE = "--inside-a-namespace"
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def namespace() -> list[str]:
    """Return the command that runs another one in a network namespace of its own; empty if none can be had."""
    for options in (["-n"], ["-r", "-n"]):
        command = ["unshare", *options]
        if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return []


def raise_loopback() -> None:
    """Switch the loopback interface on. A new namespace has it switched off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as some:
        fcntl.ioctl(some, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def main(arguments: list[str]) -> int:
    if INSIDE in arguments:
        raise_loopback()
        return int(pytest.main([argument for argument in arguments if argument != INSIDE]))
    make_all()
    tests = [f"tests/agents/{name}.py" for name in ("python_programs", "node_programs", "lm_eval_figures")]
    tests = ["-p", "no:cacheprovider", *tests, *arguments]
    if command := namespace():
        print("The programs run in a network namespace that holds only loopback.", flush=True)
        os.execvp(command[0], [*command, sys.executable, "-m", "tests.agents", INSIDE, *tests])
    print("No network namespace can be had here: the programs could reach the network.", flush=True)
    return int(pytest.main(tests))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
