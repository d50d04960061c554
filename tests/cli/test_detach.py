"""serve --detach starts a supervisor that keeps running in the right directory, and reports one that ends early."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelctl import Client
from tests.cli.programs import MODELCTL, environment, modelctl
from tests.keyed import free_port
from tests.serving import ROOT, engine, wait_until


def configure(directory: Path, models: dict[str, Any]) -> Path:
    config = directory / "models.yaml"
    config.write_text(yaml.safe_dump({"models": models}))
    return config


def begin_to_serve(directory: Path) -> "tuple[subprocess.Popen[str], int]":
    """Start ``serve --detach`` with a model that loads slowly. Return it, and its supervisor's pid, while the model
    loads."""
    config = configure(directory, {"a": engine("SlowLoad")})
    starting = subprocess.Popen(
        [*MODELCTL, "serve", "--detach", "-c", str(config), "--runtime-dir", str(directory / "r")],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert starting.stderr is not None
    while "a: loading" not in (line := starting.stderr.readline()):
        assert line, "the command has ended"
    with Client(runtime_dir=directory / "r") as client:
        return starting, client.status()["supervisor"]["pid"]


def test_the_directory_it_was_started_in_can_go(away: Path) -> None:
    configure(away, {"a": {**engine(), "engine": "my_engine:Mine"}, "b": engine(autostart=False)})
    project = away / "project"
    project.mkdir()
    (project / "my_engine.py").write_text("from tests.deterministic_engine import DeterministicEngine as Mine\n")
    # python -m finds my_engine in its directory, and finds tests by a relative path
    started = subprocess.run(
        [*MODELCTL, "serve", "--detach", "-c", "../models.yaml", "--runtime-dir", "../r"],
        cwd=project,
        env=environment(PYTHONPATH=os.path.relpath(ROOT, project)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert started.returncode == 0, started.stderr
    shutil.rmtree(project)
    done = modelctl("start", "b", "--runtime-dir", away / "r")
    assert done.returncode == 0, done.stderr
    pid = json.loads(modelctl("status", "--json", "--runtime-dir", away / "r").stdout)["supervisor"]["pid"]
    assert os.readlink(f"/proc/{pid}/cwd") == "/"


def test_relative_directories_in_the_environment(away: Path) -> None:
    configure(away, {"a": engine(autostart=False)})
    started = modelctl(
        "serve", "--detach", cwd=away, XDG_RUNTIME_DIR=".", XDG_STATE_HOME="s", MODELCTL_RUNTIME_DIR=None
    )
    try:
        assert started.returncode == 0, started.stderr
        assert (away / "s" / "modelctl" / "logs" / "supervisor.log").exists()
    finally:
        modelctl("shutdown", cwd=away, XDG_RUNTIME_DIR=".", MODELCTL_RUNTIME_DIR=None)


def test_what_lies_in_the_directory_is_not_imported(away: Path) -> None:
    """The console script imports no modules from the current directory, and its supervisor must not do so either."""
    config = configure(away, {"a": engine(autostart=False)})
    (away / "supervisor.py").write_text("raise SystemExit('somebody else has put this here')")
    script = "import sys; sys.path[:1] = []\nfrom modelctl.cli import main\nraise SystemExit(main())"
    started = subprocess.run(
        [MODELCTL[0], "-c", script, "serve", "--detach", "-c", str(config), "--runtime-dir", str(away / "r")],
        cwd=away,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert started.returncode == 0, started.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 70), (signal.SIGTERM, 69)])
def test_one_that_ends_before_its_models_are_up(away: Path, number: int, code: int) -> None:
    starting, supervisor = begin_to_serve(away)
    os.kill(supervisor, number)
    _, said = starting.communicate(timeout=60)
    assert starting.returncode == code
    assert "modelctl: the supervisor ended with code" in said.splitlines()[-1]
    assert str(away / "r" / "logs" / "supervisor.log") in said
    assert "Traceback" not in said


def test_it_goes_on_when_the_wait_for_it_is_interrupted(away: Path) -> None:
    starting, supervisor = begin_to_serve(away)
    starting.send_signal(signal.SIGINT)
    _, said = starting.communicate(timeout=60)
    assert starting.returncode == 130
    message = f"modelctl: interrupted; the supervisor (pid {supervisor}) goes on, "
    message += f"`modelctl shutdown --runtime-dir {away / 'r'}` ends it"
    assert said.splitlines() == [message]
    with Client(runtime_dir=away / "r") as client:
        assert client.status("a")["models"][0]["state"] == "loading"


SLOW = """
import sys, time
if "-q" in sys.orig_argv:  # the supervisor, not the command
    while time.process_time() < 3:
        pass
