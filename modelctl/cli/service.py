"""The command service: have systemd start the supervisor with the machine or with a user's session."""

import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import click

from modelctl.cli import exit_codes
from modelctl.cli.options import F, as_json, config_file, find_config, user_directory
from modelctl.cli.root import CommandFailure, CommandGroup, command, say
from protocol.process.paths import default_runtime_dir
from supervisor.config.server import StopConfig
from supervisor.gateway import LEAVE_S
from supervisor.placement.memory import DEADLINE_S

# The text of the systemd unit that runs a supervisor. Pure.
#
# The files deploy/systemd/*.service show what comes out. A test runs these units under a real systemd.


MARK: Final = "# Written by `modelctl service install`, which may write it again: put changes into a drop-in"
"""The first line of a unit. A unit without it belongs to somebody else."""
NAME: Final = "modelctl.service"
RUNTIME_DIR: Final = Path("/var/lib/modelctl/supervisor")
"""The runtime directory of a supervisor that a unit of the system runs. It is not below /run, because logs, events and
counts of usage are in it, too, and have to survive a restart of the machine."""
_CACHE: Final = "/var/cache/modelctl"
_MARGIN_S: Final = 10.0
_FINAL_CODES: Final = (exit_codes.USAGE, exit_codes.TEMPFAIL, exit_codes.CONFIG)


class ServiceScope(StrEnum):
    SYSTEM = "system"
    """Started with the machine, for a user that the unit names."""
    USER = "user"
    """Started by the service manager of one user."""


@dataclass(frozen=True)
class Unit:
    """What differs between units.

    command  the words that call modelctl, with absolute paths
    config   models.yaml, an absolute path
    run_as   the user of a unit of the system
    stop     the section supervisor.stop of models.yaml
    """

    scope: ServiceScope
    command: Sequence[str]
    config: Path
    stop: StopConfig
    run_as: str = ""

    @property
    def stop_s(self) -> int:
        """Seconds for a whole shutdown: the drain, the stop ladder, the return of GPU memory, and the gateway."""
        return round(self.stop.drain + self.stop.shutdown + self.stop.sigterm + DEADLINE_S + LEAVE_S + _MARGIN_S)

    def text(self) -> str:
        """Return the unit file."""
        system = self.scope is ServiceScope.SYSTEM
        return _UNIT.format(
            mark=MARK,
            after="After=network.target remote-fs.target nvidia-persistenced.service\n" if system else "",
            places=_PLACES.format(user=self.run_as, runtime=RUNTIME_DIR, cache=_CACHE) if system else "",
            command=" ".join(map(quoted, self.command)),
            config=quoted(str(self.config)),
            stop=self.stop_s,
            codes_in_words=_in_words(),
            codes=" ".join(map(str, _FINAL_CODES)),
            system_locks=_SYSTEM_LOCKS if system else "",
            target="multi-user" if system else "default",
        )


def quoted(word: str) -> str:
    """Return a word for a command line of a unit. Raises ValueError for a line break, which a unit cannot hold."""
    if "\n" in word or "\r" in word:
        raise ValueError(f"{word!r} has a line break, which a systemd unit cannot hold: rename it")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    plain = all(c.isalnum() or c in "/._-+:@,=~%$" for c in escaped)
    return escaped if plain and escaped else f'"{escaped}"'


def _in_words() -> str:
    meaning = {exit_codes.USAGE: "wrong options", exit_codes.TEMPFAIL: "another supervisor runs there",
               exit_codes.CONFIG: "models.yaml or the environment is not usable"}  # fmt: skip
    return "\n".join(f"# {code}: {meaning[code]}" for code in _FINAL_CODES)


_UNIT = """\
{mark}

[Unit]
Description=modelctl, which serves language models
{after}StartLimitIntervalSec=5min
StartLimitBurst=5

[Service]
# Ready when each model that starts with the supervisor is ready or has failed for good.
Type=notify
NotifyAccess=main
{places}ExecStart={command} serve {config}
ExecReload={command} reload
# The time to compile. From then on the supervisor extends the time itself, for as long as its loop is alive.
TimeoutStartSec=15min
# A supervisor whose loop is stopped or stuck gets SIGABRT, writes its stack to the journal, and then gets SIGKILL.
WatchdogSec=30
TimeoutAbortSec=10
# Only the supervisor gets SIGTERM. It lets requests finish, and ends the workers itself.
KillMode=mixed
TimeoutStopSec={stop}
Restart=on-failure
RestartSec=2
# A restart does not help with these exit codes.
{codes_in_words}
RestartPreventExitStatus={codes}
# A worker that the kernel ends for want of memory is the supervisor's business: the other models go on.
OOMPolicy=continue
LimitNOFILE=65536
# Not set, because they keep CUDA from working: MemoryDenyWriteExecute, and PrivateDevices, DevicePolicy and
# ProtectClock, which hide the GPUs. PrivateUsers would hide who a client is.
NoNewPrivileges=yes
UMask=0077
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
# What containers are not allowed either, and CUDA runs in containers.
SystemCallFilter=~@clock @cpu-emulation @module @mount @obsolete @raw-io @reboot @swap
SystemCallErrorNumber=EPERM
{system_locks}
[Install]
WantedBy={target}.target
"""

