"""Before serve: ExLlamaV2's CUDA code compiled, once and visibly, in a process of its own.

Workers would do it, too, under the same lock, but then one compiles for minutes while models seem to hang in loading.
What the process prints is said in its module, ``model_worker.engines.exllamav2.extension``.

The builder has a session of its own, so that a terminal's Ctrl-C and hangup reach serve alone, which ends it. Where
serve can end nothing any more (SIGKILL), the kernel sends the builder a signal.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

import click

from supervisor.cli.streams import drop_unwritten

ENGINE = "exllamav2"
END_S = 0.5
"""How long the builder is given to end its compilers. After that they end by themselves, because it is gone."""
# -P, because a torch.py in the directory where the user happens to be is not PyTorch
_BUILDER = (sys.executable, "-P", "-m", "model_worker.engines.exllamav2.extension")


def compile_for(engines: Iterable[str], *, quiet: bool) -> None:
    """Wait until the extension is there, if one of the engines needs it; the steps are shown on stderr.

    A failure is said, and is not the end of serving: models of other engines are served, and those of this one say in
    ``status`` why they cannot be. Ctrl-C ends the builder (KeyboardInterrupt); SIGTERM and SIGHUP end it and then, as
    anywhere before serving, this process. Only in the main thread (ValueError).
    """
    if ENGINE not in engines:
        return
    try:
        with _raised(signal.SIGTERM, signal.SIGHUP):
            _compile(_Line(quiet))
    except _Signalled as e:
        # who waits for this process sees what has ended it; to a service manager that is a clean end
        signal.raise_signal(e.number)


def _compile(shown: "_Line") -> None:
    from supervisor.cli.detach import child_environment  # a third of what `serve` imports, for those who compile

    # from the main thread: the builder lives as long as the thread that starts it (PR_SET_PDEATHSIG)
    with subprocess.Popen(
        [*_BUILDER, str(os.getpid())],
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
                if message := _message_of(line.split()):
                    shown.show(message)
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
    builder.terminate()  # it takes its compilers along
    try:
        builder.wait(END_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also when a second signal cuts the wait short
        builder.kill()


class _Signalled(BaseException):
    """A signal has come that is to end this process."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _raised(*numbers: signal.Signals) -> Iterator[None]:
    """Within, these signals raise _Signalled, unless whoever started this process had them ignored (nohup)."""

    def handle(number: int, _frame: FrameType | None) -> None:
        raise _Signalled(number)

    former = {number: signal.getsignal(number) for number in numbers}
    caught = [number for number in numbers if former[number] != signal.SIG_IGN]
    try:
        for number in caught:
            signal.signal(number, handle)
        yield
    finally:
        for number in caught:
            signal.signal(number, former[number])


class _Line:
    """The present step on stderr: one line that is redrawn on a terminal, a line for each elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._open = False

    def show(self, text: str) -> None:
        if not self._quiet:
            _say(f"\r\x1b[2K{text}" if self._live else f"{text}\n")
            self._open = self._live

    def close(self) -> None:
        if self._open:
            _say("\n")
            self._open = False


def _say(text: str) -> None:
    try:
        click.echo(text, err=True, nl=False)
    except OSError:  # nobody reads it any more: no reason to give up a build of minutes
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
