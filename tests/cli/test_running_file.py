"""Commands use the models.yaml of the running supervisor, unless the command line or the directory has another one."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.programs import modelctl
from tests.keyed import Keyed
from tests.serving import engine, wait_until

OTHER = "models:\n  other: {model_dir: demo:letters, engine: transformers}\n"


@pytest.fixture(scope="module")
def keyed() -> Iterator[Keyed]:
    with Keyed(
        {"letters": engine(aliases=["gpt-4o"]), "stories": engine(autostart=False)}, {"laptop": "infer"}
    ) as keyed:
        yield keyed


@pytest.fixture
def around(keyed: Keyed, tmp_path: Path) -> dict[str, str]:
    """Return variables of an environment in which only the running supervisor has a models.yaml."""
    (tmp_path / "home").mkdir()
    (tmp_path / "empty").mkdir()
    return {
        "MODELCTL_RUNTIME_DIR": str(keyed.serving.runtime_dir), "MODELCTL_CONFIG": "",
        "XDG_CONFIG_HOME": str(tmp_path / "home"), "HOME": str(tmp_path / "home"),
    }  # fmt: skip


def test_in_a_directory_without_one(keyed: Keyed, around: dict[str, str], tmp_path: Path) -> None:
    config, empty = keyed.serving.config, tmp_path / "empty"
    assert f"{config}: fine; models: letters, stories" in modelctl("check", cwd=empty, **around).stdout
    settings = json.loads(modelctl("config", "--json", cwd=empty, **around).stdout)["settings"]
    assert settings[0] | {"origin": ""} == {
        "key": "--config", "value": str(config), "origin": "", "source": None, "line": 0,
    }  # fmt: skip
    assert "letters" in modelctl("plan", cwd=empty, **around).stdout
    assert f"models.yaml: {config}: letters" in modelctl("doctor", cwd=empty, **around).stdout
    assert "already running" in modelctl("serve", cwd=empty, **around).stderr
    made = modelctl("keys", "new", "ann", "--http", "--models", "leters", cwd=empty, **around)
    assert f"{config} has no model 'leters' (did you mean 'letters'?)" in made.stderr
    assert "ann" in [entry["name"] for entry in keyed.store.entries()]
    alone = around | {"MODELCTL_RUNTIME_DIR": str(tmp_path / "none")}
    done = modelctl("check", cwd=empty, **alone)
    assert (done.returncode, "no supervisor runs here" in done.stderr) == (78, True)


def test_in_a_directory_with_another_one(keyed: Keyed, around: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(OTHER)
    for command in ("check", "config", "plan"):
        shown = modelctl(command, cwd=tmp_path, **around).stdout
        assert "other" in shown, "the file that is edited here"
        assert "stories" not in shown
        shown = modelctl(command, "-c", keyed.serving.config, cwd=tmp_path, **around).stdout
        assert "stories" in shown
    assert modelctl("keys", "new", "bob", "--http", cwd=tmp_path, **around).returncode == 0
    assert "bob" in [entry["name"] for entry in keyed.store.entries()], "the supervisor sees the key"
    assert modelctl("keys", "new", "eve", "--http", "-c", "models.yaml", cwd=tmp_path, **around).returncode == 0
    assert "eve" not in [entry["name"] for entry in keyed.store.entries()]


def test_completion_knows_its_models(keyed: Keyed, around: dict[str, str], tmp_path: Path) -> None:
    def offered(words: str, directory: str) -> list[str]:
        count = str(len(words.split(" ")) - 1)
        asked = {"_MODELCTL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": count}
        done = modelctl(cwd=tmp_path / directory, **around, **asked)
        return [line.removeprefix("plain,") for line in done.stdout.split()]

    (tmp_path / "models.yaml").write_text(OTHER)
    names = ["letters", "gpt-4o", "stories"]
    for directory in ("empty", "."):
        # On a busy machine the supervisor may need longer than the second that the shell waits.
        wait_until(lambda here=directory: offered("modelctl run ", here) == names, what="its models")
    wait_until(lambda: offered("modelctl stop st", "empty") == ["stories"], what="its models that begin like this")
    assert offered("modelctl config ", "empty") == ["letters", "stories", "gpt-4o"]
    assert offered("modelctl config ", ".") == ["other"], "the command is about this file"
    assert offered(f"modelctl run --runtime-dir {tmp_path}/none ", ".") == ["other"]


def test_a_supervisor_that_hangs_makes_no_command_hang(keyed: Keyed, around: dict[str, str], tmp_path: Path) -> None:
    os.kill(keyed.serving.pid, signal.SIGSTOP)
    try:
        done = modelctl("check", cwd=tmp_path / "empty", **around)
    finally:
        os.kill(keyed.serving.pid, signal.SIGCONT)
    assert (done.returncode, "models.yaml: not found" in done.stderr) == (78, True)