_PLACES = """\
User={user}
# Sockets, logs, events and counts of usage.
StateDirectory=modelctl
StateDirectoryMode=0700
Environment=MODELCTL_RUNTIME_DIR={runtime}
# ExLlamaV2's CUDA code is compiled into here at the first start.
CacheDirectory=modelctl
CacheDirectoryMode=0700
Environment=XDG_CACHE_HOME={cache} TRITON_CACHE_DIR={cache}/triton CUDA_CACHE_PATH={cache}/cuda
# As root: load the driver's modules and make the device files of the GPUs, if nothing has done that before.
ExecStartPre=-+/usr/bin/nvidia-modprobe -c 0 -u
"""

_SYSTEM_LOCKS = """\
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
KeyringMode=private
"""


# Where a systemd unit goes on this machine, how systemd is asked, and what keeps a unit from working here.


SYSTEM_UNITS: Final = Path("/etc/systemd/system")
OWN_USER: Final = "modelctl"
"""The user who runs a unit of the system if nobody else is named, and there is such a user."""
_HIDDEN: Final = (Path("/tmp"), Path("/var/tmp"))
"""Directories of which a unit of the system sees private ones instead (PrivateTmp)."""
_CHECK_S: Final = 300.0


class NoPlace(CommandFailure):
    """A unit cannot be installed or found here. The message says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(exit_codes.CONFIG, "not_usable", message)


def path_of(scope: ServiceScope) -> Path:
    """Return the path of the unit. Raises NoPlace for a user without a home directory."""
    if scope is ServiceScope.SYSTEM:
        return SYSTEM_UNITS / NAME
    if (directory := user_directory()) is None:
        raise NoPlace("this user has no home directory for a unit: set $HOME, or install with --system")
    return directory / "systemd" / "user" / NAME


def systemctl(scope: ServiceScope, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemctl with the manager of the scope. Raises NoPlace if there is no systemctl."""
    command = ["systemctl", *(["--user"] if scope is ServiceScope.USER else []), *arguments]
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
    if unit.scope is ServiceScope.SYSTEM:
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


def _of_manager(scope: ServiceScope) -> list[str]:
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        return ["this machine was not started by systemd: let its own service manager run `modelctl serve`"]
    if scope is ServiceScope.SYSTEM:
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
    who, home, rights = os.environ.get("USER", "this user"), os.environ.get("HOME", "/"), dict[str, Any]()
    if unit.scope is ServiceScope.SYSTEM:
        entry = pwd.getpwnam(unit.run_as)
        who, home = unit.run_as, entry.pw_dir
        groups = os.getgrouplist(who, entry.pw_gid)
        rights = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}
    try:
        done = subprocess.run(
            [*unit.command, "check", str(unit.config)], capture_output=True, text=True, timeout=_CHECK_S, cwd="/",
            env={"PATH": os.defpath, "LANG": os.environ.get("LANG", "C.UTF-8"), "HOME": home}, **rights,
        )  # fmt: skip
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


_SERVICE = NAME.removesuffix(".service")
_SHOWN = ("LoadState", "UnitFileState", "ActiveState", "SubState", "StatusText", "MainPID", "NRestarts", "Result",
          "ExecMainStatus", "FragmentPath")  # fmt: skip
_CODES = {
    exit_codes.CONFIG: "models.yaml or the environment is not usable: `modelctl check` says why",
    exit_codes.TEMPFAIL: "another supervisor runs there: `modelctl shutdown` ends it",
}


def _scope_options(command: F) -> F:
    """Add the options ``--system`` and ``--user`` to a command, which gets the parameter ``scope``. None: neither."""
    system = click.option("--system", "scope", flag_value="system", help="The machine's service, which starts with it.")
    user = click.option("--user", "scope", flag_value="user", help="Your own service, which starts when you log in.")
    return system(user(command))


