"""The command run: print one answer, or hold a conversation in the terminal."""

import asyncio
import json
import os
import re
import select
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from modelctl.cli import exit_codes
from modelctl.cli import options as completion
from modelctl.cli.conversation import ChatSession, hold
from modelctl.cli.options import F, connect, json_options
from modelctl.cli.root import command, take_text
from modelctl.cli.waiting import LiveLines, goes_on, shown
from protocol.client.answers import Delta, TokenLogprob
from protocol.client.async_client import AsyncStream
from protocol.client.sync_client import Client
from protocol.errors import ErrorCode, WireError
from protocol.limits import MODEL_NAME_PATTERN
from protocol.names import means, names_of, nearest, unknown_among
from supervisor.config.spelling import parse_duration

# The model that ``run`` asks: find it by its name, and wait until it is loaded.


def check_name(client: Client, model: str) -> None:
    """Raise WireError if no model has this name.

    Call this if the command line has one argument only, which may be a prompt without a model. The error then says how
    to give both. It repeats the argument only if a model could have that name, because an error holds no prompt.
    """
    listed = client.models()["models"]
    if any(means(each, model) for each in listed):
        return
    names = [name for each in listed for name in names_of(each)]
    if nearest(model, names) is not None:
        raise unknown_among(listed, model)
    if re.fullmatch(MODEL_NAME_PATTERN, model):
        wrong, prompt = f"no model {model!r} is configured", shlex.quote(model)
    else:
        wrong, prompt = f"a text of {len(model)} characters is no model's name", "PROMPT"
    there = f"there is {', '.join(sorted(names)) or 'none'}"
    one = names[0] if len(names) == 1 else "MODEL"
    way = f"`modelctl run {one} {prompt}`"
    message = f"{wrong}: {there}; the first argument is the model, and a prompt comes after it: {way}"
    raise WireError(ErrorCode.MODEL_NOT_FOUND, message, field="model")


def loaded(client: Client, model: str, *, quiet: bool) -> dict[str, Any]:
    """Wait until the model is loaded, or will not be loaded by itself. Show the progress. Return the model's status.

    The wait is needed because the status of a model without a worker lacks its context and its chat template.
    """
    live = LiveLines()
    status = _seen(client, model)
    with goes_on(f"the load of {model} goes on: `modelctl ps` shows it"):
        # The request wakes a model that is asleep.
        while status["state"] not in ("ready", "draining", "stopped", "failed", "stopping", "asleep"):
            if status["state"] == "unloaded":
                # This call only starts the load. Its error says that the model is being loaded.
                with suppress(WireError):
                    client.tokenize(model, "")
            if not quiet:
                live.show({model: shown(status)})
            time.sleep(0.1)
            status = _seen(client, model)
    return status


def _seen(client: Client, model: str) -> dict[str, Any]:
    """Return the model's status, as far as the key may see it."""
    try:
        seen: dict[str, Any] = client.status(model)["models"][0]
        return seen
    except WireError as e:
        if e.code is not ErrorCode.FORBIDDEN:
            raise
    listed = client.models()["models"]  # for a key with only the right infer
    for each in listed:
        if means(each, model):
            return {**each, "progress": None}
    raise unknown_among(listed, model)


# Read the prompt of ``run`` from the command line, standard input, or both.


HINT_AFTER_S = 2.0
"""Seconds without standard input after which a hint is shown. The user may not know that the command waits for standard
input, for example with ssh."""


def read_prompt(given: str | None, *, converses: bool) -> str | None:
    """Return the text to ask. None means: hold a conversation in the terminal.

    given      the argument PROMPT; "-" stands for standard input
    converses  whether a conversation is possible; with --json it is not

    Piped input is one prompt, however many lines it has. If there is also a PROMPT, the input comes first, then an
    empty line, then PROMPT. So the input can be a document, and PROMPT a question about it. Raises UsageError if there
    is nothing to ask.
    """
    if sys.stdin is None:
        if given in (None, "-"):
            raise click.UsageError("standard input is closed: give a PROMPT")
        return given
    terminal = sys.stdin.isatty()
    if given == "-":
        return _read_all()
    if given is None:
        if terminal and converses:
            return None
        text = _read_all()
        if not text.strip():
            raise click.UsageError("standard input is empty: give a PROMPT, or pipe one in")
        return text
    if terminal:
        return given
    piped = _read_all(hint=True)
    return f"{piped}\n\n{given}" if piped.strip() else given


