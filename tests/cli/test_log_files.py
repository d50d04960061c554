"""Logs survive being moved and full disks, and only their owner can read them."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cli.programs import MODELCTL, environment, modelctl
from tests.conftest import Serve
from tests.serving import Serving, engine, wait_until

FULL = Path("/dev/full")
"""A device on which every write fails as on a full disk."""


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def log_of(serving: Serving, name: str = "supervisor") -> Path:
    return serving.runtime_dir / "logs" / f"{name}.log"


@pytest.fixture
def tiny_disk(away: Path) -> Iterator[Path]:
    """Mount a file system of 256 KiB."""
    disk = away / "disk"
    disk.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk]).returncode:
        pytest.skip("mounting a tmpfs takes root and CAP_SYS_ADMIN")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as file:
        while os.statvfs(disk).f_bavail:
            file.write(bytes(4096))


@pytest.mark.parametrize("how", ["moved", "removed", "removed with its directory"])
def test_the_supervisor_s_log_goes_on_under_its_name(serve: Serve, how: str) -> None:
    serving = serve({"a": engine()})
    log = log_of(serving)
    if how == "moved":
        log.rename(log.with_name("kept"))
    elif how == "removed":
        log.unlink()
    else:
        shutil.rmtree(log.parent)
    serving.order("stop", model="a")
    serving.wait_state("a", "stopped")
    wait_until(lambda: "a: stopp" in serving.log(), what="lines in the new log")
    assert mode(log) == 0o600
    assert serving.overview()["supervisor"]["log_trouble"] is None


def test_a_worker_s_log_goes_on_under_its_name(serve: Serve) -> None:
    serving = serve({"a": engine()})
    log = log_of(serving, "a")
    log.rename(log.with_name("kept"))
    worker = serving.worker("a")
    output = Path(f"/proc/{worker.pid}/fd/2")  # the new file is there a moment before the worker writes to it
    wait_until(lambda: log.exists() and output.samefile(log), what="a new log")
    worker.send_signal(signal.SIGUSR1)  # the worker then writes its stacks
    wait_until(lambda: "most recent call first" in serving.log("a"), what="stacks in the new log")
    assert mode(log) == 0o600


def test_a_full_disk_is_said_by_serve_ps_and_status(away: Path) -> None:
    config = away / "models.yaml"
    config.write_text(yaml.safe_dump({"models": {"a": engine()}}))
    runtime_dir = away / "r"
    (runtime_dir / "logs").mkdir(mode=0o700, parents=True)
    runtime_dir.chmod(0o700)
    log = runtime_dir / "logs" / "supervisor.log"
    log.symlink_to(FULL)
    said = f"the log {log} cannot be written: No space left on device"
    started = modelctl("serve", "--detach", "-c", config, "--runtime-dir", runtime_dir)
    assert started.returncode == 0, started.stderr
    try:
        assert said in started.stderr
        for command in ("ps", "status"):
            assert said in modelctl(command, "--runtime-dir", runtime_dir).stderr
        log.unlink()  # now the disk has room again
        modelctl("stop", "a", "--runtime-dir", runtime_dir)
        assert "(No space left on device)" in log.read_text()
        assert said not in modelctl("ps", "--runtime-dir", runtime_dir).stderr
    finally:
        modelctl("shutdown", "--runtime-dir", runtime_dir)


def test_a_full_disk_is_said_once_in_the_foreground(serve: Serve) -> None:
    serving = serve({"a": engine()})
    log = log_of(serving)
    log.unlink()
    log.symlink_to(FULL)
    said = f"WARNING the log {log} cannot be written: No space left on device; lines lost: 1"
    serving.order("stop", model="a")
    serving.wait_state("a", "stopped")
    wait_until(lambda: said in serving.stderr(), what="a word about the disk")
    assert serving.stderr().count(said) == 1
    assert "a: stopp" in serving.stderr()


def test_a_full_runtime_directory_is_named(tiny_disk: Path) -> None:
    config = tiny_disk.parent / "models.yaml"
    config.write_text(yaml.safe_dump({"models": {"a": engine()}}))
    runtime_dir = tiny_disk / "r"
    runtime_dir.mkdir(mode=0o700)
    fill(tiny_disk)
    started = subprocess.run(
        [*MODELCTL, "serve", "-c", config, "--runtime-dir", runtime_dir],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert started.returncode == 78
    (line,) = started.stderr.splitlines()
    assert f"cannot write {runtime_dir / 'lock'}: No space left on device" in line
    assert "--runtime-dir" in line


@pytest.mark.parametrize("here", ["JST-9", "PST8"])
def test_since_does_not_depend_on_the_readers_time_zone(serve: Serve, here: str) -> None:
    """Local times without an offset showed all lines in the west of the supervisor, and none in its east."""
    serving = serve({"a": engine()}, environment={"TZ": "UTC0"})
    serving.environment["TZ"] = here
    for name in ("a", "supervisor"):
        before = serving.log(name)
        told = serving.modelctl("logs", name, "--since", "15m").stdout
        new = serving.modelctl("logs", name, "--since", "0s").stdout
        after = serving.log(name)  # a supervisor that has just become ready may still write a line
        assert told.startswith(before)
        assert after.startswith(told)
        assert new in after.removeprefix(before)


def test_logs_says_that_the_disk_is_full(tiny_disk: Path) -> None:
    logs = tiny_disk / "logs"
    logs.mkdir()
    (logs / "supervisor.log").touch()
    assert modelctl("logs", "--runtime-dir", tiny_disk).stderr == ""
    fill(tiny_disk)
    said = f"modelctl: the disk of {logs / 'supervisor.log'} is full: lines may be lost\n"
    assert modelctl("logs", "--runtime-dir", tiny_disk).stderr == said


def test_only_their_owner_can_read_what_a_supervisor_writes(away: Path) -> None:
    config = away / "models.yaml"
    config.write_text(yaml.safe_dump({"models": {"a": engine()}}))
    runtime_dir = away / "r"
    log = runtime_dir / "logs" / "supervisor.log"
    log.parent.mkdir(parents=True)
    runtime_dir.chmod(0o700)
    log.write_bytes(b"x" * 1024 + b"\n" * (8 << 20))  # larger than a log may be: the first line rotates it
    log.chmod(0o644)
    (runtime_dir / "workers.json.new").touch(mode=0o644)  # as left by a supervisor that was killed while writing
    script = "import os; os.umask(0)\nfrom modelctl.cli import main\nraise SystemExit(main())"
    started = subprocess.run(
        [MODELCTL[0], "-c", script, "serve", "--detach", "-c", config, "--runtime-dir", runtime_dir],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    try:
        assert started.returncode == 0, started.stderr
        assert log.with_name("supervisor.log.1").exists()
        files = [path for path in runtime_dir.rglob("*") if path.is_file() and path.name != "supervisor.log.1"]
        assert {"workers.json", "supervisor.log", "a.log", "lock"} <= {path.name for path in files}
        assert {path.name: oct(mode(path)) for path in files if mode(path) != 0o600} == {}
    finally:
        modelctl("shutdown", "--runtime-dir", runtime_dir)
