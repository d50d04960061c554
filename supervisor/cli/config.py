"""The command config: which value each key has, and where it comes from."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from supervisor.cli import completion, exit_codes
from supervisor.cli.command import Command
from supervisor.cli.config_file import find_config
from supervisor.cli.errors import CommandFailure
from supervisor.cli.figures import duration
from supervisor.cli.hints import say
from supervisor.cli.options import as_json, runtime_dir_option
from supervisor.cli.tables import table, terminal_width
from supervisor.spelling import spelled

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
    },
)
@click.argument("models", nargs=-1, metavar="[MODEL]...", shell_complete=completion.models)
@click.option(
    "-c", "--config", "file", metavar="FILE", type=click.Path(path_type=Path),
    help="The models.yaml.  [default: $MODELCTL_CONFIG, ./models.yaml, ~/.config/modelctl/models.yaml]",
)  # fmt: skip
@click.option("-a", "--all", "every", is_flag=True, help="Show keys that have their defaults, too.")
@as_json
@runtime_dir_option
@click.pass_context
def config(
    context: click.Context, models: tuple[str, ...], file: Path | None, every: bool, as_json: bool, runtime_dir: Path
) -> int:
    """Show the value of each key, and where it comes from.

    The last of these wins: the default, the model's tabby_config.yml, models.yaml, the environment
    (MODELCTL_SECTION__KEY), a flag. Starts nothing.
    """
    from supervisor.config import examine_config
    from supervisor.yaml_source import ConfigError

    try:
        examined = examine_config(find_config(file))
    except ConfigError as e:
        for problem in e.problems:
            say(str(problem))
        return exit_codes.CONFIG
    known = (examined.source.data or {}).get("models") or {}
    if unknown := [name for name in models if name not in known]:
        message = f"the file has no model {unknown[0]!r}: there is {', '.join(map(str, known)) or 'none'}"
        raise CommandFailure(exit_codes.USAGE, "model_not_found", message)
    found = [] if models else _of_command(context, examined.config.file, runtime_dir)
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
    from supervisor.config_schema import SupervisorConfig

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
    if data.get("gateway") is not None:
        yield from _section(examined, GatewayConfig, data["gateway"], ("gateway",))


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


def _of_command(context: click.Context, file: Path, runtime_dir: Path) -> list[Setting]:
    """Return the paths that a flag or the environment may give."""

    def of(parameter: str, key: str, value: Path, variable: str) -> Setting:
        if context.get_parameter_source(parameter) is ParameterSource.COMMANDLINE:
            return Setting(key, str(value), "flag", key)
        if os.environ.get(variable):
            return Setting(key, str(value), "environment", variable)
        return Setting(key, str(value), "default")

    return [
        of("file", "--config", file, "MODELCTL_CONFIG"),
        of("runtime_dir", "--runtime-dir", runtime_dir, "MODELCTL_RUNTIME_DIR"),
    ]


def _shown(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return spelled(value)
