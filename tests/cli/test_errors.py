"""A command that fails prints one line on stderr (one object with --json), and no traceback. Its exit code is
documented."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cli.programs import MODELCTL, environment, modelctl
from tests.conftest import Serve
from tests.serving import Serving, engine

HOMELESS = "import pwd\ndef unknown(uid): raise KeyError(uid)\npwd.getpwuid = unknown"
NO_HOME: dict[str, str | None] = dict.fromkeys(
    ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "MODELCTL_CONFIG", "MODELCTL_RUNTIME_DIR")
)
FAULTY = "import modelctl.cli.views as v\ndef broken(*_, **__): raise TypeError('odd')\nv.connect = broken"


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    models = {"a": engine(), "broken": engine("CannotLoad", autostart=False)}
    with Serving(models) as serving:
        yield serving


def only_line(done: "subprocess.CompletedProcess[str]") -> str:
    (line,) = done.stderr.splitlines()
    return line


def test_a_runtime_directory_too_long_for_a_socket(tmp_path: Path) -> None:
    for command in (["ps"], ["start", "a"], ["run", "a", "hi"], ["shutdown"]):
        done = modelctl(*command, "--runtime-dir", tmp_path / ("x" * 120))
        assert (done.returncode, done.stdout) == (78, ""), command
        assert "a Unix socket takes at most" in only_line(done)


def test_a_user_without_a_home(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"models": {"a": engine()}}))
    done = modelctl("check", prelude=HOMELESS, cwd=tmp_path, **NO_HOME)
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "empty").mkdir()
    done = modelctl("check", prelude=HOMELESS, cwd=tmp_path / "empty", **NO_HOME)
    assert done.returncode == 78
    assert "not found (looked for models.yaml, and no supervisor runs here)" in only_line(done)
    done = modelctl("logs", "nosuch", prelude=HOMELESS, cwd=tmp_path, **NO_HOME)
    assert done.returncode == 1
    assert "no log at" in only_line(done)


def test_the_users_own_models_yaml_is_found(tmp_path: Path) -> None:
    (tmp_path / ".config" / "modelctl").mkdir(parents=True)
    (tmp_path / ".config" / "modelctl" / "models.yaml").write_text(yaml.safe_dump({"models": {"a": engine()}}))
    (tmp_path / "empty").mkdir()
    done = modelctl("check", cwd=tmp_path / "empty", **{**NO_HOME, "HOME": str(tmp_path)})
    assert done.returncode == 0
    assert str(tmp_path / ".config") in done.stdout


@pytest.mark.parametrize("command", ["serve", "check", "plan"])
def test_a_models_yaml_that_is_missing(tmp_path: Path, command: str) -> None:
    done = modelctl(command, "missing.yaml", cwd=tmp_path)
    assert done.returncode == 78
    assert "missing.yaml: there is no such file: name a models.yaml, or let `modelctl init` write one" in only_line(
        done
    )


@pytest.mark.long
def test_a_model_that_waits_for_its_next_start_is_told_with_the_reason(serve: Serve) -> None:
    serving = serve({"crash": engine("CrashesInLoad")}, wait=False)
    serving.wait_state("crash", "backoff")
    done = serving.modelctl("run", "crash", "hi")
    assert done.returncode == 1
    assert "crash: backoff: OSError: the disk hiccupped\n" in done.stderr
    assert "model 'crash' failed: OSError: the disk hiccupped; mend that, then `modelctl start crash`" in done.stderr


def test_no_standard_input(serving: Serving) -> None:
    where = ("--runtime-dir", serving.runtime_dir)
    for arguments in (["run", "a"], ["run", "a", "-"], ["run", "a", "--json"]):
        done = modelctl(*arguments, *where, redirect="<&-")
        assert done.returncode == 2, arguments
        assert "standard input is closed: give a PROMPT" in done.stderr
        assert "Traceback" not in done.stderr
    done = modelctl("run", "a", "hi", "--max-tokens", "3", *where, redirect="<&-")
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 4, "")


def test_no_standard_output_and_no_standard_error(serving: Serving) -> None:
    where = ("--runtime-dir", serving.runtime_dir)
    for redirect, characters in ((">&-", 0), ("2>&-", 4), (">&- 2>&-", 0), ("<&- >&- 2>&-", 0)):
        done = modelctl("run", "a", "hi", "--max-tokens", "3", *where, redirect=redirect)
        assert (done.returncode, done.stderr, len(done.stdout)) == (0, "", characters), redirect
    done = modelctl("ps", "--runtime-dir", serving.directory / "none", redirect="2>&-")
    assert (done.returncode, done.stdout) == (69, ""), "an error is no output"


@pytest.mark.parametrize("arguments", [["ps"], ["status", "--json"], ["run", "a", "hi", "--max-tokens", "2"], ["-h"]])
def test_a_full_disk(serving: Serving, arguments: list[str]) -> None:
    done = modelctl(*arguments, redirect=">/dev/full", MODELCTL_RUNTIME_DIR=str(serving.runtime_dir))
    assert done.returncode == 78
    said = "standard output: No space left on device"
    assert only_line(done) in (f"modelctl: {said}", json.dumps({"error": {"name": "not_usable", "message": said}}))


def test_a_full_disk_for_errors(serving: Serving) -> None:
    done = modelctl("start", "nosuch", "--runtime-dir", serving.runtime_dir, redirect="2>/dev/full")
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("arguments", [["status"], ["ps", "--json"], ["run", "a", "hi"], ["logs"], ["--help"]])
def test_a_reader_that_has_left(serving: Serving, arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*MODELCTL, *arguments],
            env=environment(MODELCTL_RUNTIME_DIR=str(serving.runtime_dir)),
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_socket_that_is_a_directory(away: Path) -> None:
    config = away / "models.yaml"
    config.write_text(yaml.safe_dump({"models": {"a": engine()}}))
    (away / "r").mkdir(mode=0o700)
    (away / "r" / "front").mkdir()
    for options in ([], ["--detach"]):
        done = modelctl("serve", "-c", config, "--runtime-dir", away / "r", *options)
        assert done.returncode == 78
        assert str(away / "r" / "front") in only_line(done)


def test_a_fault_of_modelctl() -> None:
    done = modelctl("ps", prelude=FAULTY, MODELCTL_DEBUG=None)
    assert done.returncode == 70
    assert "a fault of modelctl itself: TypeError: odd; with $MODELCTL_DEBUG=1" in only_line(done)
    done = modelctl("ps", "--json", prelude=FAULTY, MODELCTL_DEBUG=None)
    assert done.returncode == 70
    assert json.loads(only_line(done))["error"]["name"] == "fault"
    done = modelctl("ps", prelude=FAULTY, MODELCTL_DEBUG="1")
    assert done.returncode == 70
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1] == "modelctl: a fault of modelctl itself: TypeError: odd"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "name", "code", "says"),
    [
        (["status", "nosuch"], 1, "model_not_found", 300, "no model 'nosuch' is configured"),
        (["start", "nosuch"], 1, "model_not_found", 300, "no model 'nosuch' is configured"),
        (["start", "broken"], 1, "not_ready", None, "the moon is made of cheese"),
        (["run", "a", "hi", "--max-tokens", "0"], 1, "invalid_request", 102, "max_tokens is 0"),
        (["logs", "nosuch"], 1, "no_log", None, "no log at"),
        (["ps", "--nonsense"], 2, "usage", None, "--nonsense"),
        (["ps", "--runtime-dir", "/tmp/none"], 69, "connection_lost", 600, "no supervisor is running"),
        (["ps", "--runtime-dir", "/tmp/" + "x" * 120], 78, "not_usable", None, "a Unix socket takes at most"),
    ],
)
def test_errors_as_json(
    serving: Serving, arguments: list[str], exit_code: int, name: str, code: int | None, says: str
) -> None:
    done = modelctl(*arguments, "--json", MODELCTL_RUNTIME_DIR=str(serving.runtime_dir))
    assert done.returncode == exit_code
    error = json.loads(only_line(done))["error"]
    assert (error["name"], error.get("code")) == (name, code)
    assert says in error["message"]


def test_a_prompt_is_no_option(serving: Serving) -> None:
    done = modelctl("run", "a", "--max-tokens", "0", "--", "--json", MODELCTL_RUNTIME_DIR=str(serving.runtime_dir))
    assert done.returncode == 1
    assert only_line(done).startswith("modelctl: invalid_request")
