"""Schema-driven fuzzing of the gateway by schemathesis, with real workers. ``make test-fuzz-http`` runs this file.

Every endpoint of /openapi.json gets valid and invalid requests for SECONDS seconds. No answer may be a 500, break the
document, or hold a traceback.
"""

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

from tests.keyed import free_port
from tests.serving import Serving, engine, wait_until

SECONDS = int(os.environ.get("FUZZ_SECONDS", "60"))
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI document, changed so that every request names the served model and has no deadline.

    With a random name the gateway would check nothing else of a request. A deadline of a millisecond gives a 504.
    """
    for path in document["paths"].values():
        if "post" in path:
            properties = path["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
            properties["model"] = {"enum": ["m"]}
            for name in ("queue_ms", "ttft_ms", "deadline_ms"):
                properties.pop(name, None)
    return document


def test_no_request_breaks_the_gateway() -> None:
    port = free_port()
    seed = os.environ.get("FUZZ_SEED", str(int.from_bytes(os.urandom(4), "big")))
    print(f"FUZZ_SEED={seed}")
    with Serving({"m": engine(step_s=0.0)}, gateway={"listen": port, "auth": "none"}) as serving:
        wait_until(lambda: serving.overview()["supervisor"]["gateway"]["problem"] is None)
        url = f"http://127.0.0.1:{port}"
        schema = serving.directory / "openapi.json"
        with urllib.request.urlopen(f"{url}/openapi.json") as answer:
            schema.write_text(json.dumps(narrowed(json.load(answer))))
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", str(schema), "--url", url, "--checks", CHECKS,
            "--seed", seed, "--max-time", str(SECONDS), "--max-examples", "1000000", "--request-timeout", "30",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=serving.directory, capture_output=True, text=True, timeout=SECONDS + 240)
        print(done.stdout[-8000:], done.stderr[-2000:])
        assert done.returncode == 0
        log = serving.log("gateway")
        assert "Traceback" not in log, log[-4000:]
        serving.wait_idle("m")
