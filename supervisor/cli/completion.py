"""The command completion, and the names of models for the shell's completion of other commands."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from supervisor.cli.command import Command

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PROGRAM = "modelctl"
VARIABLE = "_MODELCTL_COMPLETE"
"""The variable by which the shell asks the program for completions (``root``)."""


@click.command(
    cls=Command,
    examples={
        "modelctl completion bash >> ~/.bashrc": "Complete commands, options and models in bash",
        "modelctl completion fish > ~/.config/fish/completions/modelctl.fish": "Do so in fish",
    },
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script with which a SHELL completes commands, options and the names of models."""
    from click.shell_completion import get_completion_class

    from supervisor.cli.root import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, PROGRAM, VARIABLE).source())


def models(context: click.Context, _: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Return the models and aliases of models.yaml that begin like this. Nothing if it cannot be read.

    A shell waits for this, so no supervisor is asked, and the file is not checked.
    """
    import yaml
    from click.shell_completion import CompletionItem

    from supervisor.cli.config_file import find_config
    from supervisor.yaml_source import ConfigError

    try:
        given = context.params.get("file") or os.environ.get("MODELCTL_CONFIG")
        entries = yaml.safe_load(find_config(Path(given) if given else None).read_text())["models"]
        names = [str(name) for name in entries]
        for entry in entries.values():
            names += map(str, (entry or {}).get("aliases") or ())
    except (ConfigError, OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        return []
    already = context.params.get("models") or ()
    return [CompletionItem(name) for name in names if name.startswith(incomplete) and name not in already]


def models_and_directories(context: click.Context, option: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Return the models of models.yaml that begin like this, and have the shell complete directories."""
    from click.shell_completion import CompletionItem

    return [*models(context, option, incomplete), CompletionItem(incomplete, type="dir")]
