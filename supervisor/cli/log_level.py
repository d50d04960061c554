"""The command log-level: show and set how much the processes write to their logs."""

import json
from pathlib import Path

import click

from protocol.process.log_style import LEVELS
from supervisor.cli import completion
from supervisor.cli.command import Command
from supervisor.cli.options import as_json, connect, supervisor_options
from supervisor.cli.tables import Column, table, terminal_width


@click.command(
    cls=Command,
    examples={
        "modelctl log-level": "Show the levels",
        "modelctl log-level llama-8b debug": "Have the workers of a model write more, without a restart",
        "modelctl log-level info": "Set all levels",
    },
)
@click.argument("name", required=False, metavar="[NAME]", shell_complete=completion.models)
@click.argument("level", required=False, metavar="[LEVEL]", type=click.Choice(LEVELS))
@as_json
@supervisor_options
def log_level(name: str | None, level: str | None, as_json: bool, runtime_dir: Path) -> None:
    """Show the levels of the logs, or set LEVEL: debug, info, warning or error.

    NAME is a model, `supervisor` or `gateway`. Without it, the level is set for all of them. It holds until the
    supervisor ends, or until a reload finds another `supervisor.log_level` in models.yaml.
    """
    if level is None and name in LEVELS:
        name, level = None, name
    with connect(runtime_dir, admin=True) as client:
        levels = client.log_level(name, level)
    if as_json:
        click.echo(json.dumps(levels))
    else:
        click.echo(table([Column("LOG"), Column("LEVEL")], [list(row) for row in levels.items()], terminal_width()))
