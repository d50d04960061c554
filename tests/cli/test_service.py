"""`modelctl service` writes a unit with the paths of this environment, and refuses what cannot work here.

``tests/under_systemd.py`` runs the unit under a real systemd.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from modelctl.cli import service as commands
from modelctl.cli.service import MARK, ServiceScope, Unit, quoted
from supervisor.config.server import StopConfig

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy" / "systemd"
MODELS = "models: {letters: {model_dir: 'demo:letters', engine: transformers, gpu: cpu}}\n"


def service(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "supervisor", "service", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(directory), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def shown(scope: ServiceScope) -> Unit:
    """Return the unit that deploy/systemd shows."""
    user = "modelctl" if scope is ServiceScope.SYSTEM else ""
    config = "/etc/modelctl/models.yaml" if scope is ServiceScope.SYSTEM else "/home/ann/serving/models.yaml"
    command = "/opt/modelctl/bin/modelctl" if scope is ServiceScope.SYSTEM else "/home/ann/modelctl-env/bin/modelctl"
    return Unit(scope, [command], Path(config), StopConfig(), user)


@pytest.mark.parametrize("scope", list(ServiceScope))
def test_the_files_in_deploy_are_what_it_writes(scope: ServiceScope) -> None:
    name = "modelctl.service" if scope is ServiceScope.SYSTEM else "modelctl-user.service"
    assert (DEPLOY / name).read_text() == shown(scope).text()


def test_the_time_to_stop_follows_models_yaml() -> None:
    usual = shown(ServiceScope.SYSTEM)
    assert f"\nTimeoutStopSec={usual.stop_s}\n" in usual.text()
    assert usual.stop_s > 30 + 5 + 2
    longer = Unit(ServiceScope.USER, usual.command, usual.config, StopConfig(drain=300.0))
    assert longer.stop_s == usual.stop_s + 270


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/opt/modelctl/bin/modelctl", "/opt/modelctl/bin/modelctl"),
        ("/home/ann/my models/x.yaml", '"/home/ann/my models/x.yaml"'),
        ("/home/ann/100%/$x", "/home/ann/100%%/$$x"),
        ('a"b\\c', '"a\\"b\\\\c"'),
        ("a;b", '"a;b"'),
        ("", '""'),
    ],
)
def test_words_of_a_command_line_are_quoted(word: str, expected: str) -> None:
    assert quoted(word) == expected


def test_a_line_break_in_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="has a line break, which a systemd unit cannot hold: rename it"):
        quoted("/home/ann/two\nlines.yaml")


def test_a_dry_run_shows_the_unit_with_the_paths_of_this_environment(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(MODELS + "supervisor: {stop: {drain: 2m}}\n")
    done = service(tmp_path, "install", "--user", "--dry-run")
    assert done.stdout.startswith(MARK)
    assert f"serve {tmp_path}/models.yaml\n" in done.stdout
    assert f"ExecStart={Path(sys.executable).parent}/" in done.stdout
    assert "TimeoutStopSec=150\n" in done.stdout
    assert f"this would be written to {tmp_path}/.config/systemd/user/modelctl.service" in done.stderr
    assert not (tmp_path / ".config").exists()


def test_install_and_uninstall_say_what_they_did_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for systemctl takes the orders, since systemd may not run here."""
    orders: list[tuple[str, ...]] = []

    def systemctl(scope: ServiceScope, *arguments: str) -> subprocess.CompletedProcess[str]:
        orders.append((str(scope), *arguments))
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(commands, "systemctl", systemctl)
    monkeypatch.setattr(commands, "obstacles", lambda unit, force: [])
    path, models = tmp_path / ".config/systemd/user/modelctl.service", tmp_path / "models.yaml"
    models.write_text(MODELS)

    def told(*arguments: str) -> dict[str, Any]:
        done = CliRunner().invoke(commands.service, [*arguments, "--user", "--json"])
        found: dict[str, Any] = json.loads(done.stdout)
        assert (found["scope"], found["path"]) == ("user", str(path))
        return found

    assert (told("install", str(models), "--dry-run")["written"], path.exists()) == (False, False)
    assert not any("daemon-reload" in order for order in orders)
    installed = told("install", str(models))
    assert (installed["written"], installed["unit"], installed["models"]) == (True, path.read_text(), str(models))
    assert "systemctl --user enable --now modelctl" in installed["next"]
    assert (told("uninstall", "--dry-run")["removed"], path.exists()) == (False, True)
    assert (told("uninstall")["removed"], path.exists()) == (True, False)
    assert ("user", "disable", "--now", "modelctl.service") in orders


def test_a_wrong_models_yaml_is_refused_with_its_lines(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("models: 7\n")
    done = service(tmp_path, "install", "--user", "--dry-run")
    assert done.returncode == 78
    assert "models.yaml:1: models: is 7" in done.stderr
    assert done.stdout == ""


def test_a_manager_that_cannot_be_reached_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)
    done = service(tmp_path, "install", "--user", XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 78
    said = "log in as this user" if Path("/run/systemd/system").is_dir() else "was not started by systemd"
    assert said in done.stderr
    assert not (tmp_path / ".config").exists()


def test_a_unit_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)
    unit = tmp_path / ".config" / "systemd" / "user" / "modelctl.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    refused = service(tmp_path, "install", "--user")
    assert refused.returncode == 78
    assert f"{unit} was not written by this command, and is left as it is: move it away, or give --force" in (
        refused.stderr
    )
    assert "was not written by" not in service(tmp_path, "install", "--user", "--force", "--dry-run").stderr
    kept = service(tmp_path, "uninstall", "--user")
    assert kept.returncode == 78
    assert "remove it yourself" in kept.stderr
    assert unit.exists()


def test_what_is_not_installed_cannot_be_removed(tmp_path: Path) -> None:
    done = service(tmp_path, "uninstall", "--user")
    assert done.returncode == 69
    assert "`modelctl service status` shows what is installed" in done.stderr


def test_a_machine_without_systemctl_is_told_what_to_do(tmp_path: Path) -> None:
    done = service(tmp_path, "status", PATH=str(tmp_path))
    assert done.returncode == 78
    assert "let the machine's own service manager run `modelctl serve`" in done.stderr


def test_run_as_is_for_the_machines_service(tmp_path: Path) -> None:
    done = service(tmp_path, "install", "--user", "--run-as", "ann")
    assert done.returncode == 2
    assert "--run-as is for --system" in done.stderr


def test_a_user_that_does_not_exist_is_named(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)
    done = service(tmp_path, "install", "--system", "--run-as", "no-such-user", "--dry-run")
    assert done.returncode == 78
    assert "--run-as no-such-user: there is no such user: `useradd --system --create-home no-such-user`" in done.stderr
