"""Make the page of commands from click: text, usage, options and examples of each."""

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import click

from modelctl.cli import exit_codes
from modelctl.cli.root import ALIASES, Command, cli
from protocol.attribute_docs import attribute_docs
from tools.docs.markdown import page, table, text

INTRODUCTION = """\
`modelctl COMMAND --help` shows these texts, too. Most commands talk to the supervisor of your user on this machine.
With `--json` a command prints JSON, and an error is JSON on standard error. A command that goes on prints one line of
JSON at a time. MODEL... stands for names, and for patterns in quotes such as `'llama-*'`."""
COMMON = 4
"""An option that so many commands have, with the same explanation, is explained once."""
SEVERAL = 2
"""So many options that an earlier command explains are named together, with a link to that command."""
_PATTERN = re.compile(
    r"\s*MODEL may be a pattern in quotes[^.]*\.|; a pattern such as 'llama-\*' needs quotes|: names, or quoted "
    r"patterns such as 'llama-\*'"
)
"""What many helps say of MODEL, and the page once."""


def commands_page() -> str:
    """Return the page."""
    with click.Context(cli, info_name="modelctl", **cli.context_settings) as context:
        commands = list(walk(context))
        common = common_options(commands)
        links = [
            f"[{each.command_path.partition(' ')[2]}](#{each.command_path.replace(' ', '-')})" for each in commands
        ]
        first = {record: each.command_path for each in reversed(commands) for record in option_records(each)}
        parts = [part for each in commands for part in _part(each, common, first)]
    return page(
        "Commands",
        "the commands in modelctl/cli",
        INTRODUCTION,
        ", ".join(links)
        + ". Other names: "
        + ", ".join(f"`{other}` is `{name}`" for other, name in ALIASES.items())
        + ".",
        "## Common options",
        "Each command names those that it has at the end of its first line.",
        _options(common),
        *parts,
        "## Exit codes",
        table(("code", "meaning"), _exit_codes()),
    )


def common_options(commands: Iterable[click.Context]) -> list[tuple[str, str]]:
    """Return the names and the explanation of each option that is explained once."""
    uses = Counter(record for each in commands for record in option_records(each))
    return [record for record, count in uses.items() if count >= COMMON]


def option_records(context: click.Context) -> list[tuple[str, str]]:
    """Return the names and the explanation of each option that is not hidden."""
    options = [each for each in context.command.params if isinstance(each, click.Option)]
    return [record for option in options if (record := option.get_help_record(context)) is not None]


def names_of_common(context: click.Context, common: Sequence[tuple[str, str]]) -> list[str]:
    """Return the long names of a command's options that are explained once."""
    return [names.split(",")[-1].split()[0] for names, meaning in option_records(context) if (names, meaning) in common]


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


def _part(
    context: click.Context, common: Sequence[tuple[str, str]], first: Mapping[tuple[str, str], str]
) -> Iterator[str]:
    """Yield the part of a command. ``first`` has the first command with an option, which explains it."""
    command = context.command
    yield f"## {context.command_path}"
    pieces = [piece for piece in command.collect_usage_pieces(context) if piece != command.options_metavar]
    also = [f"[{name}]" for name in names_of_common(context, common)]
    yield f"`{' '.join([context.command_path, *pieces, *also])}`"
    yield text(_PATTERN.sub("", inspect.cleandoc(command.help or "")).strip())
    own = [record for record in option_records(context) if record not in common]
    uses = Counter(first[record] for record in own)
    before = {path for path, count in uses.items() if count >= SEVERAL and path != context.command_path}
    lines = [_options(record for record in own if first[record] not in before)] if own else []
    for path in sorted(before):
        names = ", ".join(f"`{names}`" for names, meaning in own if first[names, meaning] == path)
        lines.append(f"* {names}: as for [{path.partition(' ')[2]}](#{path.replace(' ', '-')}).")
    if any(lines):
        yield "\n".join(filter(None, lines))
    if isinstance(command, Command) and command.examples:
        yield "\n".join(["```sh", *_examples(command), "```"])


def _examples(command: Command) -> Iterable[str]:
    """Return the examples of a command. If there is one only, the text above says what it does."""
    if len(command.examples) == 1:
        return command.examples
    return [f"{line}  # {meaning}" for line, meaning in command.examples.items()]


def _options(records: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"* `{names}`: {_shown(meaning)}" for names, meaning in records)


def _shown(meaning: str) -> str:
    """Return an option's help as Markdown. The default is at its end, in square brackets."""
    return text(" ".join(meaning.replace("[", "\\[").replace("*", "\\*").split()))


def _exit_codes() -> list[tuple[str, str]]:
    docs = attribute_docs(exit_codes)
    return [(str(code), text(docs[name])) for name, code in vars(exit_codes).items() if name.isupper()]
