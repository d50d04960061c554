"""The commands check and config. check finds out whether the models of a models.yaml can be served."""

import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from modelctl.cli import exit_codes, options
from modelctl.cli.options import CONFIG_DEFAULT, SCHEMA, as_json, config_file, find_config, runtime_dir_option
from modelctl.cli.root import ADD_TEMPLATE, CommandFailure, command, instead, say
from modelctl.cli.tables import clean, name_lines, table, terminal_width
from protocol.names import nearest
from protocol.process.paths import default_runtime_dir
from protocol.process.shown import masked
from protocol.process.worker_spec import missing_for_gateway
from supervisor.config.yaml_source import ConfigError
from supervisor.workers.environment import loss

if TYPE_CHECKING:
    from supervisor.config.file import Examined
    from supervisor.config.report import Setting
    from supervisor.config.yaml_source import Problem


@command(
    ("modelctl check --elsewhere models.yaml", "Check a file that is for another machine"),
)
@config_file
@click.option(
    "--elsewhere",
    is_flag=True,
    help="The file is for another machine: do not check GPUs and packages here.",
)
@instead(
    "--json-schema",
    lambda: SCHEMA.read_text(encoding="utf-8"),
    "Print the JSON schema of models.yaml, for editors, and check nothing.",
)
@as_json
def check(file: Path | None, elsewhere: bool, as_json: bool) -> int:
    """Check a models.yaml (FILE) and the models' directories, and say all that is wrong, line by line. Starts nothing.

    Exit code 78 if anything is wrong.
    """
    from supervisor.config.folder_scanner import examine_with_folders

    try:
        examined, found = examine_with_folders(find_config(file, default_runtime_dir()), installed=not elsewhere)
    except ConfigError as e:
        return _tell(e.problems, (), as_json)
    checked = check_all(examined, elsewhere=elsewhere)
    if checked.of_file or checked.of_machine:
        return _tell(checked.of_file, checked.of_machine, as_json)
    names = list(examined.config.models)
    told = {} if found is None else {"unread": found.unread, "refused": found.refused, "waiting": found.waiting}
    folders = {how: {masked(place): masked(why) for place, why in places.items()} for how, places in told.items()}
    if as_json:
        facts = {
            "templates": checked.templates, "understood": checked.understood, "unchecked": checked.unchecked,
            "notes": examined.config.notes, "folders": folders,
        }  # fmt: skip
        known = {key: value for key, value in facts.items() if value}
        click.echo(json.dumps({"ok": True, "models": names, **known}, indent=2))
        return exit_codes.OK
    click.echo(f"{examined.config.file}: fine; models: {', '.join(names) or 'none'}")
    for name, spec in examined.config.models.items():
        if spec.folder is not None:
            click.echo(masked(f"{name}: found below {spec.folder}: {clean(str(spec.model_dir))}"))
    for how, places in folders.items():
        for place, why in places.items():
            click.echo(f"{_OF_FOLDERS[how]}: {clean(place)}: {clean(why)}")
    for note in examined.config.notes:
        click.echo(note)
    for line in name_lines({name: examined.config.names.describe(name) for name in names}):
        click.echo(line)
    for name, place in checked.templates.items():
        click.echo(f"{name}: chat template in {place}" if place else f"{name}: {ADD_TEMPLATE}")
        if text := checked.understood.get(name):
            click.echo(f"{name}: {text}")
    if checked.unknown:
        click.echo(f"not looked into, because only their own engine can: {', '.join(checked.unknown)}")
    for what in dict.fromkeys(checked.unchecked.values()):
        which = ", ".join(name for name, unchecked in checked.unchecked.items() if unchecked == what)
        click.echo(f"not checked of {which}: {what}")
    if not elsewhere and (message := loss()) is not None:
        click.echo(message)
    return exit_codes.OK


_OF_FOLDERS = {"unread": "not looked into", "refused": "not served", "waiting": "not served yet"}
"""What the lines about directories below the folders begin with."""


def _of_port(examined: "Examined") -> "list[Problem]":
    """Return the problems that keep the supervisor from opening the TCP port of the file."""
    from supervisor.config.file import opening_of

    try:
        opening_of(examined.config)
    except ConfigError as e:
        return e.problems
    return []


