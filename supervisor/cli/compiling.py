"""Before serve: ExLlamaV2's CUDA code compiled, once and visibly, in a process of its own.

Workers would do it, too, under the same lock, but then one compiles for minutes while models seem to hang in loading.
What the process prints is said in its module, ``model_worker.engines.exllamav2.extension``.
"""

import subprocess
import sys
from collections.abc import Iterable

import click

ENGINE = "exllamav2"
_BUILDER = [sys.executable, "-m", "model_worker.engines.exllamav2.extension"]


def compile_for(engines: Iterable[str], *, quiet: bool) -> None:
    """Wait until the extension is there, if one of the engines needs it; the steps are shown on stderr.

    A failure is said, and is not the end of serving: models of other engines are served, and those of this one say in
    ``status`` why they cannot be. Ctrl-C reaches the builder, too, and ends both (KeyboardInterrupt).
    """
    if ENGINE not in engines:
        return
    with subprocess.Popen(
        _BUILDER, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as builder:
        assert builder.stdout is not None
        assert builder.stderr is not None
        try:
            shown = False
            for line in builder.stdout:
                told = _told(line.split())
                if told and not quiet:
                    click.echo(f"\r{told}" if sys.stderr.isatty() else told, err=True, nl=not sys.stderr.isatty())
                    shown = sys.stderr.isatty()
            if shown:
                click.echo(err=True)
            if builder.wait():
                why = builder.stderr.read().strip().rpartition("\n")[2] or f"exit code {builder.returncode}"
                click.echo(
                    f"modelctl: ExLlamaV2's CUDA code is not compiled, its models will not load: {why}", err=True
                )
        except BaseException:
            builder.terminate()  # it takes its compilers along
            raise


def _told(words: list[str]) -> str | None:
    match words:
        case ["build", done, total]:
            return f"compiling ExLlamaV2's CUDA code: {done} of {total}"
        case ["waiting"]:
            return "another process is compiling ExLlamaV2's CUDA code"
    return None
