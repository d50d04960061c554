"""The machines of one lane of the chaos run, as the test sees them."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.node_plan import LEASE_S, MACHINES
from tests.orphans import end_with_us
from tests.serving import ROOT, wait_until

DRIVER = "tests.chaos.driver"
AGENT = ("supervisor.cluster", "modelctl: agent of worker")
"""Parts of an agent's command line: before and after it has set its title."""
NOTICED = "MODELCTL_CHAOS_NOTICED_S"
"""The environment variable that tells a driver after how many seconds it declares a silent machine dead."""


class Machines:
    """Processes of ``tests.chaos.machine``. They outlive many supervisors.

    directory  takes their sockets
    mark       the mark of the processes of a ``Serving``
    """

    def __init__(self, directory: Path, mark: str) -> None:
        end_with_us()
        self._directory = directory
        directory.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = f"127.0.0.1:{probe.getsockname()[1]}"
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.machine", str(directory), name, self._port, mark], cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
            ) for name in MACHINES
        ]  # fmt: skip
        self._controls: dict[str, socket.socket] = {}
        for name in MACHINES:
            path = directory / f"{name}.control"
            self._controls[name] = wait_until(lambda path=path: _connected(path), what=f"the machine {name}")

    @property
    def section(self) -> dict[str, Any]:
        """Return the section ``cluster`` of models.yaml."""
        return {"ray": str(self._directory), "advertise": f"tcp://{self._port}", "lease": f"{LEASE_S:g}s"}

    def tell(self, name: str, order: str) -> None:
        """Give a machine an order, and wait until it is done. ``tests.chaos.machine`` has the orders."""
        self._controls[name].sendall(f"{order}\n".encode())
        assert self._controls[name].recv(100) == b"done\n"

    def close(self) -> None:
        for control in self._controls.values():
            control.close()
        for process in self._processes:
            process.kill()
            process.wait()


def _connected(path: Path) -> socket.socket | None:
    """Return a connection to a Unix socket; None while nobody listens there."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


def driver_of(supervisor: int) -> psutil.Process | None:
    """Return the driver of a supervisor, or None while there is none."""
    for child in psutil.Process(supervisor).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if DRIVER in child.cmdline():
                return child
    return None


def agent_of(worker: int) -> psutil.Process | None:
    """Return the agent of a worker, by the worker's pid. None for a worker of this machine, or one that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(worker).parent()
        if parent is not None and any(part in " ".join(parent.cmdline()) for part in AGENT):
            return parent
    return None
