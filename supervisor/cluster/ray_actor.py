"""What Ray runs of modelctl: an actor for each worker, and a task that reads the GPUs of a machine.

The actor holds the lease of the worker's GPUs, and runs the worker's agent. The agent is a process of its own, without
Ray's threads. It dies with the actor's process (PR_SET_PDEATHSIG), and the worker dies with the agent. Ray ends the
actor's process when the driver ends.

A spare agent (``ray_driver``) has no GPUs yet. When it is used, an actor of its own holds the lease.
"""

import os
import signal
import subprocess
import sys

import ray

PROBE_S = 45.0
"""Seconds that reading the GPUs of a machine may take. Opening the driver takes some."""


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator, unused-ignore]
def read_gpus() -> bytes:
    """Return what ``gpu_probe`` tells of this machine; nothing if it does not."""
    command = [sys.executable, "-P", "-m", "supervisor.cluster.gpu_probe"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S, cwd="/", env=_environment()
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class AgentActor:
    """One agent. Ray calls its methods on the process's main thread, to which the agent's life is bound."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None

    def prepare(self, engine: str) -> None:
        """Start an agent that gets its order later, and keeps a spare worker of this engine until then."""
        self._agent = _agent(engine)

    def is_there(self) -> bool:
        """Return whether the agent that was prepared lives."""
        return self._agent is not None and self._agent.poll() is None

    def run(self, order: bytes, devices: str | None = None) -> int:
        """Run the agent until it leaves. Return its exit code.

        devices  CUDA_VISIBLE_DEVICES; None: this actor's own lease
        """
        agent = self._agent or _agent()
        own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        agent.communicate((own if devices is None else devices).encode() + b"\n" + order)
        return agent.returncode


def _agent(*engine: str) -> "subprocess.Popen[bytes]":
    """Start an agent: a spare one, if an engine is given."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "supervisor.cluster", *engine],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env=_environment(),
    )


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class Lease:
    """The lease of the GPUs of a worker whose agent was a spare one."""

    def devices(self) -> str:
        """Return the GPUs, as CUDA_VISIBLE_DEVICES names them."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def hold(self) -> None:
        """Hold the lease until Ray ends this actor."""
        while True:
            signal.pause()
