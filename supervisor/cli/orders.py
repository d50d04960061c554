"""The commands start, stop, restart and shutdown."""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from protocol.client.sync_client import Client
from protocol.errors import ConnectionLost
from supervisor.cli import completion, exit_codes
from supervisor.cli.command import Command
from supervisor.cli.errors import CommandFailure
from supervisor.cli.options import as_json, connect, is_remote, supervisor_options
from supervisor.cli.waiting import (
    POLL_S,
    ModelStatus,
    coming_generation,
    settled_down,
    settled_up,
    wait_for,
    wait_for_rollouts,
    why_not_ready,
)
from supervisor.workers.lifecycle import AT_REST

_models = click.argument("models", nargs=-1, required=True, metavar="MODEL...", shell_complete=completion.models)
_no_wait = click.option("--no-wait", is_flag=True, help="Give the order and return at once.")


@click.command(
    cls=Command,
    examples={
        "modelctl start llama-8b": "Start a model and wait until it is ready",
        "modelctl start llama-8b stories --no-wait": "Start two models, and do not wait for them",
    },
)
@_models
@_no_wait
@as_json
@supervisor_options
def start(models: tuple[str, ...], no_wait: bool, as_json: bool, runtime_dir: Path) -> None:
    """Start models and show how they load."""
    with connect(runtime_dir, admin=True) as client:
        replies = _order(client, "start", models)
        wanted = {name: coming_generation(worker) for name, worker in replies.items()}
        _see_up(client, wanted, no_wait, as_json)


@click.command(
    cls=Command,
    examples={
        "modelctl stop llama-8b": "Let the requests of a model finish, then end its process",
        "modelctl stop llama-8b --now": "End a process now; its requests end with an error",
    },
)
@_models
@click.option("--now", is_flag=True, help="Do not wait for running requests; they end with an error.")
@_no_wait
@as_json
@supervisor_options
def stop(models: tuple[str, ...], now: bool, no_wait: bool, as_json: bool, runtime_dir: Path) -> None:
    """Stop models once their requests are finished."""
    with connect(runtime_dir, admin=True) as client:
        stopped = {name: worker["generation"] for name, worker in _order(client, "stop", models, now=now).items()}
        ended = _watch(client, list(stopped), lambda m: settled_down(m, stopped[m["name"]]), no_wait, as_json)
    for model in ended:
        if model["state"] not in AT_REST and not (no_wait or as_json):
            click.echo(f"modelctl: {model['name']} was stopped, and started again meanwhile", err=True)
        if model.get("vram_return") == "not back" and not (no_wait or as_json):
            click.echo(f"modelctl: {model['name']} is stopped, but its VRAM is not back yet", err=True)


@click.command(
    cls=Command,
    examples={
        "modelctl restart llama-8b": "Restart a model; its requests wait meanwhile",
    },
)
@_models
@_no_wait
@as_json
@supervisor_options
def restart(models: tuple[str, ...], no_wait: bool, as_json: bool, runtime_dir: Path) -> None:
    """Stop models and start them again; requests wait meanwhile.

    If a model has several workers, they are restarted one after the other.
    """
    with connect(runtime_dir, admin=True) as client:
        _check_known(client, models)
        replies = [client.call("restart", model=name) for name in dict.fromkeys(models)]
        in_turns = [reply["turnover"] for reply in replies if reply["turnover"] is not None]
        if in_turns and not no_wait:
            wait_for_rollouts(client, in_turns, for_people=not as_json)
        wanted = {name: worker["generation"] for reply in replies for name, worker in reply["workers"].items()}
        _see_up(client, wanted, no_wait, as_json)


@click.command(
    cls=Command,
    examples={
        "modelctl shutdown": "Let all requests finish, then end all models and the supervisor",
        "modelctl shutdown --now": "End everything now",
    },
)
@click.option("--now", is_flag=True, help="Do not wait for running requests; they end with an error.")
@as_json
@supervisor_options
def shutdown(now: bool, as_json: bool, runtime_dir: Path) -> None:
    """Stop every model, then the supervisor.

    Returns when the supervisor is gone.
    """
    with connect(runtime_dir, admin=True) as client:
        pid = client.status()["supervisor"]["pid"]
        pidfd = None if is_remote() else os.pidfd_open(pid)
        client.call("shutdown", now=now)
        if pidfd is None:
            _wait_for_silence(client)
    if pidfd is not None:
        _wait_for_exit(pidfd)
    if as_json:
        click.echo(json.dumps({"pid": pid}))


def _order(client: Client, verb: str, models: tuple[str, ...], **params: Any) -> dict[str, dict[str, Any]]:
    """Give an order for each model, once. Return the replies by worker.

    Only the supervisor knows which workers an order concerns, for example during a rollout with an old and a new
    worker.
    """
    _check_known(client, models)
    replies = [client.call(verb, model=name, **params) for name in dict.fromkeys(models)]
    return {name: worker for reply in replies for name, worker in reply["workers"].items()}


def _check_known(client: Client, given: tuple[str, ...]) -> None:
    """Raise the supervisor's own error for a model that it does not know, before any order is given."""
    known = {name for model in client.status()["models"] for name in (model["name"], model["model"])}
    for name in given:
        if name not in known:
            client.status(name)


def _watch(
    client: Client, names: list[str], done: Callable[[ModelStatus], bool], no_wait: bool, as_json: bool
) -> list[ModelStatus]:
    """Show the models until they are done, or once with ``no_wait``. Return their last status.

    With ``as_json``, print that status as JSON, too.
    """
    models = wait_for(client, names, (lambda _: True) if no_wait else done, for_people=not as_json)
    if as_json:
        click.echo(json.dumps(models, indent=2))
    return models


def _see_up(client: Client, wanted: dict[str, int], no_wait: bool, as_json: bool) -> None:
    """Wait until models of these generations are up. Raises CommandFailure if one does not come up."""
    models = _watch(client, list(wanted), lambda m: settled_up(m, wanted[m["name"]]), no_wait, as_json)
    failed = [why_not_ready(m) for m in models if m["state"] != "ready"]
    there = [m["name"] for m in models]
    failed += [f"{name}: a reload has removed it meanwhile" for name in wanted if name not in there]
    if failed and not no_wait:
        raise CommandFailure(exit_codes.FAILED, "not_ready", *failed)


def _wait_for_silence(client: Client) -> None:
    """Wait until the connection to the supervisor is lost."""
    with suppress(ConnectionLost):
        while True:
            client.status()
            time.sleep(POLL_S)


def _wait_for_exit(pidfd: int) -> None:
    import select

    select.select([pidfd], [], [])
    os.close(pidfd)
