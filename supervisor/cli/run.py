"""run: one answer, or a conversation, in the terminal."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from protocol.client import Client, Stream
from protocol.errors import ErrorCode, WireError
from supervisor.cli import exit_codes
from supervisor.cli.options import as_json, connect, runtime_dir_option


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
        if prompt is None and not as_json:
            return _converse(client, model, chat, system, sampling)
        text = sys.stdin.read() if prompt in (None, "-") else prompt
        history = [{"role": "system", "content": system}] if system else []
        request = {"messages": [*history, {"role": "user", "content": text}]} if chat else {"prompt": text}
        return _answer_once(client, model, request, sampling, as_json)


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


class _Interrupt:
    """Ctrl-C while an answer comes: the first cancels it, the second ends the program.

    The handler does not raise into the client's own code, where a frame that is just being taken in could be lost.
    """

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.pressed = 0

    @contextmanager
    def armed(self) -> Iterator[None]:
        previous = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _handle(self, *_: object) -> None:
        self.pressed += 1
        if self.pressed > 1 or self.stream is None:
            raise KeyboardInterrupt
        self.stream.cancel()


def _stream_answer(client: Client, model: str, request: dict[str, Any], sampling: dict[str, Any]) -> tuple[Stream, bool]:
    """Print an answer as it comes. Returns its stream, read to the end, and whether Ctrl-C was pressed."""
    interrupt = _Interrupt()
    with interrupt.armed():
        stream = client.generate(model, **request, **sampling)
        interrupt.stream = stream
        for delta in stream:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return stream, bool(interrupt.pressed)


def _answer_once(client: Client, model: str, request: dict[str, Any], sampling: dict[str, Any], json_wanted: bool) -> int:
    if not json_wanted:
        _, interrupted = _stream_answer(client, model, request, sampling)
        return exit_codes.INTERRUPTED if interrupted else exit_codes.OK
    done = client.complete(model, **request, **sampling)
    answer = {"model": model, "text": done.text, "finish_reason": done.finish_reason}
    click.echo(json.dumps({**answer, "usage": done.usage, "timings": done.timings}, indent=2, ensure_ascii=False))
    return exit_codes.OK


def _converse(client: Client, model: str, chat: bool, system: str | None, sampling: dict[str, Any]) -> int:
    """Read, answer, remember, until the end of input."""
    if not chat:
        click.echo(f"{model} has no chat template: each line is sent as it is, without what came before", err=True)
    history: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
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
        turn = {"role": "user", "content": line}
        request: dict[str, Any] = {"messages": [*history, turn]} if chat else {"prompt": line}
        try:
            stream, interrupted = _stream_answer(client, model, request, sampling)
        except WireError as e:
            if e.code is ErrorCode.CONNECTION_LOST:
                raise
            click.echo(f"modelctl: {e}", err=True)
            continue
        if interrupted:
            click.echo("(cancelled)", err=True)
        history += [turn, {"role": "assistant", "content": stream.text}]
