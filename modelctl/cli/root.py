"""The group of all commands. The module of a command is imported when the command is called, which saves time."""

import importlib
import io
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, TextIO, TypeVar

import click

from modelctl.cli import exit_codes
from protocol import __version__
from protocol.errors import ConnectionLost, ErrorCode, WireError
from protocol.process.birth import forbid_core_dumps
from protocol.process.shown import harmless, masked

# A group of commands whose help lists them.


_C = TypeVar("_C", bound=Callable[..., Any])


class _Listed(click.Command):
    """A command that the help of its group lists with the whole first sentence of the command's help.

    click itself would cut the sentence at the end of the line.
    """

    def get_short_help_str(self, limit: int = 45) -> str:
        paragraph = " ".join((self.help or "").partition("\n\n")[0].split())
        sentence, stop, _ = paragraph.partition(". ")
        return sentence + stop.strip()


class CommandGroup(_Listed, click.Group):
    """A group of commands."""


# Complete the commands in messages with the options that they need to reach the same supervisor.
#
# A message may come from the command itself, from the client library or, over the wire, from the supervisor. The code
# that makes a message does not know with which options the command was called. So this module adds the options when a
# message is shown. A hint is a command between backquotes: `modelctl start letters`.


_HINT = re.compile(r"`modelctl ([a-z-]+)([^`]*)`")
_HERE = frozenset({"serve", "plan", "doctor"})
"""Commands that take --runtime-dir only."""
_needed: dict[str, str] = {}
"""The options that hints repeat: option → value. A process runs one command only."""

ADD_TEMPLATE = "no chat template, so there are no conversations: add the model's chat_template.jinja to its directory"
"""The words about a model without a chat template."""


def need(option: str, value: object) -> None:
    """Make hints repeat an option.

    Do not call this for a default or for a value from the environment, because the next command finds these by itself.
    """
    _needed[option] = str(value)


def completed(message: str) -> str:
    """Return the message with the options that its hints need."""
    return _HINT.sub(_complete, message)


def say(message: str) -> None:
    """Print a message to stderr, with its hints completed."""
    click.echo(masked(completed(message)), err=True)


def _complete(hint: "re.Match[str]") -> str:
    verb, rest = hint.groups()
    wanted: tuple[str, ...] = ()
    if verb in _ANYWHERE and "--connect" in _needed:
        wanted = ("--connect", "--key-file")
    elif verb in _ANYWHERE or verb in _HERE:
        wanted = ("--runtime-dir",)
    elif verb == "keys":
        wanted = ("--keys",) if "--keys" in _needed else ("--config",)
    options = [f" {name} {shlex.quote(_needed[name])}" for name in wanted if name in _needed and f"{name} " not in rest]
    return f"`modelctl {verb}{rest}{''.join(options)}`"


# The end of a command by an error: one line on stderr, or one object for ``--json``, and an exit code.


DEBUG_VARIABLE = "MODELCTL_DEBUG"
"""If this variable is set, errors are printed with their traceback."""


class CommandFailure(Exception):
    """An error of a command.

    exit_code  see ``exit_codes``
    name       the name in the output of ``--json``
    lines      lines for people
    """

    def __init__(self, exit_code: int, name: str, *lines: str) -> None:
        super().__init__("; ".join(lines))
        self.exit_code = exit_code
        self.name = name
        self.lines = lines


def report(error: BaseException, *, as_json: bool) -> int:
    """Print the error that ended the command. Return the exit code."""
    code, fields, lines = _judge(error)
    try:
        if os.environ.get(DEBUG_VARIABLE) and lines:
            traceback.print_exception(error)
        if as_json and fields is not None:
            click.echo(json.dumps({"error": {**fields, "message": masked(completed(fields["message"]))}}), err=True)
        elif isinstance(error, click.ClickException):
            error.show()
        else:
            if code == exit_codes.INTERRUPTED and lines and sys.stderr.isatty():
                click.echo(err=True)  # the terminal shows ^C in this line
            for line in lines:
                say(f"modelctl: {line}")
    except OSError:
        pass  # stderr is gone as well; the exit code remains
    return code


