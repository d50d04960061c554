"""Schema-driven fuzzing of the gateway by schemathesis, with real workers. ``make test-fuzz-http`` runs this file.

Every endpoint of /openapi.json gets valid and invalid requests for SECONDS seconds. No answer may be a 500, break the
document, or hold a traceback. ``benchmarks.http_fuzzing`` does the same for longer, and keeps the figures.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from typing import Any

import psutil

from tests.gateway.asking import described
from tests.keyed import free_port
from tests.serving import Serving, engine, wait_until

SECONDS = int(os.environ.get("FUZZ_SECONDS", "60"))
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI document, changed so that every request names the served model and has no deadline.

    With a random name the gateway would check nothing else of a request, and /readyz answers 503. A deadline of a
    millisecond gives a 504.
    """
    del document["paths"]["/readyz"]["get"]["parameters"]
    for path in document["paths"].values():
        if "post" in path:
            properties = path["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
            properties["model"] = {"enum": ["m"]}
            for name in ("queue_ms", "ttft_ms", "deadline_ms"):
                properties.pop(name, None)
    return document


@dataclass(frozen=True)
class Fuzzed:
    """What a run found.

    output       schemathesis's report
    passed       whether every answer passed its checks
    requests     requests that were sent
    log          the gateway's log
    restarts     how often the supervisor had to start the gateway again
    grown_bytes  how much the gateway's memory grew
    """

    output: str
    passed: bool
    requests: int
    log: str
    restarts: int
    grown_bytes: int


def fuzz(seconds: int, seed: str) -> Fuzzed:
    """Send requests to a gateway for so many seconds. Return once no request is left in the engine."""
    port = free_port()
    with Serving({"m": engine(step_s=0.0)}, gateway={"listen": port, "auth": "none"}) as serving:
        wait_until(lambda: described(serving)["ready"])
        url = f"http://127.0.0.1:{port}"
        schema = serving.directory / "openapi.json"
        with urllib.request.urlopen(f"{url}/openapi.json") as answer:
            schema.write_text(json.dumps(narrowed(json.load(answer))))
        before = described(serving)
        gateway = psutil.Process(before["pids"][0])
        memory = gateway.memory_info().rss
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", str(schema), "--url", url, "--checks", CHECKS,
            "--seed", seed, "--max-time", str(seconds), "--max-examples", "1000000", "--request-timeout", "30",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=serving.directory, capture_output=True, text=True, timeout=seconds + 240)
        serving.wait_idle("m")
        counted = re.search(r"(\d+) generated", done.stdout)
        return Fuzzed(
            done.stdout[-8000:] + done.stderr[-2000:],
            done.returncode == 0,
            int(counted[1]) if counted else 0,
            serving.log("gateway"),
            described(serving)["restarts"] - before["restarts"],
            gateway.memory_info().rss - memory,
        )


def test_no_request_breaks_the_gateway() -> None:
    seed = os.environ.get("FUZZ_SEED", str(int.from_bytes(os.urandom(4), "big")))
    print(f"FUZZ_SEED={seed}")
    fuzzed = fuzz(SECONDS, seed)
    print(fuzzed.output)
    assert fuzzed.passed
    assert fuzzed.requests
    assert "Traceback" not in fuzzed.log, fuzzed.log[-4000:]
    assert fuzzed.restarts == 0