def _read_all(*, hint: bool = False) -> str:
    """Read standard input to its end, as text.

    The final line end of ``echo`` and editors is left out, because it would change the answers of some models.

    hint  print a hint if nothing comes for a while, because the end of the input may never come
    """
    descriptor, data = sys.stdin.fileno(), bytearray()
    if hint and not select.select([descriptor], [], [], HINT_AFTER_S)[0]:
        click.echo(
            "modelctl: waiting for standard input, which is sent with PROMPT; </dev/null (ssh: -n) leaves it out",
            err=True,
        )
    while part := os.read(descriptor, 1 << 20):
        data += part
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        message = f"standard input is not UTF-8 text: byte {data[e.start]:#04x} at offset {e.start}"
        raise click.UsageError(message) from None
    return text.removesuffix("\n").removesuffix("\r")


_OWN_FIELDS = {"prompt", "messages", "token_ids", "model", "timeout", "on_progress"}
"""Fields that the command itself gives to the client's ``generate``."""


def _fields(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of --set by name. The worker checks them."""
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


def _milliseconds(context: click.Context, option: click.Parameter, given: str | None) -> int | None:
    if given is None:
        return None
    try:
        return round(parse_duration(_number(given)) * 1000)
    except ValueError as e:
        raise click.BadParameter(f"{given!r} {e}") from None


def _number(text: str) -> float | str:
    """Return a number (of seconds) as a float, other text unchanged. The command line gives every value as a string."""
    try:
        return float(text)
    except ValueError:
        return text


def _schema(context: click.Context, option: click.Parameter, given: Path | None) -> str | None:
    """Return the file's text. The worker checks whether it can serve the schema."""
    if given is None:
        return None
    try:
        text = given.read_text()
        json.loads(text)
    except UnicodeDecodeError:
        raise click.BadParameter(f"{given} is not UTF-8 text") from None
    except ValueError as e:
        raise click.BadParameter(f"{given} is not JSON: {e}") from None
    return text


def _draw_option(name: str, meaning: str, usual: float) -> Callable[[F], F]:
    """Return an option for how tokens are drawn. Without it the model's own value counts, else ``usual``."""
    return click.option(name, type=type(usual), help=f"{meaning}  [default: the model's, else {usual:g}]")


@command(
    ('modelctl run letters "sort: d b a c ->"', "Print one answer"),
    ("modelctl run stories", "Hold a conversation"),
    ('modelctl run llama-8b "Summarize this." < report.txt', "Ask about a file"),
    ('modelctl run llama-8b "Hello" --set top_a=0.2 --json', "Set any option; print lines of JSON"),
)
@click.argument("model", shell_complete=completion.models)
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the model's chat template.")
@click.option("--system", help="System message of the conversation.")
@click.option("--max-tokens", type=int, help="Most tokens of an answer.  [default: what the context leaves]")
@_draw_option("--temperature", "How freely tokens are drawn; 0 always takes the likeliest.", 1.0)
@_draw_option("--top-p", "Draw from the likeliest tokens that have this probability together.", 1.0)
@_draw_option("--top-k", "Draw from so many likeliest tokens; 0 is all.", 0)
@_draw_option("--min-p", "Leave out tokens less likely than this share of the likeliest.", 0.0)
@_draw_option("--repetition-penalty", "Above 1, tokens that came before are less likely.", 1.0)
@click.option("--min-tokens", type=int, help="Least tokens of an answer.  [default: 0]")
@click.option("--seed", type=int, help="Seed of the draws.  [default: random]")
@click.option("--stop", multiple=True, help="String that ends the answer; may be repeated.")
@click.option(
    "--json-schema",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    callback=_schema,
    help="The answer is JSON that validates by the schema in this file.",
)
@click.option("--regex", help="The whole answer matches this regular expression.")
@click.option("--choice", multiple=True, help="A text that the answer may be; repeat it.")
@click.option(
    "--priority",
    type=click.Choice(["interactive", "normal", "batch"]),
    help="Which requests are served first.  [default: normal]",
)
@click.option(
    "--deadline",
    "deadline_ms",
    metavar="DURATION",
    callback=_milliseconds,
    help="Longest wait for an answer's end, such as 500ms, 30s or 5m.",
)
@click.option(
    "--set",
    "fields",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_fields,
    help="Any other field of a request; VALUE is JSON, or else text. May be repeated.",
)
@click.option("--raw-output", is_flag=True, help="Print control characters of the answer as they are.")
@click.option("--logprobs", is_flag=True, help="With --json: each token's log-probability.")
@json_options
def run(
    model: str,
    prompt: str | None,
    raw: bool,
    raw_output: bool,
    system: str | None,
    as_json: bool,
    runtime_dir: Path,
    fields: dict[str, Any],
    logprobs: bool,
    **options: Any,
) -> int:
    """Ask MODEL for an answer to PROMPT, or hold a conversation.

    Standard input that is not a terminal is one prompt, too: alone, as for '-', or before PROMPT with an empty line
    between. A terminal without PROMPT holds a conversation: /help lists its commands, /bye or Ctrl-D ends it.

    With --json, each piece of the answer is a line of JSON, and the last line has the whole text and the figures.
    Ctrl-C ends the answer; a second Ctrl-C does not wait for the model.
    """
    take_text(raw=raw_output)
    sampling = {key: value for key, value in options.items() if value not in (None, ())}
    if logprobs:
        if not as_json:
            raise click.UsageError("--logprobs needs --json")
        sampling["logprobs"] = True
    for name in fields.keys() & sampling.keys():
        option = "deadline" if name == "deadline_ms" else name.replace("_", "-")
        raise click.UsageError(f"--set {name}: --{option} is given as well")
    sampling |= fields
    if prompt is None:
        with connect(runtime_dir) as client:
            check_name(client, model)
    text = read_prompt(prompt, converses=not as_json)
    with connect(runtime_dir) as client:
        status = loaded(client, model, quiet=as_json)
    chat = not raw and status["chat"] is not False
    if system is not None and not chat:
        raise click.UsageError(f"--system needs a chat template, and {model!r} is asked without one")
    with asyncio.Runner() as runner:
        conversation = ChatSession(
            runner, runtime_dir, model, chat=chat, context=status["context"], system=system, sampling=sampling
        )
        try:
            if text is None:
                return hold(conversation)
            stream, interrupted = conversation.ask(text, on_delta=_print_delta if as_json else None)
            if as_json:
                _print_line("end", _figures(model, stream))
            return exit_codes.INTERRUPTED if interrupted else exit_codes.OK
        finally:
            conversation.close()


def _print_delta(delta: Delta) -> None:
    """Print a piece of an answer as a line of JSON."""
    fields: dict[str, Any] = {"text": delta.text, "token_ids": delta.token_ids}
    if delta.logprobs:
        fields["logprobs"] = [
            _logprob(logprob) | {"top": [_logprob(other) for other in logprob.top]} for logprob in delta.logprobs
        ]
    _print_line("delta", fields)


def _figures(model: str, stream: AsyncStream) -> dict[str, Any]:
    return {
        "model": model,
        "text": stream.text,
        "finish_reason": stream.finish_reason,
        "usage": stream.usage,
        "timings": stream.timings,
    }


def _print_line(kind: str, fields: dict[str, Any]) -> None:
    print(json.dumps({"type": kind, **fields}, ensure_ascii=False), flush=True)  # a program follows the answer


def _logprob(logprob: TokenLogprob) -> dict[str, Any]:
    return {"token_id": logprob.token_id, "text": logprob.text, "logprob": logprob.logprob}
