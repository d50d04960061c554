"""Which models a command line means: names, patterns such as ``llama-*``, or ``--all``."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import click

from supervisor.cli import completion, exit_codes
from supervisor.cli.errors import CommandFailure

if TYPE_CHECKING:
    from protocol.client.sync_client import Client

F = TypeVar("F", bound=Callable[..., object])
Worker = Mapping[str, Any]
"""An entry of ``models`` in the reply to the verb "status"."""

some = click.argument("models", nargs=-1, metavar="[MODEL...]", shell_complete=completion.models)
"""The argument of a command that shows models: names or patterns. None of them means all models."""


named = click.argument("models", nargs=-1, required=True, metavar="MODEL...", shell_complete=completion.models)
"""The argument of a command that gives orders: names or patterns."""


def or_all(command: F) -> F:
    """Add the argument MODEL..., for names and patterns, and the option ``--all`` to a command that gives orders."""
    every = click.option("-a", "--all", "every", is_flag=True, help="All models of the supervisor.")
    argument = click.argument("models", nargs=-1, metavar="MODEL...", shell_complete=completion.models)
    return argument(every(command))


def is_pattern(name: str) -> bool:
    """Return whether a name is a pattern. No name of a model has one of these characters."""
    return any(character in name for character in "*?[")


def ordered(client: "Client", given: Sequence[str], *, every: bool = False) -> list[str]:
    """Return the names to give orders for, each once.

    given  names, which may be those of workers, and patterns, which mean models
    every  ``--all``

    Raises UsageError if nothing or both is given, CommandFailure for a pattern that matches nothing, and the
    supervisor's own error for an unknown name. So no order is given if one name is wrong.
    """
    if bool(given) == every:
        both = "--all means every model: leave out the names, or --all"
        raise click.UsageError(both if given else "name a MODEL, or give --all")
    workers = client.status()["models"]
    known = {name for worker in workers for name in (worker["name"], worker["model"])}
    for name in given:
        if name not in known and not is_pattern(name):
            client.status(name)
    names = (worker["model"] for worker in workers) if every else _expanded(given, workers)
    return list(dict.fromkeys(names))


def expanded(given: Iterable[str], workers: Sequence[Worker]) -> list[str]:
    """Return the names in order, each once, with the models that they match in place of patterns.

    Raises CommandFailure for a pattern that matches nothing.
    """
    return list(dict.fromkeys(_expanded(given, workers)))


def _expanded(given: Iterable[str], workers: Sequence[Worker]) -> Iterator[str]:
    for name in given:
        yield from (_matching(name, workers) if is_pattern(name) else (name,))


def _matching(pattern: str, workers: Sequence[Worker]) -> list[str]:
    """Return the models whose name or alias matches, or the workers (``NAME:2``) if the pattern has a colon."""
    if ":" in pattern:
        found = [worker["name"] for worker in workers if fnmatchcase(worker["name"], pattern)]
    else:
        found = [
            worker["model"]
            for worker in workers
            if any(fnmatchcase(name, pattern) for name in (worker["model"], *worker.get("aliases", ())))
        ]
    if not found:
        known = ", ".join(dict.fromkeys(worker["model"] for worker in workers)) or "none"
        raise CommandFailure(exit_codes.FAILED, "no_match", f"no model matches {pattern!r}: there is {known}")
    return found


def status_of(client: "Client", given: Sequence[str]) -> dict[str, Any]:
    """Return the reply to the verb "status" with the workers of the given models only, in the supervisor's order.

    given  names and patterns; nothing means all models

    Raises CommandFailure for a pattern that matches nothing, and the supervisor's own error for an unknown name.
    """
    if len(given) == 1 and not is_pattern(given[0]):
        return client.status(given[0])
    answer = client.status()
    if not given:
        return answer
    wanted: set[str] = set()
    for name in expanded(given, answer["models"]):
        meant = [worker["name"] for worker in answer["models"] if name in (worker["name"], worker["model"])]
        wanted.update(meant or (worker["name"] for worker in client.status(name)["models"]))  # an alias, or an error
    return answer | {"models": [worker for worker in answer["models"] if worker["name"] in wanted]}
