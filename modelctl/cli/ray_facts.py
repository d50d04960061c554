"""A program that joins a Ray cluster, has a look at each of its other machines from there, and prints what it has seen.

    python -P -m modelctl.cli.ray_facts    with a request as JSON in standard input

The doctor runs it as a process of its own: it may hang with the cluster. It is a program and no module to import, so
that Ray sends ``Looker`` itself to the machines. They may have another version of modelctl, or none.
"""

import importlib.util
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

MACHINE_S: Final = 60.0
"""Seconds for all machines together to answer. Ray starts an interpreter on each."""
CONNECT_S: Final = 3.0
CLOCKS: Final = 5
"""Times that each clock is asked. The quickest answer counts."""


class Looker:
    """What is looked at on a machine. Ray sends this class there: it uses nothing of this module but imports."""

    def facts(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is to be known of the machine.

        request  endpoints (hosts with ports), nvml (the text of ``nvml_facts``), engines, paths
        """
        found: dict[str, Any] = {"python": platform.python_version(), "version": None, "packages": []}
        try:
            from protocol import __version__
            from protocol.process.worker_spec import missing_for

            found["version"] = __version__
            found["packages"] = [why for engine in request["engines"] if (why := missing_for(engine)) is not None]
        except ImportError:
            pass  # version says it
        found["missing"] = [path for path in request["paths"] if not os.path.isdir(path)]
        found["answers"] = [self._answer_at(*endpoint) for endpoint in request["endpoints"]]
        found["nvml"] = self._nvml(request["nvml"])
        return found

    def _answer_at(self, host: str, port: int) -> dict[str, str]:
        """Return {begins}, how what listens there begins, in hex; or {error}."""
        try:
            with socket.create_connection((host, port), 3.0) as connection:
                connection.settimeout(3.0)
                return {"begins": connection.recv(16).hex()}
        except OSError as e:
            return {"error": e.strerror or str(e) or type(e).__name__}

    def _nvml(self, program: str) -> Any:
        spec = importlib.util.find_spec("pynvml")
        if spec is None or spec.origin is None:
            return {"absent": "the package nvidia-ml-py is not installed there"}
        levels = 2 if spec.submodule_search_locations else 1
        where = str(Path(spec.origin).absolute().parents[levels - 1])
        command = [sys.executable, "-I", "-S", "-c", program, where]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=20)
            return json.loads(ran.stdout.strip().rpartition("\n")[2])
        except subprocess.TimeoutExpired:
            return {"absent": "the driver does not answer within 20 s"}
        except (OSError, ValueError) as e:
            return {"absent": str(e)}

    def now(self) -> float:
        """Return the time of the machine's clock, in seconds since 1970."""
        return time.time()


def look(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return {absent}, or {open, nodes}.

    request  address, and what ``Looker.facts`` is to be told
    """
    from supervisor.cluster.ray_driver import line_of, why_open

    address = request["address"]
    host, _, port = address.rpartition(":")
    if address != "auto" and (why := _unreachable(host.strip("[]"), port)) is not None:
        return {"absent": f"nothing answers at {address}: {why}"}
    try:
        import ray as package

        ray: Any = package  # its functions have no types
        ray.init(address=address, namespace="modelctl-doctor", log_to_driver=False, logging_level=logging.ERROR)
    except ModuleNotFoundError:
        return {"absent": "the package ray is not installed"}
    except Exception as e:
        return {"absent": f"the cluster {address} cannot be reached: {line_of(e)}"}
    context = ray.get_runtime_context()
    seen: dict[str, Any] = {"open": why_open(context.gcs_address), "nodes": []}
    if seen["open"] is None:
        own = context.get_node_id()
        seen["nodes"] = _nodes(ray, [node for node in ray.nodes() if node["Alive"]], own, request)
    return seen


def _nodes(ray: Any, nodes: list[dict[str, Any]], own: str, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from supervisor.cluster.ray_driver import line_of

    actor = ray.remote(num_cpus=0, max_restarts=0)(Looker)
    seen, asked = [], {}
    for node in sorted(nodes, key=lambda node: str(node.get("NodeName"))):
        about = {
            "name": node.get("NodeName") or node["NodeManagerAddress"],
            "address": node["NodeManagerAddress"],
            "gpus": node["Resources"].get("GPU", 0.0),
            "own": node["NodeID"] == own,
            "error": None,
        }
        seen.append(about)
        if not about["own"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            looker = actor.options(scheduling_strategy=there).remote()
            asked[looker.facts.remote(request)] = about, looker, node["NodeManagerPort"]
    if not asked:
        return seen
    answered, late = ray.wait([*asked], num_returns=len(asked), timeout=MACHINE_S)
    for future in answered:
        about, looker, _ = asked[future]
        try:
            about["facts"] = ray.get(future)
            about["clock_s"], about["clock_error_s"] = _clock(ray, looker)
        except Exception as e:
            about["error"] = line_of(e)
    for future in late:
        about, _, port = asked[future]
        why = _unreachable(about["address"], str(port))
        about["error"] = f"no answer within {MACHINE_S:g} s" + (f": {why}" if why else "")
    return seen


def _clock(ray: Any, looker: Any) -> tuple[float, float]:
    """Return by how many seconds a machine's clock is ahead of this one's, and by how much that may be wrong."""
    best = (0.0, float("inf"))
    for _ in range(CLOCKS):
        before = time.time()
        there = ray.get(looker.now.remote(), timeout=CONNECT_S)
        after = time.time()
        best = min(best, (there - (before + after) / 2, (after - before) / 2), key=lambda pair: pair[1])
    return best


def _unreachable(host: str, port: str) -> str | None:
    """Return why no connection can be made; None if one can."""
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError) as e:
        return getattr(e, "strerror", None) or str(e) or type(e).__name__
    return None


def main() -> None:
    """Print what is seen, as JSON in the last line."""
    from protocol.process.birth import die_with

    if not die_with(os.getppid()):
        return
    request = json.load(sys.stdin)
    request["nvml"] = Path(__file__).with_name("nvml_facts.py").read_text()
    found = look(request)
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # Ray's threads may hang


if __name__ == "__main__":
    main()
