"""The command config: which value each key has, and where it comes from."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from protocol.unknown_models import nearest
from supervisor.cli import completion, exit_codes
from supervisor.cli.command import Command
from supervisor.cli.config_file import find_config
from supervisor.cli.errors import CommandFailure
from supervisor.cli.figures import duration
from supervisor.cli.hints import say
from supervisor.cli.options import CONFIG_DEFAULT, as_json, runtime_dir_option
from supervisor.cli.tables import table, terminal_width

if TYPE_CHECKING:
    from supervisor.config import Examined
    from supervisor.yaml_source import KeyPath

_SECONDS = ("duration", "duration, or never", "duration from 1s to 24h")


@dataclass(frozen=True)
class Setting:
    """A key and its value.

    value   as the file or the variable has it; for a default, as the file would have it
    origin  "default", "model" (a file in the model's directory), "file", "environment" or "flag"
    source  the file or the variable; None for a default
    line    the line in the file; 0 for anything else
    """

    key: str
    value: Any
    origin: str
    source: str | None = None
    line: int = 0

    @property
    def place(self) -> str:
        """Return where the value comes from, for people."""
        if self.source is None:
            return self.origin
        return f"{Path(self.source).name}:{self.line}" if self.line else self.source


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
    from supervisor.config import examine_config
    from supervisor.yaml_source import ConfigError

    if models and is_file(models[0]):
        if file is not None:
            raise click.UsageError(f"the models.yaml is given twice: {models[0]}, and --config {file}")
        file, models = Path(models[0]), models[1:]
    given = file is not None
    try:
        examined = examine_config(find_config(file, runtime_dir))
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
    found += [s for s in settings_of(examined, models) if every or s.origin != "default"]
    if as_json:
        problems = [str(problem) for problem in examined.problems]
        shown = {"settings": [vars(setting) for setting in found], "notes": examined.config.notes}
        click.echo(json.dumps({**shown, "problems": problems}, indent=2))
    else:
        rows = [(setting.key, _shown(setting.value), setting.place) for setting in found]
        click.echo(table(("KEY", "VALUE", "FROM"), rows, terminal_width()))
        for line in (*examined.config.notes, *map(str, examined.problems)):
            say(line)
    return exit_codes.CONFIG if examined.problems else exit_codes.OK


def settings_of(examined: "Examined", models: Sequence[str] = ()) -> Iterator[Setting]:
    """Yield every key of a file that was read, with its value.

    models  only the keys of these models; empty: all sections
    """
    from supervisor.config_gateway import GatewayConfig
    from supervisor.config_model import ModelConfig
    from supervisor.config_schema import ClusterConfig, GroupConfig, SupervisorConfig

    data = examined.source.data if isinstance(examined.source.data, dict) else {}
    entries = data.get("models")
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        if not models or name in models:
            yield from _section(examined, ModelConfig, entry, ("models", name))
    if models:
        return
    if data.get("default_model") is not None:
        yield _given(examined, ("default_model",), data["default_model"])
    yield from _section(examined, SupervisorConfig, data.get("supervisor"), ("supervisor",))
    for name, kind in (("gateway", GatewayConfig), ("cluster", ClusterConfig)):
        if data.get(name) is not None:
            yield from _section(examined, kind, data[name], (name,))
    groups = data.get("groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        yield from _section(examined, GroupConfig, group, ("groups", name))


def _section(examined: "Examined", kind: type, given: Any, path: "KeyPath") -> Iterator[Setting]:
    """Yield the keys of a dataclass, in its order. ``given``: the mapping that the file has there."""
    values = given if isinstance(given, dict) else {}
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        place = (*path, field.name)
        if is_dataclass(hints[field.name]):
            yield from _section(examined, hints[field.name], values.get(field.name), place)
        elif field.name in values:
            yield from _key(examined, place, values[field.name])
        elif field.default is not MISSING:
            yield Setting(".".join(map(str, place)), _as_in_file(field.default, hints[field.name]), "default")
    for name in values.keys() - hints.keys():
        yield _given(examined, (*path, name), values[name])


def _key(examined: "Examined", path: "KeyPath", value: Any) -> Iterator[Setting]:
    """Yield a key with its value, or the parts of its map if some of them stand elsewhere in the file."""
    if isinstance(value, dict) and any((*path, part) in examined.source.moved for part in value):
        for part, what in value.items():
            yield _given(examined, (*path, part), what)
    else:
        yield _given(examined, path, value)


def _given(examined: "Examined", path: "KeyPath", value: Any) -> Setting:
    source, line = examined.source.origin(path) or (examined.source.file, 0)
    origin = "file" if source == examined.source.file else "model" if line else "environment"
    return Setting(".".join(map(str, path)), value, origin, source, line)


def _as_in_file(default: Any, hint: Any) -> Any:
    """Return a default as the file would have it: a duration with its unit, and not as seconds."""
    if get_origin(hint) is Annotated and getattr(get_args(hint)[1], "name", None) in _SECONDS and default is not None:
        return duration(default)
    return list(default) if isinstance(default, tuple) else default


def is_file(name: str) -> bool:
    """Return whether an argument is a file and not a model."""
    return "/" in name or name.endswith((".yaml", ".yml"))


def _of_command(context: click.Context, file: Path, runtime_dir: Path, *, given: bool) -> list[Setting]:
    """Return the paths that a flag or the environment may give.

    given  whether the command line names the file
    """

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


def _shown(value: Any) -> str:
    """Return a value as a line of YAML, which may be copied into a file."""
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").rstrip("\n")
