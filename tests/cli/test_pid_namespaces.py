"""Commands work if the supervisor and they live in different PID namespaces, such as a container's and the host's.

A pid in a message or a file is then a number of another namespace: it names no process here, or a wrong one.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.programs import MODELCTL
from tests.conftest import Serve
from tests.serving import WITHIN, engine

ENTER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Run a program as process 1 of a new namespace."""
if os.getuid() != 0:
    ENTER[1:1] = ["--user", "--map-current-user"]
pytestmark = pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*ENTER, "true"], capture_output=True).returncode != 0,
    reason="this user may not make a PID namespace",
)


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """Return a program that runs the supervisor in a PID namespace of its own."""
    script = tmp_path / "inside.py"
    script.write_text(f"import os, sys\nos.execvp('unshare', {[*ENTER, *MODELCTL]!r} + sys.argv[1:])\n")
    return script


def test_shutdown_of_a_supervisor_in_a_namespace_below(serve: Serve, inside: Path) -> None:
    """Its pid there is 1. Process 1 here never ends."""
    serving = serve({"a": engine()}, script=inside)
    assert serving.overview()["supervisor"]["pid"] == 1
    done = serving.modelctl("shutdown", "--json")
    assert (done.returncode, done.stderr, json.loads(done.stdout)) == (0, "", {"pid": 1})
    assert not [process for process in serving.processes() if process.cmdline()[:1] == [sys.executable]]
    serving.process.wait(WITHIN)


def test_shutdown_from_a_namespace_below(serve: Serve) -> None:
    """The supervisor's pid does not exist there."""
    serving = serve({"a": engine()})
    done = subprocess.run(
        [*ENTER, *MODELCTL, "shutdown", "--runtime-dir", serving.runtime_dir],
        env=serving.environment, cwd=serving.directory, capture_output=True, text=True, timeout=WITHIN,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    serving.process.wait(WITHIN)