_dry_run = click.option("--dry-run", is_flag=True, help="Change nothing. Show what would be done.")


@click.group(cls=CommandGroup)
def service() -> None:
    """Have systemd run the supervisor: install, remove and show its service."""


@command(
    ("modelctl service install --user models.yaml", "Write a service of your own"),
    ("modelctl service install --system --run-as modelctl /etc/modelctl/models.yaml", "Write one of the machine"),
    of=service,
)
@config_file
@_scope_options
@click.option(
    "--run-as", metavar="USER", help="With --system: who runs it.  [default: who called sudo, else the user modelctl]"
)
@click.option("--force", is_flag=True, help="Replace a unit that this command did not write.")
@_dry_run
@as_json
def install(
    file: Path | None, scope: str | None, run_as: str | None, force: bool, dry_run: bool, as_json: bool
) -> None:
    """Write the systemd unit for the models of a models.yaml (FILE), with this environment's modelctl.

    Without --system and --user, root means the machine's service, and anybody else their own. Starts nothing, and says
    what to type next.
    """
    chosen = _chosen(scope)
    if run_as is not None and chosen is ServiceScope.USER:
        raise click.UsageError("--run-as is for --system: a service of your own runs as you")
    unit = _unit(file, chosen, run_as)
    path = path_of(chosen)
    found = obstacles(unit, force=force)
    if dry_run and not as_json:
        click.echo(unit.text(), nl=False)
        say(f"modelctl: this would be written to {path}")
    if found:
        raise CommandFailure(exit_codes.CONFIG, "not_usable", *found)
    if not dry_run:
        _write(path, unit.text())
        _ordered(chosen, "daemon-reload")
    if as_json:
        report = {
            "scope": str(chosen), "path": str(path), "written": not dry_run, "models": str(unit.config),
            "unit": unit.text(), "next": list(_next(unit)),
        }  # fmt: skip
        click.echo(json.dumps(report, indent=2))
    elif not dry_run:
        click.echo(f"{path}: written; models: {unit.config}")
        click.echo("Next:")
        for line, meaning in _next(unit).items():
            click.echo(f"  # {meaning}\n  {line}")


@command(("modelctl service uninstall --user", "Stop your service, and remove its unit"), of=service)
@_scope_options
@_dry_run
@as_json
def uninstall(scope: str | None, dry_run: bool, as_json: bool) -> None:
    """Stop the service as `modelctl shutdown` does, and remove its unit.

    Without --system and --user, root means the machine's service, and anybody else their own.
    """
    chosen = _chosen(scope)
    try:
        path = path_of(chosen)
        ours = is_ours(path)
    except FileNotFoundError:
        message = f"there is no {path}: `modelctl service status` shows what is installed"
        raise CommandFailure(exit_codes.UNAVAILABLE, "not_installed", message) from None
    if not ours:
        message = f"{path} was not written by `modelctl service install`: remove it yourself"
        raise CommandFailure(exit_codes.CONFIG, "not_ours", message)
    if not dry_run:
        _ordered(chosen, "disable", "--now", NAME)
        path.unlink()
        _ordered(chosen, "daemon-reload")
    if as_json:
        click.echo(json.dumps({"scope": str(chosen), "path": str(path), "removed": not dry_run}, indent=2))
    elif dry_run:
        click.echo(f"would run: systemctl {'--user ' if chosen is ServiceScope.USER else ''}disable --now {_SERVICE}")
        click.echo(f"would remove: {path}")
    else:
        click.echo(f"{path}: removed")


@command(("modelctl service status", "Show the services of the machine and of this user"), of=service)
@_scope_options
@as_json
def status(scope: str | None, as_json: bool) -> int:
    """Show whether the service is installed, what it does, and why it does not run. Exit code 69 if none runs.

    Without --system and --user, it shows both.
    """
    scopes = [ServiceScope(scope)] if scope is not None else list(ServiceScope)
    seen = {each: _seen(each) for each in scopes}
    if as_json:
        click.echo(json.dumps({str(each): fields for each, fields in seen.items()}, indent=2))
    else:
        for each, fields in seen.items():
            for line in _lines(each, fields):
                click.echo(line)
    return exit_codes.OK if any(f.get("ActiveState") == "active" for f in seen.values()) else exit_codes.UNAVAILABLE


