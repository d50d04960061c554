"""Make the page of commands from click: text, usage, options and examples of each."""

import inspect
from collections.abc import Iterator

import click

from protocol.attribute_docs import attribute_docs
from supervisor.cli import exit_codes
from supervisor.cli.command import Command
from supervisor.cli.root import ALIASES, cli
from tools.docs.markdown import page, table, text

INTRODUCTION = """\
`modelctl COMMAND --help` shows the text of a command in the terminal. Most commands talk to the supervisor that runs on
this machine under your user. With `--json` a command prints JSON, and an error is JSON on standard error."""


SHARED = ("--json", "--watch", "--follow", "--connect", "--all")
SHARED_OPTIONS = """\
With `--json`, a command that goes on prints a line of JSON for each look (`--watch`), event (`--follow`) or piece of an
answer (`run`). `--watch` looks again each second, in place on a terminal. `--connect` reaches a supervisor on another
machine; commands without it are about files and devices of this machine."""


def _mark(context: click.Context, option: str) -> str:
    return "yes" if any(option in each.opts for each in context.command.params) else ""


def commands_page() -> str:
    """Return the page."""
    with click.Context(cli, info_name="modelctl", **cli.context_settings) as context:
        commands = list(walk(context))
        index = [
            (f"[`{each.command_path}`](#{each.command_path.replace(' ', '-')})", each.command.get_short_help_str(200))
            for each in commands
        ]
        parts = [part for each in commands for part in _part(each)]
        shared = [(f"`{each.command_path}`", *(_mark(each, name) for name in SHARED)) for each in commands]
    return page(
        "Commands",
        "the commands in supervisor/cli",
        INTRODUCTION,
        table(("command", "does"), index),
        "Other names: " + ", ".join(f"`{alias}` is `{name}`" for alias, name in ALIASES.items()) + ".",
        "## Options that many commands have",
        SHARED_OPTIONS,
        table(("command", *(f"`{name}`" for name in SHARED)), [row for row in shared if any(row[1:])]),
        *parts,
        "## Exit codes",
        table(("code", "meaning"), _exit_codes()),
    )


def walk(context: click.Context) -> Iterator[click.Context]:
    """Yield a context of each command below a group's context. Groups themselves are not yielded."""
    group = context.command
    assert isinstance(group, click.Group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        below = click.Context(command, parent=context, info_name=name)
        if isinstance(command, click.Group):
            yield from walk(below)
        elif not command.hidden:
            yield below


def _part(context: click.Context) -> Iterator[str]:
    command = context.command
    yield f"## {context.command_path}"
    yield text(inspect.cleandoc(command.help or ""))
    yield f"```console\n{' '.join([context.command_path, *command.collect_usage_pieces(context)])}\n```"
    options = [each for each in command.params if isinstance(each, click.Option)]
    records = filter(None, (option.get_help_record(context) for option in options))
    yield table(("option", "meaning"), [(f"`{names}`", _cell(meaning)) for names, meaning in records])
    if isinstance(command, Command) and command.examples:
        yield "\n".join(["```sh", *(f"# {meaning}\n{line}" for line, meaning in command.examples.items()), "```"])


def _cell(meaning: str) -> str:
    """Return an option's help as Markdown. The default is at its end, in square brackets."""
    return text(meaning.replace("[", "\\[").replace("*", "\\*"))


def _exit_codes() -> list[tuple[str, str]]:
    docs = attribute_docs(exit_codes)
    return [(str(code), text(docs[name])) for name, code in vars(exit_codes).items() if name.isupper()]
