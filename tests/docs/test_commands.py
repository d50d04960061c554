"""Each command on the page of commands has examples. The command line accepts them, and the help shows them."""

import re
import shlex

import click
import pytest
from click.testing import CliRunner

from modelctl.cli.root import Command, cli
from tools.docs.commands import commands_page, walk

with click.Context(cli, info_name="modelctl") as root:
    COMMANDS = {context.command_path.removeprefix("modelctl "): context for context in walk(root)}


@pytest.mark.parametrize("path", COMMANDS)
def test_each_command_has_examples_that_it_accepts(path: str) -> None:
    context = COMMANDS[path]
    assert isinstance(context.command, Command), 'give it examples: @command(("modelctl ...", "..."))'
    assert context.command.examples
    for line, meaning in context.command.examples.items():
        words = shlex.split(line.partition(" < ")[0])
        assert words[: 1 + len(path.split())] == ["modelctl", *path.split()]
        context.command.make_parser(context).parse_args(words[1 + len(path.split()) :])
        assert meaning[0].isupper()
        assert not meaning.endswith(".")


@pytest.mark.parametrize("path", COMMANDS)
def test_help_and_page_show_the_examples(path: str) -> None:
    command = COMMANDS[path].command
    assert isinstance(command, Command)
    shown = CliRunner().invoke(cli, [*path.split(), "--help"], prog_name="modelctl").output
    for line in command.examples:
        assert f"  {line}\n" in shown
        assert re.search(rf"^{re.escape(line)}(  # .+)?$", commands_page(), re.MULTILINE)


def test_the_page_has_every_option_that_is_not_hidden() -> None:
    page = commands_page()
    common = page.partition("## Common options\n")[2].partition("\n## ")[0]
    for path, context in COMMANDS.items():
        part = page.partition(f"## modelctl {path}\n")[2].partition("\n## ")[0]
        for option in context.command.params:
            if isinstance(option, click.Option):
                assert any(f"{name}" in part for name in option.opts) is not option.hidden
                explained = any(re.search(rf"^\* `.*{name}\b", part + common, re.MULTILINE) for name in option.opts)
                assert explained is not option.hidden, (path, option.opts)
