"""The shell completes commands, options and the names of models."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.programs import MODELCTL, modelctl

FILE = """\
models:
  stories: {model_dir: ., engine: transformers}
  llama-8b: {model_dir: ., aliases: [gpt-4o-mini, small]}
  secret: {model_dir: ., listed: false, aliases: [quiet]}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "models.yaml").write_text(FILE)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "modelctl"
    program.write_text(f'#!/bin/sh\nexec {" ".join(map(str, MODELCTL))} "$@"\n')
    program.chmod(0o755)
    return tmp_path


def completed(home: Path, *words: str) -> list[str]:
    """Return what a real bash offers for the last word."""
    script = f"""
        eval "$(modelctl completion bash)"
        COMP_WORDS=({" ".join(f"'{word}'" for word in ("modelctl", *words))}); COMP_CWORD={len(words)}
        _modelctl_completion modelctl
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = os.environ | {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "MODELCTL_CONFIG": ""}
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=home,
        env=environment | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.split())


@pytest.mark.long
def test_bash_completes_commands_options_and_models(home: Path) -> None:
    assert completed(home, "res") == ["restart"]
    assert completed(home, "ps", "--wa") == ["--watch"]
    assert completed(home, "stop", "") == ["gpt-4o-mini", "llama-8b", "small", "stories"]
    assert completed(home, "stop", "stories", "s") == ["small"]
    for command in ("run", "status", "logs", "events", "restart", "start", "reload", "bench"):
        assert completed(home, command, "st") == ["stories"], command


@pytest.mark.parametrize("text", ["", "models: [", "models: 5", "models: {a: {aliases: 7}}", "[]"])
def test_a_file_that_cannot_be_read_offers_nothing(home: Path, text: str) -> None:
    (home / "models.yaml").write_text(text)
    assert completed(home, "stop", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_of_all_shells(shell: str, tmp_path: Path) -> None:
    done = modelctl("completion", shell)
    assert done.returncode == 0
    assert "_MODELCTL_COMPLETE" in done.stdout
    if shutil.which(shell):
        (tmp_path / "script").write_text(done.stdout)
        checked = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True, timeout=60)
        assert checked.returncode == 0, checked.stderr


def test_other_shells_are_refused() -> None:
    done = modelctl("completion", "tcsh")
    assert done.returncode == 2
    assert "'bash', 'zsh', 'fish'" in done.stderr
