"""check: is this models.yaml usable?"""

import json
from pathlib import Path

import click

from supervisor.cli import exit_codes
from supervisor.cli.config_file import find_config
from supervisor.cli.options import as_json, config_file


@click.command()
@config_file
@as_json
def check(file: Path | None, as_json: bool) -> int:
    """Check a models.yaml (FILE) line by line. Starts nothing."""
    from supervisor.config import load_config
    from supervisor.listening import opening_of
    from supervisor.yaml_source import ConfigError

    try:
        config = load_config(find_config(file))
        opening_of(config)
    except ConfigError as e:
        if as_json:
            click.echo(json.dumps({"ok": False, "problems": [vars(p) for p in e.problems]}, indent=2))
        else:
            for problem in e.problems:
                click.echo(str(problem), err=True)
        return exit_codes.CONFIG
    names = list(config.models)
    if as_json:
        click.echo(json.dumps({"ok": True, "models": names}, indent=2))
    else:
        click.echo(f"{config.file}: fine; models: {', '.join(names)}")
    return exit_codes.OK