def _judge(error: BaseException) -> tuple[int, dict[str, Any] | None, tuple[str, ...]]:
    """Return exit code, fields for ``--json``, and lines for people. None and no lines if there is nothing to print."""
    match error:
        case click.exceptions.Exit():
            return error.exit_code, None, ()
        case SystemExit():
            return error.code if isinstance(error.code, int) else exit_codes.SOFTWARE, None, ()
        case click.Abort() | KeyboardInterrupt():
            return exit_codes.INTERRUPTED, None, ()
        case BrokenPipeError():
            return exit_codes.OK, None, ()  # `modelctl ps | head`: the reader has closed the pipe
        case click.ClickException():
            return error.exit_code, {"name": "usage", "message": error.format_message()}, ()
        case CommandFailure():
            return error.exit_code, {"name": error.name, "message": str(error)}, error.lines
        case ConnectionLost():
            return exit_codes.UNAVAILABLE, error.to_wire(), (error.message,)
        case WireError(code=ErrorCode.UNAUTHORIZED | ErrorCode.FORBIDDEN):
            return exit_codes.NOPERM, error.to_wire(), (str(error),)
        case WireError():
            return exit_codes.FAILED, error.to_wire(), (str(error),)
        case TimeoutError():  # an OSError in Python; the client raises it if the supervisor does not answer
            return _plain(exit_codes.UNAVAILABLE, "timeout", _line(error))
        case OSError() | ValueError():
            return _plain(exit_codes.CONFIG, "not_usable", _line(error))
    hint = "" if os.environ.get(DEBUG_VARIABLE) else f"; with ${DEBUG_VARIABLE}=1 it shows where"
    return _plain(
        exit_codes.SOFTWARE, "fault", f"a fault of modelctl itself: {type(error).__name__}: {_line(error)}{hint}"
    )


def _plain(code: int, name: str, line: str) -> tuple[int, dict[str, Any], tuple[str, ...]]:
    return code, {"name": name, "message": line}, (line,)


def _line(error: BaseException) -> str:
    """Return the message in one line, without the number at the beginning of an OSError."""
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename is not None else ""
        return f"{place}{error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


# Prepare the standard streams when a command begins, and drop output that cannot be written at its end.
#
# Closed streams are replaced, no text steers a terminal, and errors say which stream they are of.


def open_missing() -> None:
    """Open /dev/null in place of standard streams that the caller has closed.

    Otherwise the next socket would get the stream's number, and output would go into that socket. ``sys.stdin`` stays
    None, so that a command that needs standard input can report that it is closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


class Output(io.TextIOWrapper):
    """A standard stream whose errors have its name. Python's own say "No space left on device", and not of what."""

    def __init__(self, stream: TextIO, name: str) -> None:
        """Take the place of a stream, and go on with its buffer."""
        settings: dict[str, Any] = {key: getattr(stream, key) for key in ("line_buffering", "write_through")}
        super().__init__(stream.buffer, encoding=stream.encoding, errors=stream.errors, **settings)
        self._called = name
        self._former = stream  # it closes the buffer at its end

    def write(self, text: str) -> int:
        with self._naming():
            return super().write(text)

    def flush(self) -> None:
        with self._naming():
            super().flush()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            e.filename = self._called
            raise


class TerminalOutput(Output):
    """A standard stream that is a terminal. ``write`` makes each text harmless, and ``steer`` does not.

    painted  whether the text may have modelctl's colours
    raw      whether every text is written as it is
    """

    painted = True
    raw = False

    def write(self, text: str) -> int:
        return super().write(text if self.raw else harmless(text, painted=self.painted))

    def steer(self, sequence: str) -> None:
        """Write what the terminal shall obey."""
        super().write(sequence)


def take_streams() -> None:
    """Let no text that a command prints on a terminal steer it, and let errors of standard output say so.

    ``take_text`` and ``shown.steer`` make exceptions.
    """
    sys.stdout = (TerminalOutput if sys.stdout.isatty() else Output)(sys.stdout, "standard output")
    if sys.stderr.isatty():
        sys.stderr = TerminalOutput(sys.stderr, "standard error")
        sys.stderr.painted = False


