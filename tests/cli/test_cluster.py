"""``modelctl cluster`` shows the machines of a cluster, in a table that fits, and says what is wrong."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click import unstyle

from modelctl.cli.tables import columns_of
from modelctl.cli.views import NO_CLUSTER, cluster_text, described
from tests.hidden_packages import Hidden
from tests.keyed import free_port
from tests.serving import Serving, engine, wait_until
from tests.system.test_troubles import told

NO_RAY = "the package ray is not installed: pip install 'modelctl[ray]'"


def node(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "node_id": "f" * 56, "name": name, "address": "10.0.0.7", "gpus": 8.0, "free": 5.0, "own": False, "labels": {},
        "version": "0.1.0", "heard_s": 0.2,
    } | fields  # fmt: skip


def worker(name: str, node: str | None, state: str = "ready", reason: str | None = None) -> dict[str, Any]:
    return {"name": name, "model": name.partition(":")[0], "node": node, "state": state, "reason": reason}


def status(**fields: Any) -> dict[str, Any]:
    cluster = {
        "ray": "auto", "advertise": "tcp://10.0.0.5:5571", "model_store": None, "trouble": None, "answered_s": 0.3,
        "nodes": [node("desk", own=True, gpus=0.0, free=0.0, heard_s=None, version=None), node("big-box")],
        "gone": [{"name": "old-box", "address": "10.0.0.9", "gpus": 2.0, "gone_s": 200.0}],
    } | fields  # fmt: skip
    models = [
        worker("llama-8b:1", "big-box"), worker("llama-8b:2", "big-box"), worker("llama-8b:3", "big-box", "loading"),
        worker("llama-8b:4", "auto", "starting", "no other machine has 1 GPUs free"), worker("letters", None),
    ]  # fmt: skip
    return {"supervisor": {"cluster": cluster}, "models": models}


def rows(text: str) -> dict[str, str]:
    return {line.split()[0]: line for line in text.splitlines() if line}


def test_each_machine_has_its_workers() -> None:
    found = described(status())
    assert found is not None
    assert [[each["name"] for each in node["workers"]] for node in found["nodes"]] == [
        ["letters"], ["llama-8b:1", "llama-8b:2", "llama-8b:3"],
    ]  # fmt: skip
    assert found["waiting"] == [
        {"name": "llama-8b:4", "node": "auto", "reason": "no other machine has 1 GPUs free"}
    ]  # fmt: skip
    shown = rows(unstyle(cluster_text(found, None)))
    assert shown["NODE"].split() == ["NODE", "STATE", "ADDRESS", "GPUS", "LEASED", "VERSION", "HEARD", "WORKERS"]
    assert shown["desk"].split() == [
        "desk",
        "(here)",
        "there",
        "10.0.0.7",
        "0",
        "0",
        "-",
        "-",
        "letters:",
        "1",
        "ready",
    ]
    assert shown["big-box"].endswith("8       3  0.1.0    0.2 s  llama-8b: 2 ready, 1 loading")
    assert "gone for 3 min 20 s" in shown["old-box"]
    assert shown["llama-8b:4"] == "llama-8b:4 waits: no other machine has 1 GPUs free"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"trouble": NO_RAY, "nodes": []}, f"cannot be used: {NO_RAY}"),
        ({"answered_s": None, "nodes": []}, "it has not answered yet"),
        ({"answered_s": 75.0}, "Ray has not answered for 1 min 15 s"),
    ],
)
def test_what_is_wrong_stands_above(fields: dict[str, Any], says: str) -> None:
    first, second, *_ = cluster_text(described(status(**fields)), None).splitlines()
    assert first == "Ray cluster auto; workers on other machines connect to tcp://10.0.0.5:5571"
    assert second.startswith(says)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_it_fits_a_terminal(width: int) -> None:
    lines = unstyle(cluster_text(described(status(gone=[])), width)).splitlines()
    assert max(map(columns_of, lines)) <= width
    assert any(line.startswith("big-box") for line in lines)


def test_without_a_cluster(serving_alone: Serving) -> None:
    done = serving_alone.modelctl("cluster")
    assert (done.returncode, done.stdout) == (0, NO_CLUSTER + "\n")
    assert json.loads(serving_alone.modelctl("cluster", "--json").stdout) is None


@pytest.fixture(scope="module")
def serving_alone() -> Iterator[Serving]:
    with Serving({"a": engine(autostart=False)}) as serving:
        yield serving


def test_without_a_supervisor(tmp_path: Path, serving_alone: Serving) -> None:
    assert serving_alone.modelctl("cluster", "--runtime-dir", str(tmp_path)).returncode == 69


def test_a_port_for_machines_that_is_taken_is_opened_when_it_is_free(tmp_path: Path) -> None:
    hidden = Hidden(tmp_path, "ray")
    models = {"far": engine() | {"node": "big-box"}, "near": engine()}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        section = {"ray": "127.0.0.1:1", "advertise": endpoint}
        with Serving(models, cluster=section, environment={"PYTHONPATH": hidden.python_path}, wait=False) as serving:
            serving.wait_state("near", "ready")
            says = f"cannot listen on {endpoint} (cluster.advertise): Address already in use"
            told(serving, "cluster", says, "cluster")
            wait_until(lambda: serving.status("far")["reason"].startswith(says), 20)
            taken.close()
            wait_until(lambda: serving.status("far")["reason"] == NO_RAY, 20, "the next trouble, with the port open")


def test_a_cluster_that_cannot_be_used(tmp_path: Path) -> None:
    """The helper has no package ray. A worker on another machine waits, and the one of this machine serves."""
    hidden = Hidden(tmp_path, "ray")
    models = {"far": engine() | {"node": "big-box"}, "near": engine()}
    section = {"ray": "127.0.0.1:1", "advertise": f"tcp://127.0.0.1:{free_port()}"}
    with Serving(models, cluster=section, environment={"PYTHONPATH": hidden.python_path}, wait=False) as serving:
        serving.wait_state("near", "ready")
        told(serving, "cluster", NO_RAY, "cluster")
        wait_until(lambda: serving.status("far")["reason"] == NO_RAY, 20)
        done = serving.modelctl("cluster")
        assert done.returncode == 0
        assert f"cannot be used: {NO_RAY}" in done.stdout
        assert f"far waits: {NO_RAY}" in done.stdout
        found = json.loads(serving.modelctl("cluster", "--json").stdout)
        assert (found["nodes"], found["gone"], found["answered_s"]) == ([], [], None)
        assert found["waiting"] == [{"name": "far", "node": "big-box", "reason": NO_RAY}]
