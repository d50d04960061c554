"""A command that a message suggests works as printed, and reaches the supervisor that the message is about."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from modelctl.cli.root import _ANYWHERE, ALIASES, cli
from tests.cli.programs import modelctl
from tests.keyed import Keyed
from tests.serving import Serving, engine

MODELS = {"a": engine(), "off": engine(autostart=False)}


def hints(text: str) -> list[str]:
    return re.findall(r"`(modelctl [^`]*)`", text)


def typed(hint: str) -> "subprocess.CompletedProcess[str]":
    """Run the command of a hint as a shell would."""
    program, *arguments = shlex.split(hint)
    assert program == "modelctl"
    return modelctl(*arguments)


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(MODELS, runtime_name="run of $mine") as serving:
        yield serving


def test_the_hint_of_serve_ends_that_supervisor_and_no_other(away: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELCTL_RUNTIME_DIR", str(away / "usual"))
    (away / "models.yaml").write_text(yaml.safe_dump({"models": {"a": engine(autostart=False)}}))
    usual = modelctl("serve", "-d", "-c", away / "models.yaml")
    assert hints(usual.stderr) == ["modelctl shutdown"], usual.stderr
    try:
        started = modelctl("serve", "-d", "-c", away / "models.yaml", "--runtime-dir", away / "r")
        (hint,) = hints(started.stderr)
        assert typed(hint).returncode == 0
        assert modelctl("ps", "--runtime-dir", away / "r").returncode == 69
        assert modelctl("ps").returncode == 0, "the other one goes on"
    finally:
        modelctl("shutdown", "--now")


def test_a_relative_directory_is_told_whole(away: Path) -> None:
    (away / "models.yaml").write_text(yaml.safe_dump({"models": {"a": engine(autostart=False)}}))
    started = modelctl("serve", "-d", "--runtime-dir", "r", cwd=away)
    assert hints(started.stderr) == [f"modelctl shutdown --runtime-dir {away / 'r'}"]


@pytest.mark.long
def test_errors_of_the_supervisor_and_of_the_client_say_what_to_type(serving: Serving) -> None:
    where = shlex.quote(str(serving.runtime_dir))
    done = modelctl("run", "off", "hi", "--runtime-dir", serving.runtime_dir)
    assert hints(done.stderr) == [f"modelctl start off --runtime-dir {where}"]
    reported = modelctl("run", "off", "hi", "--runtime-dir", serving.runtime_dir, "--json")
    assert hints(json.loads(reported.stderr)["error"]["message"]) == hints(done.stderr)
    assert typed(hints(done.stderr)[0]).returncode == 0
    assert modelctl("stop", "off", "--runtime-dir", serving.runtime_dir).returncode == 0
    done = modelctl("serve", serving.config, "--runtime-dir", serving.runtime_dir)
    assert done.returncode == 75
    assert hints(done.stderr) == [f"modelctl shutdown --runtime-dir {where}"]
    nobody = serving.directory / "no body"
    for command in (["ps"], ["start", "a"], ["run", "a", "hi"]):
        done = modelctl(*command, "--runtime-dir", nobody)
        assert hints(done.stderr) == [f"modelctl serve --runtime-dir '{nobody}'"], command


def test_what_the_environment_says_is_not_repeated(serving: Serving) -> None:
    assert hints(serving.modelctl("run", "off", "hi").stderr) == ["modelctl start off"]
    done = modelctl("ps", MODELCTL_RUNTIME_DIR=str(serving.directory / "nobody"))
    assert hints(done.stderr) == ["modelctl serve"]


def test_a_supervisor_elsewhere_is_reached_with_its_endpoint_and_key() -> None:
    with Keyed(MODELS, {"boss": "infer,status,admin"}) as keyed:
        file = keyed.file("boss")
        done = modelctl("run", "off", "hi", "--connect", keyed.endpoint, "--key-file", file)
        (hint,) = hints(done.stderr)
        assert hint == f"modelctl start off --connect {keyed.endpoint} --key-file {file}"
        assert typed(hint).returncode == 0
        given = {"MODELCTL_CONNECT": keyed.endpoint, "MODELCTL_KEY_FILE": str(file)}
        assert modelctl("stop", "off", **given).returncode == 0
        assert hints(modelctl("run", "off", "hi", **given).stderr) == ["modelctl start off"]
        keyed.serving.order("shutdown", now=True)
        keyed.serving.process.wait(60)
    done = modelctl("ps", "--connect", keyed.endpoint, "--key-file", file)
    assert done.returncode != 0
    assert "--runtime-dir" not in done.stderr


def test_keys_are_made_for_the_file_that_is_meant(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    listening = {"listen": "tcp://127.0.0.1:5571", "keys": "keys"}
    file.write_text(yaml.safe_dump({"models": {"a": engine()}, "supervisor": listening}))
    done = modelctl("check", file)
    (hint,) = hints(done.stderr)
    assert hint == f"modelctl keys new NAME --config {file}"
    made = typed(hint.replace("NAME", f"x --out {tmp_path / 'x.key'}"))
    assert made.returncode == 0, made.stderr
    assert modelctl("check", file).returncode == 0


def test_hints_know_the_commands_that_reach_other_machines() -> None:
    context = click.Context(cli)
    reaching = {
        name
        for name in (*cli.list_commands(context), *ALIASES)
        if (command := cli.get_command(context, name)) is not None
        and any("--connect" in option.opts for option in command.params)
    }
    assert reaching == _ANYWHERE
