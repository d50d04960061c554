"""The conversation of ``run``: print answers as they arrive, cancel them on Ctrl-C, and remember the turns."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from modelctl.cli import exit_codes
from modelctl.cli.options import way_to
from modelctl.cli.root import say
from modelctl.cli.waiting import bar
from protocol.client.answers import Delta, Progress
from protocol.client.async_client import AsyncClient, AsyncStream
from protocol.errors import ErrorCode, WireError
from protocol.process.shown import steer
from supervisor.config.spelling import size

# The turns of a conversation that ``run`` remembers and sends with the next question. Pure.


Message = dict[str, str]

ROOM_SHARE = 8
"""Without --max-tokens, the context divided by this number is kept free for the next answer."""
KEPT_SHARE = 0.75
"""When turns are dropped, the remaining turns take at most this share of the allowed tokens. If only the excess were
dropped, each later prompt would begin differently from the prompt before. Then the worker could not use its cache, and
would compute the whole prompt again each time."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer, which may have been interrupted."""

    question: str
    answer: str

    @property
    def size(self) -> int:
        """The size of the turn in bytes, from which its share of the tokens is estimated."""
        return len(self.question.encode(errors="surrogatepass")) + len(self.answer.encode(errors="surrogatepass"))


class History:
    """The turns that are sent with the next question.

    system      the system message, which always stays
    context     tokens of the model's context; None if that is not known
    max_tokens  most tokens of an answer; None for as many as fit into the context
    """

    def __init__(self, system: str | None = None, context: int | None = None, max_tokens: int | None = None) -> None:
        self._system = system
        self._most = None
        if context is not None:
            self._most = context - (context // ROOM_SHARE if max_tokens is None else max_tokens)
        self._turns: list[Turn] = []

    def __len__(self) -> int:
        return len(self._turns)

    def messages(self, question: str, left_out: int = 0) -> list[Message]:
        """Return the conversation with a new question, for the chat template.

        left_out  how many of the oldest turns to leave out
        """
        messages = [{"role": "system", "content": self._system}] if self._system else []
        for turn in self._turns[left_out:]:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        return [*messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        self._turns.append(Turn(question, answer))

    def undo(self) -> bool:
        """Forget the newest turn. Returns False if there is none."""
        if not self._turns:
            return False
        self._turns.pop()
        return True

    def clear(self) -> None:
        """Forget all turns."""
        self._turns.clear()

    def drop_oldest(self, count: int) -> None:
        """Forget the ``count`` oldest turns."""
        del self._turns[:count]

    def make_room(self, tokens: int) -> bool:
        """Forget the oldest turns if too little of the context is left for another answer.

        tokens  tokens of the conversation now, as the worker counted them. Each turn's share is estimated by its bytes;
                the worker's next count corrects the estimate

        Returns whether turns were forgotten.
        """
        if self._most is None or tokens <= self._most:
            return False
        fixed = len((self._system or "").encode(errors="surrogatepass"))
        each = tokens / max(1, fixed + sum(turn.size for turn in self._turns))
        before = len(self._turns)
        while self._turns and each * (fixed + sum(turn.size for turn in self._turns)) > KEPT_SHARE * self._most:
            self._turns.pop(0)
        return len(self._turns) < before


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
        self._client = runner.run(AsyncClient(**way_to(runtime_dir), reconnect=False).connect())

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
                    print(delta.text, end="", flush=True)
        except asyncio.CancelledError:
            if interrupts.pressed < 2:
                raise
        except WireError:
            if stream.text and not quiet:
                print(flush=True)  # the error gets a line of its own
            raise
        finally:
            interrupts.close()
            if progress is not None:
                progress.clear()
        if not quiet:
            print(flush=True)
        return stream, interrupts.pressed > 0


def _tokens(stream: AsyncStream) -> int:
    """Return the tokens of prompt and answer together; 0 if the usage is not known."""
    usage = stream.usage
    return int(usage.get("prompt_tokens", 0)) + int(usage.get("completion_tokens", 0))


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


# Hold a conversation in the terminal: each line is a question or a command.


QUOTES = '"""'
HELP = f"""\
/clear    forget the conversation; the system message stays
/undo     forget the last question and its answer
/help     show this
/bye      end the conversation; Ctrl-D does, too
{QUOTES}       begin a text of several lines, which ends with {QUOTES}; nothing in it is a command
Ctrl-C    end the answer; at the prompt, drop the line"""
GREETING = "(/help lists the commands; /bye or Ctrl-D ends the conversation)"


def hold(conversation: ChatSession) -> int:
    """Read questions and print answers until the user ends the conversation. Returns the exit code."""
    click.echo(GREETING, err=True)
    if not conversation.chat:
        message = f"{conversation.model} is asked without a chat template: each question is sent as it is, alone"
        click.echo(message, err=True)
    try:
        import readline  # noqa: F401  (line editing)
    except ImportError:
        pass
    while True:
        try:
            _one_turn(conversation)
        except EOFError:  # Ctrl-D, or /bye
            return exit_codes.OK
        except KeyboardInterrupt:
            print()  # Ctrl-C at the prompt drops the line, as in a shell
        except WireError as e:
            if e.code is ErrorCode.CONNECTION_LOST:
                raise
            say(f"modelctl: {e}")


def _one_turn(conversation: ChatSession) -> None:
    """Read one question or command, and carry it out. Raises EOFError at its end, and the error of the request."""
    line = input(">>> ")
    begin = line.lstrip()
    if begin.startswith(QUOTES):
        text = _read_quoted(begin.removeprefix(QUOTES))
    elif begin.startswith("/"):
        _obey(begin.rstrip(), conversation)
        return
    else:
        text = line
    if not text.strip():
        return
    if conversation.take_turn(text):
        click.echo("(cancelled)", err=True)


def _read_quoted(first: str) -> str:
    """Read a text of several lines up to the closing quotes. ``first`` is the text behind the opening ones."""
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        try:
            lines.append(input("... "))
        except EOFError:
            click.echo(f"\nmodelctl: not sent: the text was not closed with {QUOTES}", err=True)
            raise
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


def _obey(command: str, conversation: ChatSession) -> None:
    history = conversation.history
    match command:
        case "/bye" | "/exit" | "/quit":
            raise EOFError
        case "/help" | "/?":
            click.echo(HELP)
        case "/clear":
            conversation.begin_anew()
            click.echo("(the conversation begins anew)", err=True)
        case "/undo":
            count = len(history) - 1
            undone = history.undo()
            click.echo(
                f"(the last turn is forgotten; {count} left)" if undone else "(there is no turn to forget)", err=True
            )
        case _:
            word = command.split()[0]
            click.echo(f"modelctl: no command {word!r}: /help lists them; to send it as text, put it between {QUOTES}",
                       err=True)  # fmt: skip
