"""What Ray runs of modelctl: an actor for each worker, and a task that reads the GPUs of a machine.

The actor holds the lease of the worker's GPUs, and runs the worker's agent. The agent is a process of its own, without
Ray's threads. It dies with the actor's process (PR_SET_PDEATHSIG), and the worker dies with the agent. Ray ends the
actor's process when the driver ends.
"""

import os
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

    def run(self, order: bytes) -> int:
        """Run an agent until it leaves. Return its exit code."""
        agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "supervisor.cluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env=_environment(),
        )
        agent.communicate(order)
        return agent.returncode
