"""How an error ends a command: one line on stderr, or with ``--json`` one object, and an exit code."""

import json
import os
import traceback
from typing import Any

import click

from protocol.errors import ConnectionLost, ErrorCode, WireError
from supervisor.cli import exit_codes
from supervisor.cli.hints import completed, say

DEBUG_VARIABLE = "MODELCTL_DEBUG"
"""Set, errors come with their traceback."""


class Failure(Exception):
    """A command's own error.

    exit_code  see ``exit_codes``
    name       what ``--json`` calls it
    lines      for people, one each
    """

    def __init__(self, exit_code: int, name: str, *lines: str) -> None:
        super().__init__("; ".join(lines))
        self.exit_code = exit_code
        self.name = name
        self.lines = lines


def report(error: BaseException, *, as_json: bool) -> int:
    """Say what ended the command. Returns the exit code."""
    code, fields, lines = _judge(error)
    try:
        if os.environ.get(DEBUG_VARIABLE) and lines:
            traceback.print_exception(error)
        if as_json and fields is not None:
            click.echo(json.dumps({"error": {**fields, "message": completed(fields["message"])}}), err=True)
        elif isinstance(error, click.ClickException):
            error.show()
        else:
            for line in lines:
                say(f"modelctl: {line}")
    except OSError:
        pass  # stderr is gone as well; the exit code remains
    return code


def _judge(error: BaseException) -> tuple[int, dict[str, Any] | None, tuple[str, ...]]:
    """Exit code, what ``--json`` shows, and the lines for people. None and no lines: there is nothing to say."""
    match error:
        case click.exceptions.Exit():
            return error.exit_code, None, ()
        case SystemExit():
            return error.code if isinstance(error.code, int) else exit_codes.SOFTWARE, None, ()
        case click.Abort() | KeyboardInterrupt():
            return exit_codes.INTERRUPTED, None, ()
        case BrokenPipeError():
            return exit_codes.OK, None, ()  # `modelctl ps | head`: the reader has had enough
        case click.ClickException():
            return error.exit_code, {"name": "usage", "message": error.format_message()}, ()
        case Failure():
            return error.exit_code, {"name": error.name, "message": str(error)}, error.lines
        case ConnectionLost():
            return exit_codes.UNAVAILABLE, error.to_wire(), (error.message,)
        case WireError(code=ErrorCode.UNAUTHORIZED | ErrorCode.FORBIDDEN):
            return exit_codes.NOPERM, error.to_wire(), (str(error),)
        case WireError():
            return exit_codes.FAILED, error.to_wire(), (str(error),)
        case TimeoutError():  # an OSError by birth, but what the client raises for a supervisor that does not answer
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
    """The message in one line, without the number that an OSError begins with."""
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename is not None else ""
        return f"{place}{error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
