"""serve sees to ExLlamaV2's CUDA code before it spawns anything. A stand-in for the package is compiled."""

import os
import subprocess
from pathlib import Path

import pytest

from protocol import Client
from tests.cli.programs import MODELCTL
from tests.engines.test_exllamav2_load_extension import Box, pytestmark  # noqa: F401  (skips where nothing compiles)

MODELS = """
models:
  llama: {{model_dir: 'demo:letters', engine: {engine}, gpu: 0, autostart: false}}
"""


def serve(box: Box, directory: Path, engine: str) -> "subprocess.CompletedProcess[str]":
    file, run = directory / "models.yaml", directory / "run"
    file.write_text(MODELS.format(engine=engine))
    environment = box.environment | {"XDG_STATE_HOME": str(directory)}
    common = {"env": environment, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run([*MODELCTL, "serve", "--detach", "-c", file, "--runtime-dir", run], **common)  # type: ignore[call-overload]
    try:
        with Client(runtime_dir=run) as client:
            assert client.status()["models"][0]["state"] == "stopped"
    finally:
        subprocess.run([*MODELCTL, "shutdown", "--now", "--runtime-dir", run], check=True, **common)  # type: ignore[call-overload]
    return done  # type: ignore[no-any-return]


@pytest.fixture
def box(tmp_path: Path) -> Box:
    (tmp_path / "box").mkdir()
    return Box(tmp_path / "box")


def test_it_is_compiled_before_the_supervisor_starts_and_once(box: Box, tmp_path: Path) -> None:
    first = serve(box, tmp_path, "exllamav2")
    assert first.returncode == 0, first.stderr
    assert "compiling ExLlamaV2's CUDA code: 3 of 3" in first.stderr.splitlines()
    compiled = box.compiled()
    assert compiled
    again = serve(box, tmp_path, "exllamav2")
    assert "compiling" not in again.stderr
    assert box.compiled() == compiled


def test_a_failure_is_said_once_and_the_others_are_served(box: Box, tmp_path: Path) -> None:
    box.source.write_text("this is no C++")
    done = serve(box, tmp_path, "exllamav2")
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if "not compiled" in line]
    assert "its models will not load" in line
    assert str(os.path.dirname(box.build)) in line  # where the log is


def test_without_a_model_that_needs_it_nothing_is_compiled(box: Box, tmp_path: Path) -> None:
    assert serve(box, tmp_path, "transformers").returncode == 0
    assert not box.runs.exists()
