"""A group of commands whose help lists them."""

import click

from supervisor.cli.mistyped import NamesOptions, unknown_command


class CommandGroup(NamesOptions, click.Group):
    """A group whose help lists each command with the whole first sentence of the command's help.

    click itself would cut the sentence at the end of the line.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            raise unknown_command(ctx, args[0], self.names(ctx))
        return super().resolve_command(ctx, args)

    def names(self, ctx: click.Context) -> list[str]:
        """Return every name by which a command can be called."""
        return self.list_commands(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(command)) for name, command in commands if command is not None])


def _first_sentence(command: click.Command) -> str:
    paragraph = " ".join((command.help or "").partition("\n\n")[0].split())
    sentence, stop, _ = paragraph.partition(". ")
    return sentence + stop.strip()
