"""A real systemd starts the service that `modelctl service install` writes, watches it, reloads it and stops it.

``make test-systemd`` runs this file. ``make test`` does not, because only root can make what it needs.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.deterministic_engine import answer
from tests.serving import ROOT, WITHIN, engine, is_alive, wait_until
from tests.systemd_box import HOME, UID, USER, Box, missing

WHY_NOT = missing()
UNIT = "modelctl.service"
MODELCTL = str(Path(sys.executable).with_name("modelctl"))
MODELS = f"{HOME}/models.yaml"
RUNTIME = {"MODELCTL_RUNTIME_DIR": "/var/lib/modelctl/supervisor"}
ENDS = "/var/lib/modelctl/ends"
"""The file into which the unit writes how each process of the service ended."""
OWN = {"XDG_RUNTIME_DIR": f"/run/user/{UID}"}
DROP_IN = f"""
[Service]
Environment=PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1
WatchdogSec=2
TimeoutAbortSec=500ms
RestartSec=100ms
ExecStopPost=/bin/sh -c 'echo $SERVICE_RESULT >>{ENDS}'
"""
USER_MANAGER = f"""
[Service]
User={USER}
Type=notify
RuntimeDirectory=user/{UID}
RuntimeDirectoryMode=0700
Delegate=yes
Environment=XDG_RUNTIME_DIR=/run/user/{UID} SYSTEMD_UNIT_PATH={HOME}/.config/systemd/user:/units
ExecStart=/lib/systemd/systemd --user --unit=box.target
"""
LETTERS = engine(step_s=0.001)

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"systemd cannot run here: {WHY_NOT}")


def write_models(box: Box, **models: dict[str, Any]) -> None:
    box.write(MODELS, yaml.safe_dump({"models": models, "supervisor": {"stop": {"drain": "20s"}}}))


def install(box: Box) -> None:
    """Install the unit of the machine, as its administrator would."""
    box.run(MODELCTL, "service", "install", "--system", "--run-as", USER, MODELS)
    box.write(f"/etc/systemd/system/{UNIT}.d/test.conf", DROP_IN)
    box.run("systemctl", "daemon-reload")


def modelctl(box: Box, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command as the user of the service."""
    return box.run(MODELCTL, *arguments, user=True, environment=RUNTIME, check=check)


def active(box: Box, state: str = "active") -> dict[str, str]:
    """Wait until the service has this state. Return what systemd says about it."""

    def reached() -> dict[str, str] | None:
        properties = ("ActiveState", "Result", "StatusText", "MainPID", "NRestarts", "ExecMainStatus")
        shown = box.show(UNIT, *properties)
        return shown if shown["ActiveState"] == state else None

    return wait_until(reached, what=f"{state}: {box.show(UNIT, 'ActiveState', 'SubState', 'StatusText')}")


