"""The command service: have systemd start the supervisor with the machine or with a user's session."""

import json
import os
from pathlib import Path
from typing import Any

import click

from protocol.process.runtime_paths import default_runtime_dir
from supervisor.cli import exit_codes
from supervisor.cli.command import Command
from supervisor.cli.command_group import CommandGroup
from supervisor.cli.config_file import find_config
from supervisor.cli.errors import CommandFailure
from supervisor.cli.hints import say
from supervisor.cli.options import F, as_json, config_file
from supervisor.cli.service_place import (
    NoPlace,
    default_user,
    home_of,
    is_ours,
    obstacles,
    own_command,
    path_of,
    systemctl,
)
from supervisor.cli.service_unit import NAME, RUNTIME_DIR, Scope, Unit

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


@service.command(
    cls=Command,
    examples={
        "modelctl service install --user models.yaml": "Write a service of your own for the models of a models.yaml",
        "modelctl service install --system --run-as modelctl /etc/modelctl/models.yaml": "Write one of the machine",
        "modelctl service install --dry-run": "Show the service, and what would keep it from working",
    },
)
@config_file
@_scope_options
@click.option(
    "--run-as", metavar="USER", help="With --system: who runs it.  [default: who called sudo, else the user modelctl]"
)
@click.option("--force", is_flag=True, help="Replace a unit that this command did not write.")
@_dry_run
@as_json
def install(file: Path | None, scope: str | None, run_as: str | None, force: bool, dry_run: bool, as_json: bool) -> int:
    """Write the systemd unit for the models of a models.yaml (FILE), with this environment's modelctl.

    Without --system and --user, root means the machine's service, and anybody else a service of their own. The command
    starts nothing. It says what to type next.
    """
    chosen = _chosen(scope)
    if run_as is not None and chosen is Scope.USER:
        raise click.UsageError("--run-as is for --system: a service of your own runs as you")
    try:
        unit = _unit(file, chosen, run_as)
        path = path_of(chosen)
        found = obstacles(unit, force=force)
    except NoPlace as e:
        raise CommandFailure(exit_codes.CONFIG, "not_usable", str(e)) from None
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
    return exit_codes.OK


@service.command(cls=Command, examples={"modelctl service uninstall --user": "Stop your service, and remove its unit"})
@_scope_options
@_dry_run
@as_json
def uninstall(scope: str | None, dry_run: bool, as_json: bool) -> int:
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
    except NoPlace as e:
        raise CommandFailure(exit_codes.CONFIG, "not_usable", str(e)) from None
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
        click.echo(f"would run: systemctl {'--user ' if chosen is Scope.USER else ''}disable --now {_SERVICE}")
        click.echo(f"would remove: {path}")
    else:
        click.echo(f"{path}: removed")
    return exit_codes.OK


@service.command(cls=Command, examples={"modelctl service status": "Show the services of the machine and of this user"})
@_scope_options
@as_json
def status(scope: str | None, as_json: bool) -> int:
    """Show whether the service is installed, what it does, and why it does not run. Exit code 69 if none runs.

    Without --system and --user, it shows both.
    """
    scopes = [Scope(scope)] if scope is not None else list(Scope)
    try:
        seen = {each: _seen(each) for each in scopes}
    except NoPlace as e:
        raise CommandFailure(exit_codes.CONFIG, "not_usable", str(e)) from None
    if as_json:
        click.echo(json.dumps({str(each): fields for each, fields in seen.items()}, indent=2))
    else:
        for each, fields in seen.items():
            for line in _lines(each, fields):
                click.echo(line)
    return exit_codes.OK if any(f.get("ActiveState") == "active" for f in seen.values()) else exit_codes.UNAVAILABLE


def _chosen(scope: str | None) -> Scope:
    return Scope(scope) if scope is not None else Scope.SYSTEM if os.geteuid() == 0 else Scope.USER


def _unit(file: Path | None, scope: Scope, run_as: str | None) -> Unit:
    """Return the unit. Raises NoPlace, and CommandFailure if models.yaml cannot be used."""
    from supervisor.config import load_config
    from supervisor.yaml_source import ConfigError

    user = ""
    if scope is Scope.SYSTEM:
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


def _ordered(scope: Scope, *arguments: str) -> None:
    """Give systemd an order. Raises CommandFailure with what systemctl says."""
    done = systemctl(scope, *arguments)
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise CommandFailure(exit_codes.FAILED, "systemctl", f"systemctl {' '.join(arguments)}: {said}")


def _next(unit: Unit) -> dict[str, str]:
    """Return command lines to type next, each with its meaning."""
    user = unit.scope is Scope.USER
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


def _seen(scope: Scope) -> dict[str, Any]:
    """Return what systemd says about the service: some of its properties. Only ``problem`` if it says nothing."""
    done = systemctl(scope, "show", NAME, "--property", ",".join(_SHOWN))
    if done.returncode != 0:
        return {"problem": done.stderr.strip() or f"systemctl show: exit code {done.returncode}"}
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    fields: dict[str, Any] = {key: value for key, _, value in pairs if value}
    numbers = ("MainPID", "NRestarts", "ExecMainStatus")
    return fields | {key: int(fields[key]) for key in numbers if fields.get(key, "").isdigit()}


def _lines(scope: Scope, fields: dict[str, Any]) -> list[str]:
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
