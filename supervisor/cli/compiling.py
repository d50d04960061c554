"""Compile ExLlamaV2's CUDA code before serving, once and visibly, in a process of its own.

Workers would compile the code, too, under the same lock. But then one worker would compile for minutes while all models
seem to hang in loading. The module that the process runs (``EXTENSION_BUILD``) describes its output.

The builder has a session of its own. So Ctrl-C and a hangup of the terminal reach only ``serve``, which then ends the
builder. If ``serve`` is killed (SIGKILL), the kernel sends the builder a signal.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable

import click

from supervisor.cli.live_lines import Shown, Ticking
from supervisor.cli.signalled import Signalled, raised
from supervisor.cli.streams import drop_unwritten
from supervisor.worker_modules import EXTENSION_BUILD

ENGINE = "exllamav2"
END_S = 0.5
"""Seconds that the builder has to end its compilers. After that the builder is killed, and its compilers end by
themselves."""


def compile_for(engines: Iterable[str], *, quiet: bool) -> None:
    """Compile the extension if one of the engines needs it. Show the steps on stderr, and wait until it is done.

    A failure is reported, but does not end serving: models of other engines are served, and ``status`` says why those
    of this engine cannot be. Ctrl-C ends the builder (KeyboardInterrupt). SIGTERM and SIGHUP end the builder, and then
    this process, as always before serving. Call this in the main thread only (ValueError).
    """
    if ENGINE not in engines:
        return
    try:
        with raised(signal.SIGTERM, signal.SIGHUP):
            _compile(_Line(quiet))
    except Signalled as e:
        # The parent then sees which signal ended this process. A service manager counts such an end as clean.
        signal.raise_signal(e.number)


def _compile(shown: "_Line") -> None:
    from supervisor.cli.detach import child_environment  # a third of the imports of `serve`, needed only to compile

    # From the main thread, because the builder ends with the thread that starts it (PR_SET_PDEATHSIG).
    with subprocess.Popen(
        [*EXTENSION_BUILD, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
        start_new_session=True,
    ) as builder:
        assert builder.stdout is not None
        assert builder.stderr is not None
        try:
            for line in builder.stdout:
                shown.show(line.split())
            code = builder.wait()
        except BaseException:
            shown.close()
            _end(builder)
            raise
        shown.close()
        if code:
            why = builder.stderr.read().strip().rpartition("\n")[2] or f"exit code {code}"
            _say(f"modelctl: ExLlamaV2's CUDA code is not compiled, its models will not load: {why}\n")


def _end(builder: "subprocess.Popen[str]") -> None:
    builder.terminate()  # the builder ends its compilers, too
    try:
        builder.wait(END_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also when a second signal cuts the wait short
        builder.kill()


class _Line:
    """The present step on stderr: on a terminal a bar that is redrawn, elsewhere a line per step."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty() and not quiet
        self._ticking: Ticking | None = None

    def show(self, words: list[str]) -> None:
        """Show what the builder has printed."""
        if (text := _message_of(words)) is None or self._quiet:
            return
        if not self._live:
            _say(f"{text}\n")
            return
        line = _shown(words)
        if self._ticking is None:
            self._ticking = Ticking(line).__enter__()
        self._ticking.line = line

    def close(self) -> None:
        if self._ticking is not None:
            self._ticking.__exit__()
            self._ticking = None


def _shown(words: list[str]) -> Shown:
    """Return the line for a terminal."""
    text = _message_of([*words[:1], "0", "0"] if words[0] == "build" else words) or ""
    done, total = map(int, words[1:]) if words[0] == "build" else (0, 0)
    return Shown(text, text, {"done": done, "total": total, "unit": "steps"})


def _say(text: str) -> None:
    try:
        click.echo(text, err=True, nl=False)
    except OSError:  # nobody reads stderr any more; that is no reason to give up a build of minutes
        drop_unwritten()


def _message_of(words: list[str]) -> str | None:
    match words:
        case ["build", "0", "0"]:  # the number of steps is not known yet
            return "compiling ExLlamaV2's CUDA code"
        case ["build", done, total]:
            return f"compiling ExLlamaV2's CUDA code: {done} of {total}"
        case ["waiting"]:
            return "another process is compiling ExLlamaV2's CUDA code"
    return None