def _of_folders(examined: "Examined") -> "list[Problem]":
    """Return a problem for each folder that is missing. One on a file system that is not mounted may come later."""
    from protocol.process.paths import is_unmounted

    return [
        examined.source.problem(
            ("folders", place, "path"), f"{folder.path} is no directory; give one with models below"
        )
        for place, folder in enumerate(examined.config.folders)
        if not folder.path.is_dir() and not is_unmounted(folder.path)
    ]


def _of_certificate(examined: "Examined") -> "list[Problem]":
    """Return the problem that keeps the gateway from using the certificate and the private key of the file."""
    import ssl

    from supervisor.gateway import settings_of

    config = examined.config
    if config.gateway is None or config.gateway.certificate is None or config.gateway.private_key is None:
        return []
    settings = settings_of(config.gateway, config.file.parent)
    for key, path in (("certificate", settings.certificate), ("private_key", settings.private_key)):
        try:
            Path(str(path)).read_bytes()
        except OSError as e:
            return [examined.source.problem(("gateway", key), f"{path} cannot be read: {e.strerror or e}")]
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(str(settings.certificate), settings.private_key, password=lambda: "")  # never ask
    except (ssl.SSLError, ValueError) as e:
        what = f"{settings.certificate} cannot be used with the private key {settings.private_key}"
        message = f"{what} ({e}): both must be PEM files that belong together, and the key must have no password"
        return [examined.source.problem(("gateway", "certificate"), message)]
    return []


def _of_missing_gateway(examined: "Examined") -> "list[Problem]":
    """Return the problem that packages of the gateway are not installed."""
    if examined.config.gateway is None or (missing := missing_for_gateway()) is None:
        return []
    return [examined.source.problem(("gateway",), missing)]


@dataclass
class Checked:
    """The result of checking a file and its models.

    of_file     problems of the file and the models
    of_machine  problems of this machine: a GPU or a package that it lacks
    unknown     models that only their own engine can check
    unchecked   what cannot be checked here, by model
    understood  how the models call tools, and what their chat templates make of conversations, by model
    templates   the file with the chat template, by model; "" for a model without one
    """

    of_file: "list[Problem]"
    of_machine: "list[Problem]"
    unknown: list[str]
    unchecked: dict[str, str] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)
    understood: dict[str, str] = field(default_factory=dict)


def check_all(examined: "Examined", *, elsewhere: bool) -> Checked:
    """Check a file that was read, and each model's directory as its worker does.

    elsewhere  the file is for another machine
    """
    from supervisor.placement.estimates import VETTED, lacking_gpus, problems_of, vet_models

    models = examined.config.models
    known = vet_models(models, installed=not elsewhere, templates=True)
    found = [(name, fault) for name, answer in known.items() for fault in answer.faults]
    if not elsewhere:
        found += lacking_gpus(models).items()
    of_models = problems_of(examined, [(name, fault) for name, fault in found if not fault.machine])
    of_machine = problems_of(examined, [(name, fault) for name, fault in found if fault.machine])
    return Checked(
        of_file=[
            *examined.problems,
            *_of_port(examined),
            *_of_certificate(examined),
            *_of_folders(examined),
            *of_models,
        ],
        of_machine=of_machine if elsewhere else [*of_machine, *_of_missing_gateway(examined)],
        unknown=[name for name, spec in models.items() if spec.config.engine not in VETTED],
        unchecked={name: answer.unchecked for name, answer in known.items() if answer.unchecked is not None},
        templates={name: answer.template for name, answer in known.items() if answer.template is not None},
        understood={name: answer.understood for name, answer in known.items() if answer.understood},
    )