def take_text(*, raw: bool) -> None:
    """Let standard output take texts of models or logs from now on. They get no colours, either.

    raw  let them steer the terminal, because the user wants every character
    """
    if isinstance(sys.stdout, TerminalOutput):
        sys.stdout.painted, sys.stdout.raw = False, raw


def drop_unwritten() -> None:
    """Drop output that cannot be written (closed pipe, full disk), so that the interpreter does not complain at
    exit."""
    for number, stream in enumerate((sys.stdout, sys.stderr), start=1):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)


# Colours: whether to use them, and which colour a state has.
#
# Everything is printed with colours by ``click.echo``, which takes them out again where ``in_colour`` says no.


_GOOD, _BUSY, _WRONG = "green", "yellow", "red"
STATES: Final = {
    "ready": _GOOD, "running": _GOOD, "ok": _GOOD,
    "starting": _BUSY, "loading": _BUSY, "waking": _BUSY, "falling_asleep": _BUSY, "draining": _BUSY,
    "stopping": _BUSY, "queued": _BUSY, "warn": _BUSY, "WARNING": _BUSY,
    "backoff": _WRONG, "failed": _WRONG, "bad": _WRONG, "ERROR": _WRONG, "CRITICAL": _WRONG,
}  # fmt: skip
"""The colour of a state of a model or a request, of a verdict of the doctor, and of the level of an event. Other states
have the terminal's own colour."""


