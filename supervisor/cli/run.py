"""run: one answer, or a conversation, in the terminal."""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

from protocol.async_client import AsyncClient, AsyncStream, TokenLogprob
from protocol.client import Client
from protocol.errors import ErrorCode, WireError
from supervisor.cli import exit_codes
from supervisor.cli.options import as_json, connect, runtime_dir_option

Message = dict[str, str]

HINT_AFTER_S = 1.0
"""An answer that was cancelled and has not ended by then: say that there is another way out."""

_OWN_FIELDS = {"prompt", "messages", "token_ids", "model", "resume", "timeout"}
"""What the command itself gives to the client's ``generate``."""


def _fields(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """The values of --set by name. What they mean, and whether they are right, is the worker's to say."""
    fields: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{each!r} is not NAME=VALUE")
        if name in _OWN_FIELDS:
            raise click.BadParameter(f"{name!r} is set by the command itself")
        if name in fields:
            raise click.BadParameter(f"{name!r} is given twice")
        try:
            fields[name] = json.loads(text)
        except ValueError:
            fields[name] = text
    return fields


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the model's chat template.")
@click.option("--system", help="System message of the conversation.")
@click.option("--max-tokens", type=int, help="Most tokens of an answer.  [default: what the context leaves]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: 1]")
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--min-p", type=float)
@click.option("--repetition-penalty", type=float)
@click.option("--min-tokens", type=int, help="Least tokens of an answer.  [default: 0]")
@click.option("--seed", type=int)
@click.option("--stop", multiple=True, help="String that ends the answer; may be given several times.")
@click.option(
    "--set",
    "fields",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_fields,
    help="Any other field of a request; VALUE is JSON, or else text. May be given several times.",
)
@click.option("--logprobs", is_flag=True, help="With --json: each token's log-probability.")
@as_json
@runtime_dir_option
def run(
    model: str,
    prompt: str | None,
    raw: bool,
    system: str | None,
    as_json: bool,
    runtime_dir: Path,
    fields: dict[str, Any],
    logprobs: bool,
    **options: Any,
) -> int:
    """Ask MODEL for an answer to PROMPT ('-' reads it from stdin); without PROMPT, hold a conversation.

    Ctrl-C ends the answer, a second one does not wait for the model; in a conversation, Ctrl-D ends that.
    """
    if sys.stdin is None and prompt in (None, "-"):
        raise click.UsageError("standard input is closed: give a PROMPT")
    sampling = {key: value for key, value in options.items() if value not in (None, ())}
    if logprobs:
        if not as_json:
            raise click.UsageError("--logprobs needs --json")
        sampling["logprobs"] = True
    for name in fields.keys() & sampling.keys():
        raise click.UsageError(f"--set {name}: --{name.replace('_', '-')} is given as well")
    sampling |= fields
    with connect(runtime_dir) as client:
        chat = not raw and _is_chat(client, model, quiet=as_json)
    if system is not None and not chat:
        raise click.UsageError(f"--system needs a chat template, and {model!r} is asked without one")
    with asyncio.Runner() as runner:
        conversation = _Conversation(runner, runtime_dir, model, chat, system, sampling)
        try:
            if prompt is None and not as_json:
                return conversation.hold()
            text = sys.stdin.read() if prompt in (None, "-") else prompt
            assert text is not None
            stream, interrupted = conversation.ask(text, quiet=as_json)
            if as_json:
                click.echo(json.dumps(_result(model, stream), indent=2, ensure_ascii=False))
            return exit_codes.INTERRUPTED if interrupted else exit_codes.OK
        finally:
            conversation.close()


def _is_chat(client: Client, model: str, *, quiet: bool) -> bool:
    """Whether the model has a chat template. Known once it is loaded; until then the wait is worth a line."""
    told = False
    while True:
        status = client.status(model)["models"][0]
        if status["state"] in ("ready", "draining", "stopped", "failed", "stopping"):
            return bool(status["chat"])
        if not (told or quiet):
            click.echo(f"{model} is {status['state']} ...", err=True)
            told = True
        time.sleep(0.1)


class _Conversation:
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
        stream = self._client.generate(self._model, **request, **self._sampling)
        interrupts = _Interrupts(stream, quiet)
        try:
            async for delta in stream:
                if not quiet:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
        except asyncio.CancelledError:
            if not interrupts.impatient:
                raise
        finally:
            interrupts.close()
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
    client = AsyncClient(runtime_dir=runtime_dir, reconnect=False)
    await client.__aenter__()
    return client


def _result(model: str, stream: AsyncStream) -> dict[str, Any]:
    result: dict[str, Any] = {
        "model": model,
        "text": stream.text,
        "finish_reason": stream.finish_reason,
        "usage": stream.usage,
        "timings": stream.timings,
    }
    if stream.logprobs:
        result["logprobs"] = [
            _logprob(told) | {"top": [_logprob(other) for other in told.top]} for told in stream.logprobs
        ]
    return result


def _logprob(told: TokenLogprob) -> dict[str, Any]:
    return {"token_id": told.token_id, "text": told.text, "logprob": told.logprob}
