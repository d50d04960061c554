"""A Ray cluster on this machine: the head beside the tests, and each further node in a network namespace of its own.

Where no namespaces can be made, the nodes have addresses of the loopback interface. Then no network can be cut.
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from supervisor.cluster.agent import PREFIX
from supervisor.cluster.machines import RayStarter
from tests.serving import ROOT, describe, wait_until

PLACES = range(1, 250)
"""Numbers of clusters that may run on this machine at the same time. Each has a network, a bridge and a port."""
LISTED_S, SPARE_S = 120.0, 120.0
"""Seconds until a wait for all nodes, or for a spare worker, fails."""
_OWN_FILES = 'mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && exec "$@"'
"""Gives a node a /tmp/ray of its own. Nodes that start at once would otherwise choose the same names of sockets."""


def wait_for_spare(pids: Callable[[], Iterable[int]]) -> dict[str, psutil.Process]:
    """Wait for a spare worker of a spare agent that has used no processor for half a second, so its imports are
    probably done. Return "agent" and "worker". ``pids`` returns the processes of the node."""
    seen, since = 0.0, time.monotonic()

    def quiet() -> dict[str, psutil.Process] | None:
        nonlocal seen, since
        with suppress(psutil.NoSuchProcess):
            spare = _spare_of(pids())
            used = sum(spare["worker"].cpu_times()[:2]) if len(spare) == 2 else 0.0
            if used != seen:
                seen, since = used, time.monotonic()
            return spare if used and time.monotonic() - since > 0.5 else None
        return None

    try:
        return wait_until(quiet, SPARE_S, "a spare worker")
    except AssertionError as e:
        raise AssertionError(f"{e}; there is:\n{_seen(pids())}") from None


def _seen(pids: Iterable[int]) -> str:
    """Return what is known of these processes, with parent and processor time, and the logs of all spare workers of
    agents, those of dead agents included."""
    lines = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            lines.append(f"parent {process.ppid()}, {sum(process.cpu_times()[:2]):.2f} s, {describe([process])}")
    for log in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/spare.log"):
        with suppress(OSError):
            lines.append(f"{log}: {log.read_text(errors='replace')[-2000:] or 'empty'}")
    return "\n".join(lines)


def _spare_of(pids: Iterable[int]) -> dict[str, psutil.Process]:
    """Return a spare agent and its spare worker, as far as they are among these processes."""
    titled = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            titled[process] = " ".join(process.cmdline())
    agents = [process for process, line in titled.items() if line.startswith("modelctl: spare agent")]
    for worker, line in titled.items():
        if line.startswith("modelctl: spare worker") and (agent := worker.parent()) in agents:
            return {"agent": agent, "worker": worker}
    return {}


def can_make_namespaces() -> bool:
    """Return whether this process may make network namespaces, with a bridge between them."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        return False
    done = subprocess.run(["ip", "netns", "add", f"mctlprobe{os.getpid()}"], capture_output=True)
    subprocess.run(["ip", "netns", "del", f"mctlprobe{os.getpid()}"], capture_output=True)
    return done.returncode == 0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class RayCluster:
    """A context manager.

    nodes  name → GPUs that Ray leases. They do not exist
    token  whether strangers are refused
    boxes  name → file for the stand-in for NVML (``tests.nvml_box``) on that node
    labels  name → labels of that node
    apart   False: no network namespaces
    cpus    processors of each node, as Ray counts them. Ray keeps as many idle processes for actors
    """

    def __init__(
        self,
        directory: Path,
        nodes: dict[str, int],
        *,
        token: bool = True,
        boxes: Mapping[str, Path] | None = None,
        labels: Mapping[str, str] | None = None,
        apart: bool = True,
        cpus: int = 1,
    ) -> None:
        self.directory = directory
        self.nodes = list(nodes)
        self._gpus = nodes
        self._boxes, self._labels = boxes or {}, labels or {}
        self._apart, self._cpus = apart, cpus
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {"RAY_AUTH_MODE": "disabled", "RAY_DISABLE_IMPORT_WARNING": "1"}
        if token:
            (directory / "token").write_text("3f2a" * 8)
            self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(directory / "token")}

    def __enter__(self) -> "RayCluster":
        if self._apart:
            self._take_place()
        else:
            self._use("127.0.0", 0)
        try:
            if self._apart:
                self._make_networks()
            self._start(
                "head",
                [],
                [
                    "--head",
                    f"--port={self._port}",
                    f"--node-ip-address={self._network}.1",
                    "--num-gpus=0",
                    "--include-dashboard=false",
                ],
            )
            for name in self.nodes:
                self.start_node(name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _take_place(self) -> None:
        """Make the bridge of the first number that is not taken."""
        for place in PLACES:
            self._use(f"10.213.{place}", place)
            done = subprocess.run(["ip", "link", "add", self._bridge, "type", "bridge"], capture_output=True)
            if done.returncode == 0:
                break
        else:
            raise RuntimeError(f"no bridge can be made: {done.stderr.decode()}")

    def _use(self, network: str, place: int) -> None:
        """Take the addresses of a network, whose first one is the head's."""
        self._network, self._bridge, self._port = network, f"mctl{place}", 6300 + place
        self.address = f"{network}.1:{self._port}"
        self.advertise = f"tcp://{network}.1:5599"

    def _make_networks(self) -> None:
        """Give each node a network namespace, and a link to the bridge."""
        ip("addr", "add", f"{self._network}.1/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        for number, name in enumerate(self.nodes):
            space, cable = self._space(name), self._cable(name)
            ip("netns", "add", space)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", cable, "master", self._bridge, "up")
            ip("-n", space, "addr", "add", f"{self._network}.{11 + number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def _space(self, name: str) -> str:
        """Return the network namespace of a node."""
        return f"{self._bridge}-{name}"

    def _cable(self, name: str) -> str:
        """Return the head's end of the link to a node."""
        return f"{self._bridge}v{self.nodes.index(name)}"

    def start_node(self, name: str) -> None:
        number = self.nodes.index(name)
        self._start(
            name,
            ["ip", "netns", "exec", self._space(name), "sh", "-c", _OWN_FILES, "sh"] if self._apart else [],
            [
                f"--address={self.address}",
                f"--node-ip-address={self._network}.{11 + number}",
                f"--num-gpus={self._gpus[name]}",
                *([f"--labels={self._labels[name]}"] if name in self._labels else []),
            ],
        )

    def wait_for_nodes(self) -> None:
        """Wait until the cluster knows all its nodes. The variables of ``environment`` have to be set."""
        starter = RayStarter(self.address, logging.getLogger())
        try:
            wait_until(
                lambda: starter.ended() == [] and len(starter.nodes) == 1 + len(self.nodes), LISTED_S, "all nodes"
            )
        finally:
            starter.close()

    def _start(self, name: str, before: list[str], words: list[str]) -> None:
        with open(self.directory / f"ray-{name}.log", "wb") as log:
            self._processes[name] = subprocess.Popen(
                [
                    *before, sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", *words,
                    f"--node-name={name}", f"--num-cpus={self._cpus}", "--disable-usage-stats",
                    "--object-store-memory=80000000", "--block",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **self.environment, **self._box_of(name)},
            )  # fmt: skip

    def _box_of(self, name: str) -> dict[str, str]:
        if name not in self._boxes:
            return {}
        return {"MODELCTL_TEST_BOX": str(self._boxes[name]), "PYTHONPATH": str(ROOT / "tests" / "stand_in_nvml")}

    def cut(self, name: str) -> None:
        """Cut the network of a node. No packet says goodbye."""
        ip("link", "set", self._cable(name), "down")

    def heal(self, name: str) -> None:
        ip("link", "set", self._cable(name), "up")

    def kill(self, name: str) -> None:
        """Kill everything that runs on a node."""
        space = self._space(name)
        pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=True).stdout.split()
        for pid in pids:
            subprocess.run(["kill", "-9", pid], capture_output=True)
        self._processes.pop(name).wait()

    def pids(self, name: str) -> list[int]:
        """Return the pids of everything that runs on a node."""
        command = ["ip", "netns", "pids", self._space(name)]
        return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True).stdout.split()]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not self._apart:
            return
        for name in self.nodes:
            done = subprocess.run(["ip", "netns", "pids", self._space(name)], capture_output=True, text=True)
            for pid in done.stdout.split():
                subprocess.run(["kill", "-9", pid], capture_output=True)
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True)
            subprocess.run(["ip", "link", "del", self._cable(name)], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)
