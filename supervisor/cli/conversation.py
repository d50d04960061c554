"""What ``run`` shows and hears in a terminal: answers as they come, Ctrl-C, and how far a request is."""

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

from protocol.async_client import AsyncClient, AsyncStream, Progress
from protocol.errors import ErrorCode, WireError
from supervisor.cli import exit_codes
from supervisor.cli.options import way_to
from supervisor.cli.tables import bar

Message = dict[str, str]

HINT_AFTER_S = 2.0
"""An answer that was cancelled and has not ended by then: say that there is another way out."""

SHOW_PROGRESS_AFTER_S = 0.3
"""An answer that begins sooner is not worth a line about where it is."""


class Conversation:
    """Turns of one user with one model over one connection, and what was said so far.

    The asynchronous client is used for the sake of Ctrl-C: its handler runs between two steps of the event loop, never
    inside the client's code, where an exception could lose a frame that was just being taken in.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        runtime_dir: Path,
        model: str,
        chat: bool,
        system: str | None,
        sampling: dict[str, Any],
    ) -> None:
        self._runner = runner
        self._model = model
        self._chat = chat
        self._sampling = sampling
        self._shows_progress = sys.stderr.isatty()
        self._history: list[Message] = [{"role": "system", "content": system}] if system else []
        self._client = runner.run(_connect(runtime_dir))

    def close(self) -> None:
        self._runner.run(self._client.close())

    def ask(self, text: str, *, quiet: bool = False) -> tuple[AsyncStream, bool]:
        """Print the answer to one turn as it comes. Returns its stream, which is over, and whether Ctrl-C came."""
        turn = {"role": "user", "content": text}
        request: dict[str, Any] = {"messages": [*self._history, turn]} if self._chat else {"prompt": text}
        stream, interrupted = self._runner.run(self._stream(request, quiet))
        self._history += [turn, {"role": "assistant", "content": stream.text}]
        return stream, interrupted

    async def _stream(self, request: dict[str, Any], quiet: bool) -> tuple[AsyncStream, bool]:
        progress = _Waiting() if self._shows_progress and not quiet else None
        tell = None if progress is None else progress.show
        stream = self._client.generate(self._model, **request, **self._sampling, on_progress=tell)
        interrupts = _Interrupts(stream, quiet)
        try:
            async for delta in stream:
                if progress is not None:
                    progress.clear()
                if not quiet:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
        except asyncio.CancelledError:
            if not interrupts.impatient:
                raise
        finally:
            interrupts.close()
            if progress is not None:
                progress.clear()
        if not quiet:
            sys.stdout.write("\n")
            sys.stdout.flush()
        return stream, interrupts.pressed > 0

    def hold(self) -> int:
        """Read, answer, remember, until the end of input."""
        if not self._chat:
            message = f"{self._model} has no chat template: each line is sent as it is, without what came before"
            click.echo(message, err=True)
        try:
            import readline  # noqa: F401  (line editing)
        except ImportError:
            pass
        while True:
            try:
                line = input(">>> " if sys.stdin.isatty() else "")
            except EOFError:
                return exit_codes.OK
            except KeyboardInterrupt:
                print()
                continue  # Ctrl-C at the prompt drops the line, as in a shell
            if not line.strip():
                continue
            try:
                _, interrupted = self.ask(line)
            except WireError as e:
                if e.code is ErrorCode.CONNECTION_LOST:
                    raise
                click.echo(f"modelctl: {e}", err=True)
                continue
            if interrupted:
                click.echo("(cancelled)", err=True)


class _Waiting:
    """Where a request is that has no token yet: one line on a terminal, gone when the answer begins."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._shown = False

    def show(self, progress: Progress) -> None:
        if time.monotonic() - self._begun < SHOW_PROGRESS_AFTER_S:
            return
        if progress.phase == "queued":
            before = progress.queue_position
            text = f"waiting, {before} before this one" if before else "waiting, next in turn"
        elif progress.phase == "loading":
            text = f"{progress.part} {bar(progress.done or 0, progress.total or 0)}"
        else:
            text = f"reading the prompt {bar(progress.done or 0, progress.total or 0)}"
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._shown = False


class _Interrupts:
    """Ctrl-C while an answer comes: the first asks for its end, the second leaves it, for a model that hangs.

    Made by the task that reads the stream, which the second one cancels.
    """

    def __init__(self, stream: AsyncStream, quiet: bool) -> None:
        self.pressed = 0
        self._stream = stream
        self._quiet = quiet
        self._reader = asyncio.current_task()
        self._hint: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGINT, self._on_interrupt)

    @property
    def impatient(self) -> bool:
        return self.pressed > 1

    def close(self) -> None:
        if self._hint is not None:
            self._hint.cancel()
        self._loop.remove_signal_handler(signal.SIGINT)

    def _on_interrupt(self) -> None:
        self.pressed += 1
        if self.pressed == 1:
            self._stream.cancel()  # the answer ends with finish_reason "cancelled"; the program goes on
            if not self._quiet:
                self._hint = self._loop.call_later(HINT_AFTER_S, self._give_hint)
        elif self.pressed == 2:
            assert self._reader is not None
            self._reader.cancel()  # a stream whose reader is cancelled closes itself

    def _give_hint(self) -> None:
        click.echo("\n(the model does not react; Ctrl-C again leaves it)", err=True)


async def _connect(runtime_dir: Path) -> AsyncClient:
    client = AsyncClient(**way_to(runtime_dir), reconnect=False)
    await client.__aenter__()
    return client
