"""``modelctl doctor`` on this machine: with and without a supervisor, and with faults that it must name."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.programs import modelctl
from tests.keyed import free_port
from tests.serving import Serving, engine, wait_until


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving({"a": engine(), "broken": engine("CannotLoad", autostart=False)}) as serving:
        yield serving


def findings(*arguments: object, code: int, **variables: str) -> dict[str, list[dict[str, Any]]]:
    """Return what the doctor found, by the thing that it is about."""
    done = modelctl("doctor", "--json", *arguments, **variables)
    assert done.returncode == code, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is (code == 0)
    found: dict[str, list[dict[str, Any]]] = {}
    for each in report["findings"]:
        assert bool(each["remedy"]) is (each["verdict"] != "ok"), each
        found.setdefault(each["what"], []).append(each)
    return found


@pytest.mark.long
def test_a_machine_without_models(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"  # another program may listen on the port of the file
    found = findings(
        "--runtime-dir", tmp_path / "r", code=0,
        XDG_CONFIG_HOME=str(tmp_path), MODELCTL_CONFIG="", MODELCTL_GATEWAY__LISTEN=address,
    )  # fmt: skip
    assert found["gateway"][0]["says"] == f"{address} is free"
    assert {"Python", "descriptors", "memory", "/dev/shm", "logs", "driver", "supervisor"} <= found.keys()
    assert not (tmp_path / "r").exists(), "nothing is made"


def test_a_supervisor_with_a_model_that_answers(serving: Serving) -> None:
    found = findings(serving.config, "--runtime-dir", serving.runtime_dir, code=0)
    assert found["test generation"][0]["says"].startswith("a: 4 tokens in")
    assert str(serving.pid) in found["supervisor"][0]["says"]
    assert found["models.yaml"][0]["verdict"] == found["permissions"][0]["verdict"] == "ok"


@pytest.mark.long
def test_a_model_that_failed_is_named_with_its_reason(serving: Serving) -> None:
    serving.modelctl("start", "broken")
    wait_until(lambda: serving.status("broken")["state"] == "failed")
    found = findings(serving.config, "--runtime-dir", serving.runtime_dir, code=1)
    (broken,) = found["model broken"]
    assert "made of cheese" in broken["says"]
    assert broken["remedy"] == "see `modelctl events broken`"


@pytest.mark.long
def test_faults_of_the_file_and_a_port_that_is_taken(tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "models.yaml"
    file.write_text(
        f"gateway: {{listen: '127.0.0.1:{port}'}}\n"
        "models: {a: {engine: exllamav2, model_dir: /nowhere, gpu: cpu, tll: 5}}\n"
    )
    with socket.create_server(("127.0.0.1", port)):
        done = modelctl("doctor", file, "--runtime-dir", tmp_path / "r")
    assert done.returncode == 1
    assert "another program listens there" in done.stdout
    assert "gateway.listen" in done.stdout
    assert "tll" in done.stdout
    assert "\x1b" not in done.stdout, "no colours in a pipe"


@pytest.mark.long
def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: [")
    found = findings(file, "--runtime-dir", tmp_path / "r", code=1)
    assert found["models.yaml"][0]["verdict"] == "bad"