def supervisor_in(box: Box) -> psutil.Process:
    """Return the supervisor's process."""
    inside = int(box.show(UNIT, "MainPID")["MainPID"])
    for process in psutil.process_iter():
        try:
            numbers = Path(f"/proc/{process.pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()
            if len(numbers) == 2 and int(numbers[1]) == inside and box.has(process):
                return process
        except OSError:
            continue
    raise AssertionError(f"no process {inside} in the box")


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    with Box({"user-manager.service": USER_MANAGER}) as made:
        write_models(made, letters=LETTERS)
        install(made)
        yield made


@pytest.fixture
def running(box: Box) -> Box:
    """Start the service anew, with one model."""
    box.run("systemctl", "stop", UNIT)
    box.run("systemctl", "reset-failed", check=False)
    write_models(box, letters=LETTERS)
    box.run("systemctl", "start", UNIT)
    return box


def test_the_unit_is_one_that_systemd_finds_nothing_wrong_with(box: Box) -> None:
    found = box.run("systemd-analyze", "verify", f"/etc/systemd/system/{UNIT}")
    assert [line for line in found.stderr.splitlines() if "nvidia-modprobe" not in line] == []
    security = box.run("systemd-analyze", "security", "--offline=true", "--no-pager", f"/etc/systemd/system/{UNIT}")
    assert float(security.stdout.rpartition("exposure level for")[2].split()[1]) < 4, security.stdout


def test_it_is_started_when_the_models_are_ready_and_says_so(box: Box) -> None:
    box.run("systemctl", "stop", UNIT)
    slow = engine("SlowLoad", load_s=1.5)
    write_models(box, letters=LETTERS, slow=slow, bad=engine("CannotLoad"))
    box.run("systemctl", "start", "--no-block", UNIT)
    wait_until(lambda: "loading: slow" in box.show(UNIT, "StatusText")["StatusText"], what="the load")
    assert box.show(UNIT, "ActiveState")["ActiveState"] == "activating"
    box.run("systemctl", "start", UNIT)  # returns when it is started
    shown = active(box)
    assert shown["StatusText"] == "2 of 3 workers ready; ready: letters, slow; failed: bad"
    said = box.run(MODELCTL, "service", "status", "--system")
    assert "system: active (running), does not start by itself" in said.stdout
    assert shown["StatusText"] in said.stdout
    assert (
        modelctl(box, "run", "letters", "hello", "--max-tokens", "5").stdout.strip() == answer("user: hello", 5).strip()
    )


def test_systemctl_reload_applies_the_file_and_fails_with_what_is_wrong(running: Box) -> None:
    write_models(running, letters=LETTERS, more=LETTERS)
    running.run("systemctl", "reload", UNIT)
    assert active(running)["StatusText"] == "2 of 2 workers ready; ready: letters, more"
    running.write(MODELS, "models: 7")
    assert running.run("systemctl", "reload", UNIT, check=False).returncode != 0
    assert active(running)["StatusText"] == "2 of 2 workers ready; ready: letters, more"
    write_models(running, letters=LETTERS)
    running.run("systemctl", "kill", "--kill-who=main", "--signal=HUP", UNIT)
    wait_until(lambda: active(running)["StatusText"] == "1 of 1 workers ready; ready: letters", what="the reload")


def test_a_stopped_supervisor_is_killed_by_the_watchdog_and_started_again(running: Box) -> None:
    before, supervisor = active(running), supervisor_in(running)
    processes = [supervisor, *supervisor.children(recursive=True)]
    assert len(processes) > 1
    supervisor.send_signal(signal.SIGSTOP)
    wait_until(lambda: running.show(UNIT, "NRestarts")["NRestarts"] != before["NRestarts"], what="the restart")
    after = active(running)
    assert after["MainPID"] != before["MainPID"]
    assert after["StatusText"] == before["StatusText"]
    assert running.read(ENDS).splitlines()[-1] == "watchdog"
    wait_until(lambda: not any(map(is_alive, processes)), what="the end of what the killed supervisor had started")


def test_a_killed_supervisor_is_started_again(running: Box) -> None:
    before = active(running)
    supervisor_in(running).kill()
    wait_until(lambda: running.show(UNIT, "NRestarts")["NRestarts"] != before["NRestarts"], what="the restart")
    assert active(running)["StatusText"] == before["StatusText"]
    assert running.read(ENDS).splitlines()[-1] == "signal"


def test_a_stop_lets_a_running_answer_finish(running: Box) -> None:
    write_models(running, letters=LETTERS, slow=engine(step_s=0.1))
    running.run("systemctl", "reload", UNIT)
    command = [MODELCTL, "run", "slow", "hello", "--max-tokens", "30"]
    with running.background(*command, environment=RUNTIME) as asking:
        wait_until(lambda: '"active": 1' in modelctl(running, "ps", "--json").stdout, what="the request")
        running.run("systemctl", "stop", UNIT)
        said, _ = asking.communicate(timeout=WITHIN)
    assert said.strip() == answer("user: hello", 30).strip()
    assert active(running, "inactive")["Result"] == "success"


def test_a_supervisor_that_was_shut_down_stays_down(running: Box) -> None:
    modelctl(running, "shutdown")
    shown = active(running, "inactive")
    assert (shown["Result"], shown["NRestarts"]) == ("success", "0")


def test_a_wrong_models_yaml_is_not_tried_again(running: Box) -> None:
    running.write(MODELS, "models: 7")
    running.run("systemctl", "restart", UNIT, check=False)
    shown = active(running, "failed")
    assert (shown["Result"], shown["ExecMainStatus"], shown["NRestarts"]) == ("exit-code", "78", "0")
    said = running.run(MODELCTL, "service", "status", "--system", check=False)
    assert said.returncode == 69
    assert "exit-code, 78 (models.yaml or the environment is not usable: `modelctl check` says why)" in said.stdout


def test_the_locks_hold_for_the_supervisor_and_its_workers(running: Box) -> None:
    supervisor = supervisor_in(running)
    for process in [supervisor, *supervisor.children(recursive=True)]:
        if not is_alive(process):
            continue
        pairs = [line.partition(":") for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()]
        status = {key: value.split() for key, _, value in pairs}
        assert status["NoNewPrivs"] == ["1"]
        assert status["Seccomp"] == ["2"]
        assert status["CapBnd"] == ["0000000000000000"]
        assert status["Uid"] == [str(UID)] * 4
        mounts = [line.split() for line in Path(f"/proc/{process.pid}/mountinfo").read_text().splitlines()]
        (root,) = [words[5] for words in mounts if words[4] == "/"]
        assert "ro" in root.split(",")
        assert any(words[4] == "/tmp" for words in mounts)


def test_what_cannot_work_is_refused_with_the_remedy(box: Box) -> None:
    box.write("/root/models.yaml", f"models: {{letters: {{model_dir: {ROOT}, engine: 'tests.x:Y', gpu: cpu}}}}")
    box.run("chmod", "600", "/root/models.yaml")
    refused = box.run(MODELCTL, "service", "install", "--system", "--run-as", USER, "/root/models.yaml", check=False)
    assert refused.returncode == 78
    assert "'/root/models.yaml' is not readable" in refused.stderr
    unknown = box.run(MODELCTL, "service", "install", "--system", "--run-as", "bob", MODELS, check=False)
    assert "useradd --system --create-home bob" in unknown.stderr
    box.write("/tmp/models.yaml", "models: {letters: {model_dir: 'demo:letters', engine: transformers, gpu: cpu}}")
    hidden = box.run(MODELCTL, "service", "install", "--system", "--run-as", USER, "/tmp/models.yaml", check=False)
    assert "is below /tmp, of which the service sees another one (PrivateTmp)" in hidden.stderr
    alone = box.run(MODELCTL, "service", "install", "--user", MODELS, user=True, check=False)
    assert "log in as this user" in alone.stderr


def test_a_service_of_a_user_runs_under_that_users_manager(box: Box) -> None:
    write_models(box, letters=LETTERS)
    box.run("systemctl", "start", "user-manager.service")
    manager = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env", *(f"{k}={v}" for k, v in
               OWN.items()), "systemctl", "--user")  # fmt: skip
    said = box.run(MODELCTL, "service", "install", "--user", MODELS, user=True, environment=OWN)
    assert "loginctl enable-linger" in said.stdout
    drop_in = f"{HOME}/.config/systemd/user/{UNIT}.d/test.conf"
    box.write(drop_in, DROP_IN)
    box.run(*manager, "daemon-reload")
    box.run(*manager, "enable", "--now", UNIT)
    shown = box.show(UNIT, "ActiveState", "StatusText", "UnitFileState", manager=manager)
    assert shown["ActiveState"] == "active"
    assert shown["UnitFileState"] == "enabled"
    assert "letters" in box.run(MODELCTL, "ps", user=True, environment=OWN).stdout
    box.run(*manager, "reload", UNIT)
    assert "user: active (running), starts by itself" in box.run(
        MODELCTL, "service", "status", "--user", user=True, environment=OWN
    ).stdout  # fmt: skip
    removed = box.run(MODELCTL, "service", "uninstall", "--user", user=True, environment=OWN)
    assert "removed" in removed.stdout
    assert box.run(MODELCTL, "ps", user=True, environment=OWN, check=False).returncode == 69


def test_uninstall_stops_and_removes(running: Box) -> None:
    running.run(MODELCTL, "service", "uninstall", "--system")
    assert running.show(UNIT, "ActiveState")["ActiveState"] == "inactive"
    assert "not installed" in running.run(MODELCTL, "service", "status", "--system", check=False).stdout
    assert os.listdir(f"/proc/{running.first.pid}/root/etc/systemd/system") == [f"{UNIT}.d"]
