"""Read the prompt of ``run`` from the command line, standard input, or both."""

import os
import select
import sys

import click

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
        return _as_text(_read_all())
    if given is None:
        if terminal and converses:
            return None
        text = _as_text(_read_all())
        if not text.strip():
            raise click.UsageError("standard input is empty: give a PROMPT, or pipe one in")
        return text
    if terminal:
        return given
    piped = _as_text(_read_all(hint=True))
    return f"{piped}\n\n{given}" if piped.strip() else given


def _read_all(*, hint: bool = False) -> bytes:
    """Read standard input to its end.

    hint  print a hint if nothing comes for a while, because the end of the input may never come
    """
    descriptor, parts = sys.stdin.fileno(), list[bytes]()
    if hint and not select.select([descriptor], [], [], HINT_AFTER_S)[0]:
        click.echo(
            "modelctl: waiting for standard input, which is sent with PROMPT; </dev/null (ssh: -n) leaves it out",
            err=True,
        )
    while part := os.read(descriptor, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _as_text(data: bytes) -> str:
    """Return the text without the final line end of ``echo`` and editors, which would change the answers of some
    models."""
    try:
        text = data.decode()
    except UnicodeDecodeError as e:
        raise click.UsageError(
            f"standard input is not UTF-8 text: byte {data[e.start]:#04x} at offset {e.start}"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")
