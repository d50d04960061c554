"""``modelctl`` as a program of its own: with any standard streams, in a terminal, or with something wrong inside."""

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
    """The present one, with the repository on the path, and changed; None removes."""
    changed = {**os.environ, "PYTHONPATH": str(ROOT), **changes}
    return {name: value for name, value in changed.items() if value is not None}


def modelctl(
    *arguments: object, redirect: str = "", prelude: str = "", cwd: Path = ROOT, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Run a command.

    redirect   what a shell would be told of its streams, like ``>/dev/full`` or ``<&-``
    prelude    Python to run in the process before it
    variables  changes to the environment
    """
    program: tuple[object, ...] = MODELCTL
    if prelude:
        script = f"{prelude}\nfrom supervisor.cli import main\nraise SystemExit(main())"
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
    """``modelctl`` on a terminal of its own, and a person who reads and types. A context manager.

    columns  width of the terminal; None leaves it unknown
    """

    def __init__(
        self, *arguments: object, environment: Mapping[str, str], columns: int | None = None, **more: Any
    ) -> None:
        self._master, slave = pty.openpty()
        if columns is not None:
            termios.tcsetwinsize(slave, (24, columns))
        # Ctrl-C would make the terminal drop what the program has written and nobody has read yet.
        mode = termios.tcgetattr(slave)
        mode[3] |= termios.NOFLSH
        termios.tcsetattr(slave, termios.TCSANOW, mode)
        # whoever runs the tests may have set a size, which would count for more than the terminal's own
        known = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*MODELCTL, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=known | {"TERM": "dumb"},
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
        """Until the text stands on the screen; what stands before its end is then forgotten."""
        self.wait_for_match(re.escape(text))

    def wait_for_match(self, pattern: str) -> "re.Match[str]":
        """The first match on the screen; what stands before its end is then forgotten."""
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
        """Return everything on the screen that is not forgotten."""
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
