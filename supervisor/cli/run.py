"""run: one answer, or a conversation, in the terminal."""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

from protocol.async_client import AsyncClient, AsyncStream
from protocol.client import Client
from protocol.errors import ErrorCode, WireError
from supervisor.cli import exit_codes
from supervisor.cli.options import as_json, connect, runtime_dir_option

Message = dict[str, str]


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the model's chat template.")
@click.option("--system", help="System message of the conversation.")
@click.option("--max-tokens", type=int, help="Most tokens of an answer.  [default: what the context leaves]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: 1]")
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--seed", type=int)
@click.option("--stop", multiple=True, help="String that ends the answer; may be given several times.")
@as_json
@runtime_dir_option
def run(
    model: str, prompt: str | None, raw: bool, system: str | None, as_json: bool, runtime_dir: Path, **options: Any
) -> int:
    """Ask MODEL for an answer to PROMPT ('-' reads it from stdin); without PROMPT, hold a conversation.

    Ctrl-C ends the answer; in a conversation, Ctrl-D ends that.
    """
    sampling = {key: value for key, value in options.items() if value not in (None, ())}
    with connect(runtime_dir) as client:
        chat = not raw and _is_chat(client, model)
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


def _is_chat(client: Client, model: str) -> bool:
    """Whether the model has a chat template. Known once it is loaded; until then the wait is worth a line."""
    told = False
    while True:
        status = client.status(model)["models"][0]
        if status["state"] in ("ready", "draining", "stopped", "failed", "stopping"):
            return bool(status["chat"])
        if not told:
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
        """Print the answer to one turn as it comes. Returns its stream, read to the end, and whether Ctrl-C came."""
        turn = {"role": "user", "content": text}
        request: dict[str, Any] = {"messages": [*self._history, turn]} if self._chat else {"prompt": text}
        stream, interrupted = self._runner.run(self._stream(request, quiet))
        self._history += [turn, {"role": "assistant", "content": stream.text}]
        return stream, interrupted

    async def _stream(self, request: dict[str, Any], quiet: bool) -> tuple[AsyncStream, bool]:
        stream = self._client.generate(self._model, **request, **self._sampling)
        pressed = 0

        def on_interrupt() -> None:
            nonlocal pressed
            pressed += 1
            stream.cancel()  # the answer ends with finish_reason "cancelled"; the program goes on

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
        try:
            async for delta in stream:
                if not quiet:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        if not quiet:
            sys.stdout.write("\n")
        return stream, bool(pressed)

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


async def _connect(runtime_dir: Path) -> AsyncClient:
    client = AsyncClient(runtime_dir=runtime_dir)
    await client.__aenter__()
    return client


def _result(model: str, stream: AsyncStream) -> dict[str, Any]:
    return {
        "model": model,
        "text": stream.text,
        "finish_reason": stream.finish_reason,
        "usage": stream.usage,
        "timings": stream.timings,
    }