"""
STUCK = """
import signal, sys
if "-q" in sys.orig_argv:
    signal.pause()
"""


def serve_after(away: Path, what: str) -> "subprocess.CompletedProcess[str]":
    """Run ``serve --detach`` with a supervisor that first runs ``what``. A stall is reported after a second, and lines
    about the wait are two seconds apart."""
    config = configure(away, {"a": engine(autostart=False)})
    (away / "sitecustomize.py").write_text(what)
    return modelctl(
        *("serve", "--detach", "-c", config, "--runtime-dir", away / "r"),
        prelude="import modelctl.cli.serve\nmodelctl.cli.serve.STALLED_S = 1.0\n"
        "import supervisor.config.spelling\nsupervisor.config.spelling.PHASE_EVERY_S = 2.0",
        PYTHONPATH=f"{away}{os.pathsep}{ROOT}",
    )


def test_a_supervisor_that_is_slow_is_waited_for_while_it_computes(away: Path) -> None:
    started = serve_after(away, SLOW)
    assert started.returncode == 0, started.stderr
    first, *_ = started.stderr.splitlines()
    assert re.fullmatch(r"modelctl: supervisor pid [0-9]+ starts \(for [0-9]+ s\)", first)


def test_a_supervisor_that_does_nothing_is_given_up_and_killed(away: Path) -> None:
    started = serve_after(away, STUCK)
    assert started.returncode == 70
    assert started.stderr == f"modelctl: the supervisor does not answer; see {away / 'r' / 'logs' / 'supervisor.log'}\n"


LATE = """
import os, sys, time
if "-q" in sys.orig_argv and not os.path.exists({first!r}):
    open({first!r}, "w").close()
    while not os.path.exists({gone!r}):
        time.sleep(0.01)
"""


def test_a_supervisor_takes_the_place_of_one_that_answered_first(away: Path) -> None:
    """The command found another supervisor, and waited for the end of its own, which then took that place."""
    config, runtime_dir = configure(away, {"a": engine(autostart=False)}), away / "r"
    arguments = ("serve", "--detach", "-c", config, "--runtime-dir", runtime_dir)
    assert modelctl(*arguments).returncode == 0
    first, gone = away / "first", away / "gone"
    (away / "sitecustomize.py").write_text(LATE.format(first=str(first), gone=str(gone)))
    with subprocess.Popen(
        [*MODELCTL, *map(str, arguments)],
        env=environment(PYTHONPATH=f"{away}{os.pathsep}{ROOT}"),
        stderr=subprocess.PIPE,
        text=True,
    ) as starting:
        try:
            wait_until(first.exists, what="the second supervisor")
            assert modelctl("shutdown", "--runtime-dir", runtime_dir).returncode == 0
            gone.touch()
            _, said = starting.communicate(timeout=60)
        finally:
            starting.kill()
    assert starting.returncode == 0, said
    assert f"serves {config}" in said


@pytest.mark.parametrize("lazy", [False, True])
def test_the_command_that_a_start_shows_works(tmp_path: Path, lazy: bool) -> None:
    port, place = free_port(), tmp_path / "r"
    config = tmp_path / "models.yaml"
    entry = {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu", "lazy": lazy}
    models = {"gateway": {"listen": f"127.0.0.1:{port}", "auth": "none"}, "models": {"letters": entry}}
    config.write_text(yaml.safe_dump(models))
    try:
        started = modelctl("serve", "--detach", "-c", config, "--runtime-dir", place)
        assert started.returncode == 0, started.stderr
        (command,) = re.findall("^try: (.*)$", started.stderr, re.MULTILINE)
        asked = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60)
        assert json.loads(asked.stdout)["choices"][0]["finish_reason"] in ("stop", "length"), asked
        log = modelctl("logs", "--runtime-dir", place)
        wait_until(lambda: command in modelctl("logs", "--runtime-dir", place).stdout, what=log.stdout)
    finally:
        modelctl("shutdown", "--runtime-dir", place)
