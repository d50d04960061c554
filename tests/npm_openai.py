"""The npm package openai under Node reaches the demo models over HTTP, and calls tools.

``make test-clients`` installs the package and runs this file. ``make test`` does not, because it needs Node and npm.
"""

import json
import subprocess

from tests.gateway.running import Gateway
from tests.replaying_engine import CITY, TOOLS
from tests.serving import ROOT, WITHIN, Serving, engine
from tools.demo_models.corpus import STORIES_TEST_REQUESTS

PACKAGES = ROOT / ".venv" / "node"


def test_the_npm_package_gets_the_computed_answers() -> None:
    story, told = STORIES_TEST_REQUESTS[1]
    models = {
        "stories": {"model_dir": "demo:stories", "engine": "transformers", "gpu": "cpu"},
        "endless": engine(context=100_000),
        "replaying": {"model_dir": ".", "engine": "tests.replaying_engine:ReplayingEngine", "options": {"size": 2}},
    }
    with Serving(models) as serving, Gateway(serving) as gateway:
        done = subprocess.run(
            ["node", str(ROOT / "tests/npm_client.mjs"), gateway.url, str(PACKAGES)],
            input=json.dumps({"story": story, "tools": TOOLS}),
            capture_output=True,
            text=True,
            timeout=WITHIN,
        )
        assert done.returncode == 0, done.stderr
        got = json.loads(done.stdout)
        serving.wait_idle("endless")
    assert sorted(got["models"]) == ["endless", "replaying", "stories"]
    assert got["whole"] == got["streamed"] == got["helped"] == told
    assert got["chunks"] > 10
    assert got["usage"]["completion_tokens"] > 10
    assert isinstance(got["shaped"]["yes"], bool)
    assert len(got["first"]) == 1
    spoken = {"content": "Let me see.", "calls": [["get_weather", CITY]], "finish_reason": "tool_calls"}
    assert got["called"] == got["deltas"] == {"reasoning": "The user wants weather."} | spoken
    assert got["final"] == spoken
    assert (got["ran"], got["after"]) == ([["get_weather", CITY]], "Hello there.")
    error = got["error"]
    assert (error["kind"], error["status"], error["param"]) == ("BadRequestError", 400, "temperature")
    assert error["id"].startswith("req_")
