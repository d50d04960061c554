"""A Ray cluster on this machine: the head beside the tests, and each further node in a network namespace of its own."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

NETWORK = "10.213.77"
BRIDGE = "mctlbr"
HEAD = f"{NETWORK}.1"
GCS_PORT = 6399


def can_make_namespaces() -> bool:
    """Return whether this process may make network namespaces, with a bridge between them."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        return False
    done = subprocess.run(["ip", "netns", "add", "mctlprobe"], capture_output=True)
    subprocess.run(["ip", "netns", "del", "mctlprobe"], capture_output=True)
    return done.returncode == 0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class RayCluster:
    """A context manager. ``nodes``: name → GPUs, which do not exist."""

    def __init__(self, directory: Path, nodes: dict[str, int]) -> None:
        self.directory = directory
        self.nodes = list(nodes)
        self.address = f"{HEAD}:{GCS_PORT}"
        self.advertise = f"tcp://{HEAD}:5599"
        self._gpus = nodes
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        token = directory / "token"
        token.write_text("3f2a" * 8)
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_DISABLE_IMPORT_WARNING": "1",
            "RAY_enable_infeasible_task_early_exit": "1",
        }

    def __enter__(self) -> "RayCluster":
        try:
            ip("link", "add", BRIDGE, "type", "bridge")
            ip("addr", "add", f"{HEAD}/24", "dev", BRIDGE)
            ip("link", "set", BRIDGE, "up")
            for number, name in enumerate(self.nodes):
                space = f"mctl-{name}"
                ip("netns", "add", space)
                ip("link", "add", f"mctlv{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
                ip("link", "set", f"mctlv{number}", "master", BRIDGE, "up")
                ip("-n", space, "addr", "add", f"{NETWORK}.{11 + number}/24", "dev", "eth0")
                ip("-n", space, "link", "set", "eth0", "up")
                ip("-n", space, "link", "set", "lo", "up")
            self._start("head", [], ["--head", f"--port={GCS_PORT}", f"--node-ip-address={HEAD}", "--num-gpus=0"])
            for number, name in enumerate(self.nodes):
                self.start_node(name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def start_node(self, name: str) -> None:
        number = self.nodes.index(name)
        self._start(
            name,
            ["ip", "netns", "exec", f"mctl-{name}"],
            [
                f"--address={self.address}",
                f"--node-ip-address={NETWORK}.{11 + number}",
                f"--num-gpus={self._gpus[name]}",
            ],
        )

    def _start(self, name: str, before: list[str], words: list[str]) -> None:
        with open(self.directory / f"ray-{name}.log", "wb") as log:
            self._processes[name] = subprocess.Popen(
                [
                    *before, sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", *words,
                    f"--node-name={name}", "--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats",
                    "--object-store-memory=80000000", "--block",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **self.environment},
            )  # fmt: skip

    def cut(self, name: str) -> None:
        """Cut the network of a node. No packet says goodbye."""
        ip("link", "set", f"mctlv{self.nodes.index(name)}", "down")

    def heal(self, name: str) -> None:
        ip("link", "set", f"mctlv{self.nodes.index(name)}", "up")

    def kill(self, name: str) -> None:
        """Kill everything that runs on a node."""
        space = f"mctl-{name}"
        pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=True).stdout.split()
        for pid in pids:
            subprocess.run(["kill", "-9", pid], capture_output=True)
        self._processes.pop(name).wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, process in reversed(self._processes.items()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        for number, name in enumerate(self.nodes):
            done = subprocess.run(["ip", "netns", "pids", f"mctl-{name}"], capture_output=True, text=True)
            for pid in done.stdout.split():
                subprocess.run(["kill", "-9", pid], capture_output=True)
            subprocess.run(["ip", "netns", "del", f"mctl-{name}"], capture_output=True)
            subprocess.run(["ip", "link", "del", f"mctlv{number}"], capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)
        time.sleep(0)
