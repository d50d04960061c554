"""The help of ``modelctl`` and of each command is complete and fits the terminal."""

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from modelctl.cli.root import cli
from tests.cli.programs import modelctl


def commands(command: click.Command = cli, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield every command with the words that call it."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for word in command.list_commands(context):
            found = command.get_command(context, word)
            assert found is not None
            yield from commands(found, f"{name} {word}".strip())


ALL = dict(commands())


@pytest.mark.parametrize("name", ALL)
def test_every_command_and_option_is_explained(name: str) -> None:
    command = ALL[name]
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, f"{name} {parameter.opts}"
        elif isinstance(parameter, click.Argument):
            for shown in re.findall(r"[\w-]+", parameter.metavar or parameter.human_readable_name):
                assert shown.lower() in command.help.lower(), f"{name} {shown}"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("name", ALL)
def test_no_explanation_is_cut_nor_runs_over(name: str, width: int) -> None:
    done = CliRunner().invoke(cli, [*name.split(), "--help"], terminal_width=width, max_content_width=width)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    for line in lines[lines.index("") :]:  # after "Usage: ...", where "MODEL..." means several
        assert not line.endswith("..."), line
    if width >= 80:  # the names of the longest option are wider than 60 columns
        assert max(map(len, lines)) <= width, max(lines, key=len)


def test_every_command_that_talks_to_a_supervisor_can_reach_another_machine() -> None:
    """The commands without ``--connect`` are about files and devices of this machine, or start a supervisor."""
    here = {
        "init", "serve", "plan", "check", "doctor", "service install", "service status", "service uninstall",
        "keys list", "keys new", "keys revoke", "keys set", "completion", "config",
        "quantize",
    }  # fmt: skip
    for name, command in ALL.items():
        options = {option for each in command.params for option in each.opts}
        if not isinstance(command, click.Group):
            assert ("--connect" in options) is (name not in here), name
            assert "--json" in options or "--watch" not in options or name == "serve", name


def test_without_a_command_the_first_steps_and_the_exit_codes_are_told() -> None:
    done = modelctl()
    assert done.returncode == 2
    steps = re.findall("^    modelctl ([a-z]+) ", done.stderr, re.MULTILINE)
    assert steps == ["init", "serve", "run", "shutdown"]
    assert done.stderr.index("First steps") < done.stderr.index("Commands:") < done.stderr.index("Exit codes:")
