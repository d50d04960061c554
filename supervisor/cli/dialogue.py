"""Hold a conversation in the terminal: each line is a question or a command."""

import click

from protocol.errors import ErrorCode, WireError
from supervisor.cli import exit_codes
from supervisor.cli.conversation import ChatSession
from supervisor.cli.hints import say

QUOTES = '"""'
HELP = f"""\
/clear    forget the conversation; the system message stays
/undo     forget the last question and its answer
/help     show this
/bye      end the conversation; Ctrl-D does, too
{QUOTES}       begin a text of several lines, which ends with {QUOTES}; nothing in it is a command
Ctrl-C    end the answer; at the prompt, drop the line"""
GREETING = "(/help lists the commands; /bye or Ctrl-D ends the conversation)"


class _Bye(Exception):
    """The user has ended the conversation."""


def hold(conversation: ChatSession) -> int:
    """Read questions and print answers until the user ends the conversation. Returns the exit code."""
    click.echo(GREETING, err=True)
    if not conversation.chat:
        message = f"{conversation.model} is asked without a chat template: each question is sent as it is, alone"
        click.echo(message, err=True)
    try:
        import readline  # noqa: F401  (line editing)
    except ImportError:
        pass
    while True:
        try:
            _one_turn(conversation)
        except (EOFError, _Bye):
            return exit_codes.OK
        except KeyboardInterrupt:
            print()  # Ctrl-C at the prompt drops the line, as in a shell
        except WireError as e:
            if e.code is ErrorCode.CONNECTION_LOST:
                raise
            say(f"modelctl: {e}")


def _one_turn(conversation: ChatSession) -> None:
    """Read one question or command, and carry it out. Raises EOFError, _Bye, and the error of the request."""
    line = input(">>> ")
    begin = line.lstrip()
    if begin.startswith(QUOTES):
        text = _read_quoted(begin.removeprefix(QUOTES))
    elif begin.startswith("/"):
        _obey(begin.rstrip(), conversation)
        return
    else:
        text = line
    if not text.strip():
        return
    if conversation.take_turn(text):
        click.echo("(cancelled)", err=True)


def _read_quoted(first: str) -> str:
    """Read a text of several lines up to the closing quotes. ``first`` is the text behind the opening ones."""
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        try:
            lines.append(input("... "))
        except EOFError:
            click.echo(f"\nmodelctl: not sent: the text was not closed with {QUOTES}", err=True)
            raise
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


def _obey(command: str, conversation: ChatSession) -> None:
    history = conversation.history
    match command:
        case "/bye" | "/exit" | "/quit":
            raise _Bye
        case "/help" | "/?":
            click.echo(HELP)
        case "/clear":
            conversation.begin_anew()
            click.echo("(the conversation begins anew)", err=True)
        case "/undo":
            count = len(history) - 1
            message = (
                f"(the last turn is forgotten; {count} left)" if history.undo() else "(there is no turn to forget)"
            )
            click.echo(message, err=True)
        case _:
            word = command.split()[0]
            click.echo(f"modelctl: no command {word!r}: /help lists them; to send it as text, put it between {QUOTES}",
                       err=True)  # fmt: skip
