"""What ps, top and nvidia-smi call our processes.

Three more are seen where they are started: the model-directory reader (test_placement), the constraint child
(test_shapes_served) and the builder (test_exllamav2_load_extension).
"""

from pathlib import Path

import psutil

from supervisor.workers.orphans import MARK
from tests.conftest import Serve
from tests.nvml_box import Box
from tests.serving import Serving, engine, wait_until


def titles(serving: Serving) -> list[str]:
    """The command lines of its processes but its own and those that Python itself starts. Each process is found by a
    mark in its environment."""
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
        "modelctl: worker a",
        f"modelctl: worker {longest}",
        "modelctl: worker pair:1",
        "modelctl: worker pair:2",
    ]
    wait_until(lambda: titles(serving) == expected, what="the names of all processes")
    pid = serving.status("a")["pid"]
    assert Path(f"/proc/{pid}/comm").read_text() == "modelctl: worke\n", "which has room for 15 characters"


def test_a_title_leaves_the_environment_to_be_seen(serve: Serve) -> None:
    """The mark in it tells the next supervisor whose processes these are."""
    serving = serve({"a": engine()})
    guard = serving.guard()
    assert guard is not None
    for pid in (serving.status("a")["pid"], guard.pid):
        assert f"{MARK}=" in Path(f"/proc/{pid}/environ").read_text()
