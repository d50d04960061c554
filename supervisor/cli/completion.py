"""The command completion, and the names of models for the shell's completion of other commands."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.process.runtime_paths import default_runtime_dir
from supervisor.cli.command import Command

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

ANSWER_S = 1.0
"""Seconds that the supervisor has for its greeting, which names its models. A shell waits for that."""
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
    """Return the names of models that begin like this. Nothing if none are known.

    They are those of the running supervisor, in whatever directory. If none runs, or for a command about a file, they
    are those of models.yaml.
    """
    from click.shell_completion import CompletionItem

    about_file = any(option.name in ("file", "config") for option in context.command.params)
    names = _of_file(context) if about_file else _of_supervisor(context) or _of_file(context)
    already = context.params.get("models") or ()
    return [CompletionItem(name) for name in names if name.startswith(incomplete) and name not in already]


def _of_supervisor(context: click.Context) -> list[str]:
    """Return the models and other names that the command's supervisor offers; nothing if there is none that answers."""
    from protocol.client.connection import CANNOT_CONNECT
    from protocol.client.sync_client import Client
    from supervisor.cli.options import way_to

    try:
        with (
            context.scope(cleanup=False),
            Client(**way_to(_runtime_dir(context)), timeout=ANSWER_S, reconnect=False) as client,
        ):
            return [name for model in client.server["models"] for name in _completed(model)]
    except (*CANNOT_CONNECT, click.UsageError, TimeoutError, OSError, KeyError):
        return []


def _completed(model: Mapping[str, Any]) -> list[str]:
    """Return the listed names of a model, without its variants: commands other than `run` know no variants."""
    from protocol.client.model_names import listed_names_of

    return [name for name in listed_names_of(model) if name in (model["name"], *model.get("aliases", ()))]


def _of_file(context: click.Context) -> list[str]:
    """Return the listed models and aliases of the models.yaml that the command uses. It is not checked."""
    import yaml

    from supervisor.cli.config_file import find_config
    from supervisor.yaml_source import ConfigError

    try:
        given = context.params.get("file") or context.params.get("config")
        file = find_config(given, _runtime_dir(context))
        entries = yaml.safe_load(file.read_text())["models"]
        shown = [(name, entry or {}) for name, entry in entries.items() if (entry or {}).get("listed") is not False]
        names = [str(name) for name, _ in shown]
        for _, entry in shown:
            names += map(str, entry.get("aliases") or ())
    except (ConfigError, OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        return []
    return names


def _runtime_dir(context: click.Context) -> Path:
    given: Path | None = context.params.get("runtime_dir")
    return default_runtime_dir() if given is None else given


def models_and_directories(context: click.Context, option: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """Return the models that begin like this, and have the shell complete directories."""
    from click.shell_completion import CompletionItem

    return [*models(context, option, incomplete), CompletionItem(incomplete, type="dir")]
