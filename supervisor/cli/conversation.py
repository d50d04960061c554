"""The conversation of ``run``: print answers as they arrive, cancel them on Ctrl-C, and remember the turns."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from protocol.client.async_client import AsyncClient, AsyncStream, Delta, Progress
from protocol.errors import ErrorCode, WireError
from protocol.process.terminal_text import steer
from supervisor.cli.history import History
from supervisor.cli.live_lines import bar
from supervisor.cli.options import way_to
from supervisor.spelling import size

HINT_AFTER_S = 2.0
"""Seconds after the first Ctrl-C until the user gets a hint, if the answer has not ended, that a second Ctrl-C leaves
it."""

SHOW_PROGRESS_AFTER_S = 0.3
"""Seconds after which progress is shown. An answer that begins sooner gets no line of progress."""


class ChatSession:
    """The turns of one user with one model over one connection.

    context   tokens of the model's context; None if that is not known
    chat      whether the model has a chat template. Without one each question is sent as it is, and nothing is
              remembered
    sampling  fields of every request

    The asynchronous client is used because of Ctrl-C: with it, the signal handler runs between two steps of the event
    loop. An exception inside the client's code could lose a frame that is just being received.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        runtime_dir: Path,
        model: str,
        *,
        chat: bool,
        context: int | None,
        system: str | None,
        sampling: dict[str, Any],
    ) -> None:
        self._runner = runner
        self.model = model
        self.chat = chat
        self._context = context
        self._sampling = sampling
        self._shows_progress = sys.stderr.isatty()
        most = sampling.get("max_tokens")
        self.history = History(system, context, most if type(most) is int else None)
        self._told_of_dropping = False
        self._client = runner.run(_connect(runtime_dir))

    def close(self) -> None:
        self._runner.run(self._client.close())

    def ask(
        self, text: str, *, left_out: int = 0, on_delta: Callable[[Delta], None] | None = None
    ) -> tuple[AsyncStream, bool]:
        """Print the answer to a question as it comes. Returns its stream, which has ended, and whether the user pressed
        Ctrl-C.

        left_out  how many of the oldest turns are not sent
        on_delta  called with each piece of the answer; nothing is printed then, because a program reads the output
        """
        request: dict[str, Any] = {"prompt": text}
        if self.chat:
            request = {"messages": self.history.messages(text, left_out)}
        stream, interrupted = self._runner.run(self._stream(request, on_delta))
        if self._has_filled_context(stream) and on_delta is None:
            click.echo(f"(the answer ends here: the context of {self._context} tokens is full)", err=True)
        return stream, interrupted

    def take_turn(self, text: str) -> bool:
        """Ask a question and remember it with its answer. Returns whether the user pressed Ctrl-C.

        If the conversation is too long for the model, the question is asked again without the oldest turns. Raises the
        error of the request; the question is not remembered then.
        """
        left_out = 0
        while True:
            try:
                stream, interrupted = self.ask(text, left_out=left_out)
                break
            except WireError as e:
                if left_out == len(self.history) or not _may_be_too_long(e):
                    raise
                left_out += 1
        if self.chat:
            self.history.drop_oldest(left_out)
            self.history.add(text, stream.text)
            self._tell_of_dropping(self.history.make_room(_tokens(stream)) or left_out > 0)
        return interrupted

    def begin_anew(self) -> None:
        """Forget all turns."""
        self.history.clear()
        self._told_of_dropping = False

    def _has_filled_context(self, stream: AsyncStream) -> bool:
        return stream.finish_reason == "length" and self._context is not None and _tokens(stream) >= self._context

    def _tell_of_dropping(self, dropped: bool) -> None:
        if dropped and not self._told_of_dropping:
            self._told_of_dropping = True
            click.echo(
                "(the conversation has reached what the model can take: from now on its oldest turns are left out)",
                err=True,
            )

    async def _stream(
        self, request: dict[str, Any], on_delta: Callable[[Delta], None] | None
    ) -> tuple[AsyncStream, bool]:
        quiet = on_delta is not None
        progress = _Waiting() if self._shows_progress and not quiet else None
        tell = None if progress is None else progress.show
        stream = self._client.generate(self.model, **request, **self._sampling, on_progress=tell)
        interrupts = _Interrupts(stream, quiet)
        try:
            async for delta in stream:
                if progress is not None:
                    progress.clear()
                if on_delta is not None:
                    on_delta(delta)
                else:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
        except asyncio.CancelledError:
            if not interrupts.impatient:
                raise
        except WireError:
            if stream.text and not quiet:
                _end_line()  # the error gets a line of its own
            raise
        finally:
            interrupts.close()
            if progress is not None:
                progress.clear()
        if not quiet:
            _end_line()
        return stream, interrupts.pressed > 0


def _tokens(stream: AsyncStream) -> int:
    """Return the tokens of prompt and answer together; 0 if the usage is not known."""
    usage = stream.usage
    return int(usage.get("prompt_tokens", 0)) + int(usage.get("completion_tokens", 0))


def _end_line() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()


def _may_be_too_long(error: WireError) -> bool:
    """Return whether the request may fit with fewer messages: it exceeds the context, or ``limits.prompt_tokens``."""
    return error.code is ErrorCode.CONTEXT_OVERFLOW or (
        error.code is ErrorCode.INVALID_REQUEST and error.field == "messages"
    )


class _Waiting:
    """The state of a request that has no token yet: one line on a terminal, removed when the answer begins."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._shown = False

    def show(self, progress: Progress) -> None:
        if time.monotonic() - self._begun < SHOW_PROGRESS_AFTER_S:
            return
        if progress.phase == "queued":
            before = progress.queue_position
            text = f"waiting, {before} before this one" if before else "waiting, next in turn"
            if progress.waits_for:
                text = f"waiting for {progress.waits_for}"
        elif progress.phase == "loading":
            rate = f", {size(progress.per_s)}/s" if progress.per_s else ""
            text = f"{progress.part} {bar(progress.done or 0, progress.total or 0)}{rate}"
        elif progress.phase == "compiling":
            text = "compiling the shape of the answer"
        else:
            text = f"reading the prompt {bar(progress.done or 0, progress.total or 0)}"
        steer(sys.stderr, "\r\x1b[2K")
        sys.stderr.write(text)
        sys.stderr.flush()
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            steer(sys.stderr, "\r\x1b[2K")
            sys.stderr.flush()
            self._shown = False


class _Interrupts:
    """The handler of Ctrl-C during an answer. The first Ctrl-C cancels the answer. The second one does not wait for its
    end, because the model may hang.

    The task that reads the stream must make this object. The second Ctrl-C cancels that task.
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
