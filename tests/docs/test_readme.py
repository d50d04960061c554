"""The README is short and true: figures are those of the result files, commands exist, and each models.yaml is valid.

The same checks run on the other handwritten pages.
"""

import json
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from modelctl.cli.root import cli
from supervisor.config.file import load_config
from tests.docs.references import ROOT
from tools.docs import headlines, pages
from tools.docs.commands import walk
from tools.docs.performance import result_files

README = ROOT / "README.md"
MOST_LINES = 220
"""A limit of the README's lines, so that it can be read in five minutes."""
WRITTEN = [README, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))] + [
    path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in pages.FILES
]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(path: Path, *languages: str) -> list[str]:
    """Return the blocks of code in these languages. Lines that end with a backslash are joined with the next one."""
    return [text.replace("\\\n", " ") for language, text in _BLOCK.findall(path.read_text()) if language in languages]


def commands(path: Path) -> list[list[str]]:
    """Return the arguments of each ``modelctl`` command of a page, without comments and commands after a pipe."""
    shown = [line for text in blocks(path, "sh", "console") for line in text.splitlines()]
    shown += [line.removeprefix("$ ") for text in blocks(path, "") for line in text.splitlines() if line[:2] == "$ "]
    words = [shlex.split(re.split(r" [|<>] ", line)[0], comments=True) for line in shown]
    return [line[1:] for line in words if line[:1] == ["modelctl"]]


def parse(arguments: list[str]) -> None:
    """Read a command line without running it. Raises click.UsageError."""
    with click.Context(cli, info_name="modelctl") as root:
        contexts = {tuple(context.command_path.split()[1:]): context for context in walk(root)}
        path = next((tuple(arguments[:n]) for n in (2, 1) if tuple(arguments[:n]) in contexts), ())
        context = contexts.get(path, root)
        context.command.make_parser(context).parse_args(arguments[len(path) :])
        if not path and not arguments[0].startswith("-"):
            raise click.UsageError(f"there is no command {arguments[0]}")


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES


def test_a_figure_of_the_readme_that_differs_from_its_result_file_is_found() -> None:
    text = README.read_text()
    assert pages.filled(text) == text, "run `python -m tools.docs`, and commit it"
    stale = re.sub(r"\| [\d.]+ (times|ms) \|", r"| 0.1 \1 |", text, count=1)
    assert stale != text
    assert pages.filled(stale) == text


def test_the_readme_counts_every_missed_target_and_says_where_they_stand() -> None:
    files = result_files()
    missed = [r for file in files.values() for r in file.results if r["meets"] is False]
    assert f"and {len(missed)} [miss it](docs/performance.md#missed-targets)" in headlines.figures(files)


def test_a_result_file_that_has_lost_a_figure_of_the_readme_is_an_error() -> None:
    files = result_files()
    del files["chaos"]
    with pytest.raises(KeyError, match="chaos"):
        headlines.figures(files)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_each_command_of_a_page_is_one(path: Path) -> None:
    for arguments in commands(path):
        parse(arguments)


@pytest.mark.parametrize("line", ["modelctl serve --detatch # quietly", "modelctl sreve", "modelctl keys nwe a"])
def test_a_wrong_command_of_a_page_is_found(tmp_path: Path, line: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```sh\n{line}\n```\n")
    (arguments,) = commands(page)
    with pytest.raises(click.UsageError):
        parse(arguments)


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_each_models_yaml_of_a_page_is_valid(path: Path, tmp_path: Path) -> None:
    for text in blocks(path, "yaml"):
        if "models:" not in text:
            continue
        for number, entry in enumerate(yaml.safe_load(text)["models"].values()):
            if not (given := entry["model_dir"]).startswith("demo:"):  # stands for a directory of the reader
                text = text.replace(given, str(make_model(tmp_path / str(number))))
        file = tmp_path / "models.yaml"
        file.write_text(text)
        load_config(file)


def make_model(directory: Path) -> Path:
    """Make a model's directory with the few files that the check of models.yaml needs."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return directory
