"""Where a systemd unit goes on this machine, how systemd is asked, and what keeps a unit from working here."""

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from supervisor.cli.config_file import user_directory
from supervisor.cli.service_unit import MARK, NAME, Scope, Unit

SYSTEM_UNITS: Final = Path("/etc/systemd/system")
OWN_USER: Final = "modelctl"
"""The user who runs a unit of the system if nobody else is named, and there is such a user."""
_HIDDEN: Final = (Path("/tmp"), Path("/var/tmp"))
"""Directories of which a unit of the system sees private ones instead (PrivateTmp)."""
_CHECK_S: Final = 300.0


class NoPlace(Exception):
    """A unit cannot be installed or found here. The message says what to do."""


def path_of(scope: Scope) -> Path:
    """Return the path of the unit. Raises NoPlace for a user without a home directory."""
    if scope is Scope.SYSTEM:
        return SYSTEM_UNITS / NAME
    if (directory := user_directory()) is None:
        raise NoPlace("this user has no home directory for a unit: set $HOME, or install with --system")
    return directory / "systemd" / "user" / NAME


def systemctl(scope: Scope, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemctl with the manager of the scope. Raises NoPlace if there is no systemctl."""
    command = ["systemctl", *(["--user"] if scope is Scope.USER else []), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True)
    except OSError as e:
        message = f"systemctl cannot be run: {e.strerror}. Without systemd, let the machine's own service manager run"
        raise NoPlace(f"{message} `modelctl serve`") from None


def own_command() -> list[str]:
    """Return the words with which a unit calls the modelctl of this environment, from any directory."""
    script = Path(sys.executable).with_name("modelctl")
    if os.access(script, os.X_OK):
        return [str(script)]
    return [sys.executable, "-P", "-m", "supervisor"]


def default_user() -> str:
    """Return the user for a unit of the system: the one who called sudo, else ``OWN_USER``. Raises NoPlace."""
    called = os.environ.get("SUDO_USER", "root")
    for name in (called, OWN_USER):
        if name != "root" and _entry_of(name) is not None:
            return name
    raise NoPlace(
        "name the user who shall run the service with --run-as USER. It needs no rights but to read the models and to "
        f"use the GPUs: `useradd --system --create-home --home-dir /var/lib/{OWN_USER} {OWN_USER}` makes one"
    )


def home_of(name: str) -> str:
    """Return a user's home directory. Raises NoPlace if there is no such user."""
    if (entry := _entry_of(name)) is None:
        raise NoPlace(f"--run-as {name}: there is no such user: `useradd --system --create-home {name}` makes one")
    return entry.pw_dir


def obstacles(unit: Unit, *, force: bool) -> list[str]:
    """Return what keeps a unit from being installed here, or from working. Each text says what to do.

    force  a unit of somebody else may be replaced
    """
    found = [*_of_manager(unit.scope), *([] if force else _of_file(path_of(unit.scope)))]
    if unit.scope is Scope.SYSTEM:
        for path in {Path(unit.command[0]), unit.config, unit.config.resolve()}:
            found += [
                f"{path} is below {hidden}, of which the service sees another one (PrivateTmp): move it elsewhere"
                for hidden in _HIDDEN
                if path.is_relative_to(hidden)
            ]
    return found or _of_check(unit)


def is_ours(path: Path) -> bool:
    """Return whether ``modelctl service install`` has written this unit."""
    return path.read_text(errors="replace").startswith(MARK)


def _of_manager(scope: Scope) -> list[str]:
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        return ["this machine was not started by systemd: let its own service manager run `modelctl serve`"]
    if scope is Scope.SYSTEM:
        return [] if os.geteuid() == 0 else ["only root may install a unit of the system: use sudo, or give --user"]
    if not Path(os.environ.get("XDG_RUNTIME_DIR", "/nowhere"), "systemd", "private").exists():
        return [
            "the service manager of this user does not run, or cannot be found ($XDG_RUNTIME_DIR): log in as this "
            "user, for example by ssh and not by su or sudo, or install with --system"
        ]
    return []


def _of_file(path: Path) -> list[str]:
    try:
        if is_ours(path):
            return []
    except FileNotFoundError:
        return []
    return [f"{path} was not written by this command, and is left as it is: move it away, or give --force"]


def _of_check(unit: Unit) -> list[str]:
    """Have the user of the service check models.yaml and the models, with the command of the service.

    This finds everything that this user cannot read or run.
    """
    command = [*unit.command, "check", str(unit.config)]
    who = os.environ.get("USER", "this user") if unit.scope is Scope.USER else unit.run_as
    environment = {"PATH": os.defpath, "LANG": os.environ.get("LANG", "C.UTF-8")}
    try:
        if unit.scope is Scope.SYSTEM:
            entry = pwd.getpwnam(unit.run_as)
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_CHECK_S, cwd="/",
                env=environment | {"HOME": entry.pw_dir}, user=entry.pw_uid, group=entry.pw_gid,
                extra_groups=os.getgrouplist(unit.run_as, entry.pw_gid),
            )  # fmt: skip
        else:
            home = {"HOME": os.environ.get("HOME", "/")}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_CHECK_S, cwd="/", env=environment | home
            )
    except OSError as e:
        return [f"{who} cannot run {unit.command[0]}: {e.strerror}; install modelctl where {who} may read it"]
    except subprocess.TimeoutExpired:
        return [f"`modelctl check {unit.config}` takes longer than {_CHECK_S:.0f} s as {who}: look at the models' disk"]
    if done.returncode == 0:
        return []
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return [f"`modelctl check` as {who} finds what keeps the service from working:", *said]


def _entry_of(name: str) -> "pwd.struct_passwd | None":
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None