def _chosen(scope: str | None) -> ServiceScope:
    return ServiceScope(scope) if scope is not None else ServiceScope.SYSTEM if os.geteuid() == 0 else ServiceScope.USER


def _unit(file: Path | None, scope: ServiceScope, run_as: str | None) -> Unit:
    """Return the unit. Raises NoPlace, and CommandFailure if models.yaml cannot be used."""
    from supervisor.config.file import load_config
    from supervisor.config.yaml_source import ConfigError

    user = ""
    if scope is ServiceScope.SYSTEM:
        user = run_as or default_user()
        os.environ["HOME"] = home_of(user)  # ~ in models.yaml is the home of the service's user
    try:
        loaded = load_config(find_config(file, default_runtime_dir()))
    except ConfigError as e:
        raise CommandFailure(exit_codes.CONFIG, "not_usable", *map(str, e.problems)) from None
    return Unit(scope, own_command(), loaded.file, loaded.supervisor.stop, user)


def _write(path: Path, text: str) -> None:
    """Write the whole unit or nothing. Raises CommandFailure."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(text, encoding="utf-8")
        written.chmod(0o644)
        written.replace(path)
    except OSError as e:
        written.unlink(missing_ok=True)
        raise CommandFailure(exit_codes.CONFIG, "not_usable", f"{path} cannot be written: {e.strerror}") from None


def _ordered(scope: ServiceScope, *arguments: str) -> None:
    """Give systemd an order. Raises CommandFailure with what systemctl says."""
    done = systemctl(scope, *arguments)
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise CommandFailure(exit_codes.FAILED, "systemctl", f"systemctl {' '.join(arguments)}: {said}")


def _next(unit: Unit) -> dict[str, str]:
    """Return command lines to type next, each with its meaning."""
    user = unit.scope is ServiceScope.USER
    manager, journal = ("systemctl --user", "journalctl --user") if user else ("systemctl", "journalctl")
    running = systemctl(unit.scope, "is-active", NAME).returncode == 0
    lines = {
        f"{manager} restart {_SERVICE}": "it runs: let it run with this unit",
        f"{manager} enable --now {_SERVICE}": "start it now, and from now on by itself",
        f"{manager} status {_SERVICE}": "the states of its models",
        f"{journal} -u {_SERVICE} -f": "the supervisor's log",
    }
    if not running:
        del lines[f"{manager} restart {_SERVICE}"]
    if user:
        lines[f"loginctl enable-linger {os.environ.get('USER', '')}".rstrip()] = "start it with the machine, too"
        lines[f"{unit.command[0]} ps"] = "every command finds it"
    else:
        command = f"sudo -u {unit.run_as} MODELCTL_RUNTIME_DIR={RUNTIME_DIR} {' '.join(unit.command)} ps"
        lines[command] = f"commands run as {unit.run_as}"
    return lines


def _seen(scope: ServiceScope) -> dict[str, Any]:
    """Return what systemd says about the service: some of its properties. Only ``problem`` if it says nothing."""
    done = systemctl(scope, "show", NAME, "--property", ",".join(_SHOWN))
    if done.returncode != 0:
        return {"problem": done.stderr.strip() or f"systemctl show: exit code {done.returncode}"}
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    fields: dict[str, Any] = {key: value for key, _, value in pairs if value}
    numbers = ("MainPID", "NRestarts", "ExecMainStatus")
    return fields | {key: int(fields[key]) for key in numbers if fields.get(key, "").isdigit()}


def _lines(scope: ServiceScope, fields: dict[str, Any]) -> list[str]:
    """Return the lines for people."""
    if "problem" in fields:
        return [f"{scope}: cannot be asked: {fields['problem']}"]
    if fields.get("LoadState") == "not-found":
        return [f"{scope}: not installed"]
    start = "starts by itself" if fields.get("UnitFileState") == "enabled" else "does not start by itself"
    lines = [f"{scope}: {fields.get('ActiveState')} ({fields.get('SubState')}), {start}, {fields.get('FragmentPath')}"]
    if text := fields.get("StatusText"):
        lines.append(f"  {text}")
    if fields.get("MainPID"):
        lines.append(f"  pid {fields['MainPID']}, restarted {fields.get('NRestarts', 0)} times")
    if fields.get("Result", "success") != "success":
        code = fields.get("ExecMainStatus", 0)
        why = f" ({_CODES[code]})" if fields["Result"] == "exit-code" and code in _CODES else ""
        lines.append(f"  its last end: {fields['Result']}, {code}{why}; `journalctl -u {_SERVICE}` has its log")
    return lines
