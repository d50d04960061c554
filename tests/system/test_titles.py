"""The processes of modelctl have clear titles in ps, top and nvidia-smi.

Other tests check three more titles: the model-directory reader (test_placement), the constraint helper
(test_shapes_served) and the builder (test_exllamav2_load_extension).
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from supervisor.workers.orphans import MARK
from tests.conftest import Serve
from tests.nvml_box import Box
from tests.serving import ROOT, Serving, engine, wait_until


def titles(serving: Serving) -> list[str]:
    """Return the command lines of the supervisor's processes, without its own and those that Python itself starts.
    A mark in the environment identifies each process."""
    found = []
    for process in serving.processes():
        try:
            line = " ".join(process.cmdline()).strip()
        except psutil.NoSuchProcess:
            continue
        if process.pid != serving.pid and "resource_tracker" not in line:
            found.append(line)
    return sorted(found)


def test_workers_and_helpers_are_named(serve: Serve, box: Box) -> None:
    longest = "m" * 64
    serving = serve({"a": engine(gpu=0), "pair": engine(replicas=2), longest: engine()})
    with serving.client() as client:
        client.complete("a", messages=[{"role": "user", "content": "hello"}], max_tokens=3)
    expected = [
        "modelctl: NVML reader",
        "modelctl: guard",
        "modelctl: template child",
        "modelctl: usage writer",
        "modelctl: worker a",
        f"modelctl: worker {longest}",
        "modelctl: worker pair:1",
        "modelctl: worker pair:2",
    ]
    wait_until(lambda: titles(serving) == expected, what="the names of all processes")
    pid = serving.status("a")["pid"]
    assert Path(f"/proc/{pid}/comm").read_text() == "modelctl: worke\n", "which has room for 15 characters"


def test_a_title_leaves_the_environment_to_be_seen(serve: Serve) -> None:
    """A mark in the environment tells the next supervisor that these processes are orphans."""
    serving = serve({"a": engine()})
    guard = serving.guard()
    assert guard is not None
    for pid in (serving.status("a")["pid"], guard.pid):
        assert f"{MARK}=" in Path(f"/proc/{pid}/environ").read_text()


TITLED = """
from pathlib import Path
from protocol.process.birth import set_title

set_title("spare agent (transformers)")
for name in "cmdline", "environ":
    print(repr(Path(f"/proc/self/{name}").read_text()))
"""


@pytest.mark.parametrize("where", ["first", "last", "nowhere"])
def test_a_process_of_ray_gets_a_title(where: str) -> None:
    """Ray sets SPT_NOENV for its processes, in no certain order. setproctitle finds the command line in front of the
    first variable only while that one was not replaced."""
    rays, other = {"SPT_NOENV": "1"}, {**os.environ, "PYTHONPATH": str(ROOT), MARK: "x"}
    other.pop("SPT_NOENV", None)
    environment = {"first": rays | other, "last": other | rays, "nowhere": other}[where]
    done = subprocess.run([sys.executable, "-c", TITLED], env=environment, capture_output=True, text=True, check=True)
    title, seen = done.stdout.splitlines()
    assert title.startswith("'modelctl: spare agent (transformers)")
    assert f"{MARK}=x" in seen