def chosen() -> bool | None:
    """Return whether the environment asks for colours or forbids them; None leaves it to whether there is a terminal.

    See https://bixense.com/clicolors: NO_COLOR forbids colours, and CLICOLOR_FORCE asks for them, even in a pipe.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("CLICOLOR_FORCE", "0") not in ("", "0"):
        return True
    return False if os.environ.get("TERM") == "dumb" else None


def in_colour() -> bool:
    """Return whether standard output gets colours."""
    asked = chosen()
    return sys.stdout.isatty() if asked is None else asked


def title(text: str) -> str:
    """Return the text in bold."""
    return click.style(text, bold=True)


def painted(text: str, state: str | None = None) -> str:
    """Return the text in the colour of a state.

    state  None: the text itself begins with it
    """
    colour = STATES.get((text if state is None else state).partition(" ")[0].rstrip(","))
    return text if colour is None else click.style(text, fg=colour)


_COMMANDS = {
    "init": "modelctl.cli.init:init",
    "serve": "modelctl.cli.serve:serve",
    "start": "modelctl.cli.models:start",
    "stop": "modelctl.cli.models:stop",
    "unload": "modelctl.cli.models:unload",
    "restart": "modelctl.cli.models:restart",
    "sleep": "modelctl.cli.models:sleep",
    "wake": "modelctl.cli.models:wake",
    "reload": "modelctl.cli.models:reload",
    "shutdown": "modelctl.cli.models:shutdown",
    "ps": "modelctl.cli.views:ps",
    "status": "modelctl.cli.views:status",
    "top": "modelctl.cli.top:top",
    "cluster": "modelctl.cli.views:cluster",
    "usage": "modelctl.cli.requests:usage",
    "metrics": "modelctl.cli.serve:metrics",
    "run": "modelctl.cli.run:run",
    "requests": "modelctl.cli.requests:requests",
    "story": "modelctl.cli.requests:story",
    "cancel": "modelctl.cli.requests:cancel",
    "events": "modelctl.cli.logs:events",
    "logs": "modelctl.cli.logs:logs",
    "log-level": "modelctl.cli.logs:log_level",
    "bench": "modelctl.cli.bench:bench",
    "plan": "modelctl.cli.plan:plan",
    "check": "modelctl.cli.check:check",
    "config": "modelctl.cli.check:config",
    "quantize": "modelctl.cli.quantize:quantize",
    "doctor": "modelctl.cli.doctor:doctor",
    "service": "modelctl.cli.service:service",
    "keys": "modelctl.cli.keys:keys",
    "completion": "modelctl.cli.options:completion",
    "gateway": "modelctl.cli.serve:gateway",
}
ALIASES = {"load": "start", "ls": "ps"}
_ANYWHERE = {*_COMMANDS, *ALIASES} - {*_HERE, "init", "check", "config", "quantize", "service", "keys", "completion"}
"""Commands that take --runtime-dir, or --connect and --key-file."""


class _LazyGroup(CommandGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        target = _COMMANDS.get(ALIASES.get(name, name))
        if target is None:
            return None
        module, attribute = target.split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


def instead(option: str, text: Callable[[], str], meaning: str) -> Callable[[_C], _C]:
    """Return an option with which a command prints a text, and does nothing else.

    meaning  the help of the option
    """

    def show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted:
            click.echo(text(), nl=False)
            context.exit()

    return click.option(option, is_flag=True, is_eager=True, expose_value=False, callback=show, help=meaning)


def _version() -> str:
    from supervisor.workers.environment import loss

    return f"modelctl, version {__version__}\n{loss() or 'compiled modules are in use'}\n"


_EXIT_CODES = """\
Exit codes: 0 done, 1 a model or request failed, 2 wrong usage, 3 no room (plan), 69 no supervisor is running, 70 a
fault of modelctl, 75 another supervisor is running, 77 the key may not do that, 78 models.yaml or the environment is
not usable, 130 interrupted."""


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXIT_CODES)
@instead("--version", _version, "Show the version, and whether the compiled modules are in use.")
def cli() -> None:
    """Serve several ExLlamaV2 models on one box: one process per model, pinned to its GPU.

    \b
    First steps:
      modelctl init ~/models     write ./models.yaml, with an entry for each model
      modelctl serve --detach    serve the models of ./models.yaml
      modelctl run NAME          ask the model NAME
      modelctl shutdown          end everything
    """


# click finds in here which command was probably meant by a mistyped one. get_command finds the commands themselves.
cli.commands = dict.fromkeys((*_COMMANDS, *ALIASES), click.Command(None))


def run() -> int:
    """Run the command line. Return the exit code. An error becomes one line on stderr."""
    open_missing()
    take_streams()
    forbid_core_dumps()  # for the supervisor and its children, and for commands with a prompt or a key in memory
    try:
        code = _call()
        sys.stdout.flush()
    except BaseException as e:
        code = report(e, as_json=_json_wanted())
    drop_unwritten()
    return code


def _call() -> int:
    streams = sys.stdout, sys.stderr
    try:
        result = cli.main(standalone_mode=False, complete_var="_MODELCTL_COMPLETE", color=chosen())
    except SystemExit:
        if sys.stdout is streams[0]:
            raise  # the shell's completion
        # click handles a closed pipe even with standalone_mode=False: it replaces the streams by streams that ignore
        # the error, and exits with 1.
        sys.stdout, sys.stderr = streams
        raise BrokenPipeError from None
    return result if isinstance(result, int) else exit_codes.OK


def _json_wanted() -> bool:
    """Return whether errors must be JSON. This reads sys.argv, so that it works for errors of the command line
    itself."""
    options = sys.argv[1:]
    return "--json" in (options[: options.index("--")] if "--" in options else options)


# A command that shows examples at the end of its help.


class Command(_Listed):
    """A click command with examples. The page ``docs/commands.md`` shows them, too.

    examples  {command line: what it does}
    """

    def __init__(self, *args: Any, examples: Mapping[str, str] = MappingProxyType({}), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line, meaning in self.examples.items():
                    # Do not wrap the lines: nobody could copy a command line that is wrapped.
                    formatter.write(f"  # {meaning}\n  {line}\n")
        super().format_epilog(ctx, formatter)


def command(
    *examples: tuple[str, str], of: click.Group | None = None, name: str | None = None
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return the decorator that makes a function a command.

    examples  a command line, and what it does
    of        the group that the command belongs to; None for ``modelctl`` itself, which imports it when it is called
    name      None for the function's name
    """
    return (of or click).command(name, cls=Command, examples=dict(examples))
