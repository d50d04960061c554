"""Run ``modelctl`` as a program: with redirected streams, in a terminal, or with code that runs before it."""

import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.serving import ROOT, wait_until

MODELCTL = (sys.executable, "-m", "supervisor")


def environment(**changes: str | None) -> dict[str, str]:
    """Return this process's environment with the repository on PYTHONPATH and with changes; None removes a variable."""
    changed = {**os.environ, "PYTHONPATH": str(ROOT), **changes}
    return {name: value for name, value in changed.items() if value is not None}


def modelctl(
    *arguments: object, redirect: str = "", prelude: str = "", cwd: Path = ROOT, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Run a command.

    redirect   redirections in shell syntax, like ``>/dev/full`` or ``<&-``
    prelude    Python code to run in the process before the command
    variables  changes to the environment
    """
    program: tuple[object, ...] = MODELCTL
    if prelude:
        script = f"{prelude}\nfrom modelctl.cli import main\nraise SystemExit(main())"
        program = (sys.executable, "-c", script)
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", *map(str, (*program, *arguments))],
        cwd=cwd,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


class Terminal:
    """``modelctl`` on a terminal of its own, with methods to type and to read. A context manager.

    columns  width of the terminal; None leaves it unknown
    kind     the variable TERM; a dumb terminal has no colours
    """

    def __init__(
        self,
        *arguments: object,
        environment: Mapping[str, str],
        columns: int | None = None,
        kind: str = "dumb",
        **more: Any,
    ) -> None:
        self._master, slave = pty.openpty()
        if columns is not None:
            termios.tcsetwinsize(slave, (24, columns))
        # Without NOFLSH, Ctrl-C would make the terminal drop output that the test has not read yet.
        mode = termios.tcgetattr(slave)
        mode[3] |= termios.NOFLSH
        termios.tcsetattr(slave, termios.TCSANOW, mode)
        # a size in the environment would take precedence over the size of this terminal
        known = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*MODELCTL, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=known | {"TERM": kind},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            **more,
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        self._screen = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> None:
        """Wait until the text is on the screen. Then forget the screen up to the end of the text."""
        self.wait_for_match(re.escape(text))

    def wait_for_match(self, pattern: str) -> "re.Match[str]":
        """Wait for a match on the screen and return it. Then forget the screen up to the end of the match."""
        match = wait_until(lambda: re.search(pattern, self.look()), what=f"{pattern!r} on {self._screen!r}")
        self._screen = self._screen[match.end() :]
        return match

    def wait_for_exit(self) -> int:
        def exit_code() -> tuple[int] | None:
            self.look()
            code = self.process.poll()
            return None if code is None else (code,)

        return wait_until(exit_code, what="the program's exit")[0]

    def look(self) -> str:
        """Return the text on the screen, without the forgotten part."""
        try:
            self._screen += os.read(self._master, 65536).decode().replace("\r", "")
        except (BlockingIOError, OSError):
            pass  # nothing new, or the program has ended
        return self._screen

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
