"""The actor that Ray runs for a worker: it holds the lease of the worker's GPUs, and runs the worker's agent.

It is all of modelctl that runs inside Ray. The agent is a process of its own, without Ray's threads. It dies with this
process (PR_SET_PDEATHSIG), and the worker dies with the agent. Ray ends this process when the driver ends.
"""

import os
import subprocess
import sys

import ray


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class AgentActor:
    """One agent. Ray calls its methods on the process's main thread, to which the agent's life is bound."""

    def run(self, order: bytes) -> int:
        """Run an agent until it leaves. Return its exit code."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "supervisor.cluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env=environment,
        )
        agent.communicate(order)
        return agent.returncode
