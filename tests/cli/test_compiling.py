"""serve compiles ExLlamaV2's CUDA code before it spawns anything. These tests compile a stand-in for the package."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from modelctl import Client
from tests.cli.programs import MODELCTL, Terminal
from tests.engines.test_exllamav2_load_extension import Box, pytestmark  # noqa: F401  (skips where nothing compiles)
from tests.serving import marked_processes, wait_until

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


@pytest.mark.long
def test_it_is_compiled_before_the_supervisor_starts_and_once(box: Box, tmp_path: Path) -> None:
    first = serve(box, tmp_path, "exllamav2")
    assert first.returncode == 0, first.stderr
    assert "compiling ExLlamaV2's CUDA code: 3 of 3" in first.stderr.splitlines()
    compiled = box.compiled()
    assert compiled
    again = serve(box, tmp_path, "exllamav2")
    assert "compiling" not in again.stderr
    assert box.compiled() == compiled


@pytest.mark.long
def test_a_failure_is_said_once_and_the_others_are_served(box: Box, tmp_path: Path) -> None:
    box.source.write_text("this is no C++")
    done = serve(box, tmp_path, "exllamav2")
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if "not compiled" in line]
    assert "its models will not load" in line
    assert str(os.path.dirname(box.build)) in line  # the log is in this directory


def test_without_a_model_that_needs_it_nothing_is_compiled(box: Box, tmp_path: Path) -> None:
    assert serve(box, tmp_path, "transformers").returncode == 0
    assert not box.runs.exists()


def foreground(box: Box, directory: Path) -> tuple[str, ...]:
    """Return the arguments of a ``serve`` that has code to compile. Its compilers wait at the closed gate."""
    file = directory / "models.yaml"
    file.write_text(MODELS.format(engine="exllamav2"))
    box.gate.touch()
    return "serve", "-c", str(file), "--runtime-dir", str(directory / "run")


def all_is_over(box: Box) -> None:
    """Check that no process of the build is left and the lock is free. The closed gate lets no compiler end itself."""
    wait_until(lambda: not marked_processes("COMPILER_GATE", str(box.gate)), what="the end of builder and compilers")
    with (box.build / "modelctl.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_build_ends_with_serve(box: Box, tmp_path: Path, number: int) -> None:
    serving = subprocess.Popen([*MODELCTL, *foreground(box, tmp_path)], env=box.environment, start_new_session=True)
    try:
        box.wait_for_compilers()
        serving.send_signal(number)
        assert serving.wait(60) == -number
        all_is_over(box)
    finally:
        box.gate.unlink()
        serving.kill()
        serving.wait()


@pytest.mark.long
def test_in_a_terminal(box: Box, tmp_path: Path) -> None:
    arguments = foreground(box, tmp_path)
    try:
        with Terminal(*arguments, environment=box.environment) as terminal:
            terminal.wait_for_match(r"compiling ExLlamaV2's CUDA code  \d\.\d s\n")
            box.wait_for_compilers()
            terminal.type("\x03")
            assert terminal.wait_for_exit() == 130
            all_is_over(box)
    finally:
        box.gate.unlink()


def test_what_lies_in_the_directory_is_not_imported(box: Box, tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    for name in ("torch", "json"):
        (away / f"{name}.py").write_text("raise SystemExit('somebody else has put this here')")
    arguments = foreground(box, tmp_path)
    script = "import sys; sys.path[:1] = []\nfrom modelctl.cli import main\nraise SystemExit(main())"
    serving = subprocess.Popen([sys.executable, "-c", script, *arguments], env=box.environment, cwd=away)
    try:
        box.wait_for_compilers()
    finally:
        serving.kill()
        serving.wait()
        box.gate.unlink()
