"""The command config: which value each key has, and where it comes from."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from protocol.unknown_models import nearest
from supervisor.cli import completion, exit_codes
from supervisor.cli.command import Command
from supervisor.cli.config_file import find_config
from supervisor.cli.errors import CommandFailure
from supervisor.cli.hints import say
from supervisor.cli.options import CONFIG_DEFAULT, as_json, runtime_dir_option
from supervisor.cli.tables import table, terminal_width

if TYPE_CHECKING:
    from supervisor.config_settings import Setting


@click.command(
    cls=Command,
    examples={
        "modelctl config": "Show what models.yaml and the environment set, and where",
        "modelctl config letters --all": "Show every key of one model, defaults too",
        "modelctl config ./other.yaml letters": "Show the keys of a model of another file",
    },
)
@click.argument("models", nargs=-1, metavar="[FILE] [MODEL]...", shell_complete=completion.models)
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

    FILE has a slash, or ends with .yaml or .yml. Values are written as YAML.
    The last of these wins: the default, the model's tabby_config.yml, models.yaml, the environment
    (MODELCTL_SECTION__KEY), a flag. Starts nothing.
    """
    from supervisor.config_settings import settings_of
    from supervisor.folder_scanner import examine_with_folders
    from supervisor.yaml_source import ConfigError

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
    from supervisor.config_settings import Setting

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
