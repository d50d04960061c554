"""The man page has every command and option, and `man` shows it without a warning."""

import os
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from modelctl.cli.root import cli
from tools.docs.commands import walk
from tools.docs.manpage import man_page

PAGE = Path(__file__).resolve().parents[2] / "modelctl" / "cli" / "modelctl.1"


def shown() -> str:
    """Return the page as `man` shows it on a wide screen, each paragraph in one line."""
    environment = os.environ | {"LC_ALL": "C.UTF-8", "MANWIDTH": "500", "MAN_KEEP_FORMATTING": ""}
    command = ["man", "--warnings", "-l", str(PAGE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout


def test_every_command_option_and_example_is_on_the_page() -> None:
    page = man_page().replace("\\-", "-").replace("\\(aq", "'").replace("\\(ti", "~").replace("\\(ga", "`")
    with click.Context(cli, info_name="modelctl") as context:
        for each in walk(context):
            part = page.partition(f".SS {each.command_path} ")[2].partition("\n.SS ")[0].partition("\n.SH ")[0]
            assert part, each.command_path
            for option in each.command.params:
                if isinstance(option, click.Option):
                    assert any(name in part for name in option.opts) is not option.hidden, (each.command_path, option)
            for line in getattr(each.command, "examples", {}):
                assert line.replace("^", "\\(ha") in part


@pytest.mark.skipif(shutil.which("man") is None, reason="there is no man")
def test_man_shows_the_page_without_a_warning() -> None:
    text = shown()
    for title in ("NAME", "SYNOPSIS", "COMMANDS", "COMMON OPTIONS", "EXIT STATUS", "ENVIRONMENT", "FILES"):
        assert f"\n{title}\n" in text
    assert "modelctl keys new web --http --models 'letters,qwen*' --expires 30d" in text
    assert "~/.config/modelctl/models.yaml" in text


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="there is no mandoc")
def test_mandoc_finds_nothing_wrong() -> None:
    done = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", str(PAGE)], capture_output=True, text=True)
    # A date would make a page that is generated today differ from the page of yesterday.
    assert [line for line in done.stdout.splitlines() if "missing date" not in line] == []
