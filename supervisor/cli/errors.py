"""The end of a command by an error: one line on stderr, or one object for ``--json``, and an exit code."""

import json
import os
import sys
import traceback
from typing import Any

import click

from protocol.errors import ConnectionLost, ErrorCode, WireError
from protocol.process.masking import masked
from supervisor.cli import exit_codes
from supervisor.cli.hints import completed, say

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
