"""The npm package openai under Node reaches the demo models over HTTP.

``make test-clients`` installs the package and runs this file. ``make test`` does not, because it needs Node and npm.
"""

import json
import subprocess

from tests.gateway.running import Gateway
from tests.serving import ROOT, WITHIN, Serving, engine
from tools.demo_models.corpus import STORIES_TEST_REQUESTS

PACKAGES = ROOT / ".venv" / "node"


def test_the_npm_package_gets_the_computed_answers() -> None:
    story, told = STORIES_TEST_REQUESTS[1]
    models = {
        "stories": {"model_dir": "demo:stories", "engine": "transformers", "gpu": "cpu"},
        "endless": engine(context=100_000),
    }
    with Serving(models) as serving, Gateway(serving) as gateway:
        done = subprocess.run(
            ["node", str(ROOT / "tests/npm_client.mjs"), gateway.url, str(PACKAGES)],
            input=json.dumps({"story": story}),
            capture_output=True,
            text=True,
            timeout=WITHIN,
        )
        assert done.returncode == 0, done.stderr
        got = json.loads(done.stdout)
        serving.wait_idle("endless")
    assert sorted(got["models"]) == ["endless", "stories"]
    assert got["whole"] == got["streamed"] == got["helped"] == told
    assert got["chunks"] > 10
    assert got["usage"]["completion_tokens"] > 10
    assert isinstance(got["shaped"]["yes"], bool)
    assert len(got["first"]) == 1
    error = got["error"]
    assert (error["kind"], error["status"], error["param"]) == ("BadRequestError", 400, "temperature")
    assert error["id"].startswith("req_")
