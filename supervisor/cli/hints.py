"""Complete the commands in messages with the options that they need to reach the same supervisor.

A message may come from the command itself, from the client library or, over the wire, from the supervisor. The code
that makes a message does not know with which options the command was called. So this module adds the options when a
message is shown. A hint is a command between backquotes: `modelctl start letters`.
"""

import re
import shlex

import click

from protocol.process.masking import masked

_HINT = re.compile(r"`modelctl ([a-z-]+)([^`]*)`")
_HERE = frozenset({"serve", "plan", "doctor"})
"""Commands that take --runtime-dir only."""
_ANYWHERE = frozenset(
    {
        "start", "stop", "unload", "restart", "sleep", "wake", "reload", "shutdown", "ps", "status", "top", "cluster",
        "usage", "metrics", "run", "requests", "cancel", "story", "events", "logs", "log-level", "bench", "gateway",
        "load", "ls",
    }
)  # fmt: skip
"""Commands that take --runtime-dir, or --connect and --key-file."""
_needed: dict[str, str] = {}
"""The options that hints repeat: option → value. A process runs one command only."""

ADD_TEMPLATE = "no chat template, so there are no conversations: add the model's chat_template.jinja to its directory"
"""The words about a model without a chat template."""


def need(option: str, value: object) -> None:
    """Make hints repeat an option.

    Do not call this for a default or for a value from the environment, because the next command finds these by itself.
    """
    _needed[option] = str(value)


def completed(message: str) -> str:
    """Return the message with the options that its hints need."""
    return _HINT.sub(_complete, message)


def say(message: str) -> None:
    """Print a message to stderr, with its hints completed."""
    click.echo(masked(completed(message)), err=True)


def _complete(hint: "re.Match[str]") -> str:
    verb, rest = hint.groups()
    wanted: tuple[str, ...] = ()
    if verb in _ANYWHERE and "--connect" in _needed:
        wanted = ("--connect", "--key-file")
    elif verb in _ANYWHERE or verb in _HERE:
        wanted = ("--runtime-dir",)
    elif verb == "keys":
        wanted = ("--keys",) if "--keys" in _needed else ("--config",)
    options = [f" {name} {shlex.quote(_needed[name])}" for name in wanted if name in _needed and f"{name} " not in rest]
    return f"`modelctl {verb}{rest}{''.join(options)}`"