def _tell(of_file: "Collection[Problem]", of_machine: "Collection[Problem]", as_json: bool) -> int:
    """Print the problems by line. Returns the exit code."""
    problems = sorted([*of_file, *of_machine], key=lambda problem: problem.line)
    if as_json:
        shown: list[dict[str, Any]] = [{**vars(p), "machine": p in of_machine} for p in problems]
        click.echo(json.dumps({"ok": False, "problems": shown}, indent=2))
        return exit_codes.CONFIG
    for problem in problems:
        say(str(problem))
    if of_machine:
        count = len(of_machine)
        which = f"{count} of these {'is' if count == 1 else 'are'}" if of_file else "all of that is"
        message = f"{which} about this machine, not the file; --elsewhere checks a file that is for another machine"
        say(f"modelctl: {message}")
    return exit_codes.CONFIG


# The command config: which value each key has, and where it comes from.


@command(
    ("modelctl config letters --all", "Show every key of one model, defaults too"),
)
@click.argument("models", nargs=-1, metavar="[FILE] [MODEL]...", shell_complete=options.models)
@click.option(
    "-c", "--config", "file", metavar="FILE", type=click.Path(path_type=Path),
    help=f"Another way to give FILE.  {CONFIG_DEFAULT}",
)  # fmt: skip
@click.option("-a", "--all", "every", is_flag=True, help="Show keys that have their defaults, too.")
@as_json
@runtime_dir_option
@click.pass_context
def config(
    context: click.Context, models: tuple[str, ...], file: Path | None, every: bool, as_json: bool, runtime_dir: Path
) -> int:
    """Show the value of each key, and where it comes from: of models.yaml (FILE), or of each MODEL in it.

    FILE has a slash, or ends with .yaml or .yml. The last of these wins: the default, the model's tabby_config.yml,
    models.yaml, the environment (MODELCTL_SECTION__KEY), a flag.
    """
    from supervisor.config.folder_scanner import examine_with_folders
    from supervisor.config.report import settings_of

    if models and is_file(models[0]):
        if file is not None:
            raise click.UsageError(f"the models.yaml is given twice: {models[0]}, and --config {file}")
        file, models = Path(models[0]), models[1:]
    given = file is not None
    try:
        examined, _ = examine_with_folders(find_config(file, runtime_dir))
    except ConfigError as e:
        for problem in e.problems:
            say(str(problem))
        return exit_codes.CONFIG
    known = (examined.source.data or {}).get("models") or {}
    if unknown := [name for name in models if name not in known]:
        there = [str(name) for name in known]
        near = nearest(unknown[0], there)
        hint = f": there is {', '.join(there) or 'none'}" if near is None else f"; did you mean {near!r}?"
        message = f"{examined.config.file} has no model {unknown[0]!r}{hint}"
        raise CommandFailure(exit_codes.USAGE, "model_not_found", message)
    found = [] if models else _of_command(context, examined.config.file, runtime_dir, given=given)
    found += [s for s in settings_of(examined.source, models) if every or s.origin != "default"]
    if as_json:
        problems = [str(problem) for problem in examined.problems]
        shown = {"settings": [vars(setting) for setting in found], "notes": examined.config.notes}
        click.echo(json.dumps({**shown, "problems": problems}, indent=2))
    else:
        rows = [(setting.key, setting.as_yaml, setting.place) for setting in found]
        click.echo(table(("KEY", "VALUE", "FROM"), rows, terminal_width()))
        for line in (*examined.config.notes, *map(str, examined.problems)):
            say(line)
    return exit_codes.CONFIG if examined.problems else exit_codes.OK


def is_file(name: str) -> bool:
    """Return whether an argument is a file and not a model."""
    return "/" in name or name.endswith((".yaml", ".yml"))


def _of_command(context: click.Context, file: Path, runtime_dir: Path, *, given: bool) -> "list[Setting]":
    """Return the paths that a flag or the environment may give.

    given  whether the command line names the file
    """
    from supervisor.config.report import Setting

    def of(key: str, value: Path, variable: str, *, given: bool) -> Setting:
        if given:
            return Setting(key, str(value), "flag", key)
        if os.environ.get(variable):
            return Setting(key, str(value), "environment", variable)
        return Setting(key, str(value), "default")

    of_line = context.get_parameter_source("runtime_dir") is ParameterSource.COMMANDLINE
    return [
        of("--config", file, "MODELCTL_CONFIG", given=given),
        of("--runtime-dir", runtime_dir, "MODELCTL_RUNTIME_DIR", given=of_line),
    ]
