"""``examples/asking.py`` works with the shipped models as its text says."""

import subprocess
import sys

import pytest

from tests.serving import ROOT, Serving

pytestmark = pytest.mark.long


def test_the_example_runs() -> None:
    models = {
        name: {"model_dir": f"demo:{name}", "engine": "transformers", "gpu": "cpu", "max_batch_size": 32}
        for name in ("letters", "stories")
    }
    # a load imports torch, which takes long if the files are not in the page cache
    with Serving(models, wait=False) as serving:
        for name in models:
            serving.wait_state(name, "ready", within=90)
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "asking.py")],
            env={**serving.environment, "MODELCTL_RUNTIME_DIR": str(serving.runtime_dir)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("stream", "several_answers", "one_of", "how_far_it_is", "tokens", "from_threads"):
        assert f"--- {part}\n" in done.stdout
    assert "Progress(phase='prefill'" in done.stdout
