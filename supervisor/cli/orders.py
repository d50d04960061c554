"""start, stop, restart, shutdown."""

import json
import os
from pathlib import Path

import click

from protocol.client import Client
from supervisor.cli import exit_codes
from supervisor.cli.options import as_json, connect, runtime_dir_option
from supervisor.cli.waiting import ModelStatus, settled_down, settled_up, wait_for

_models = click.argument("models", nargs=-1, required=True, metavar="MODEL...")
_no_wait = click.option("--no-wait", is_flag=True, help="Give the order and return at once.")


@click.command()
@_models
@_no_wait
@as_json
@runtime_dir_option
def start(models: tuple[str, ...], no_wait: bool, as_json: bool, runtime_dir: Path) -> int:
    """Start models and show how they load."""
    with connect(runtime_dir, admin=True) as client:
        for name in models:
            client.call("start", model=name)
        return _report_up(client, list(models), no_wait, as_json)


@click.command()
@_models
@click.option("--now", is_flag=True, help="Do not wait for running requests; they end with an error.")
@_no_wait
@as_json
@runtime_dir_option
def stop(models: tuple[str, ...], now: bool, no_wait: bool, as_json: bool, runtime_dir: Path) -> int:
    """Stop models: let them finish their requests, then end their processes."""
    with connect(runtime_dir, admin=True) as client:
        for name in models:
            client.call("stop", model=name, now=now)
        if no_wait:
            return exit_codes.OK
        ended = wait_for(client, list(models), settled_down)
        _print_json(ended, as_json)
        return exit_codes.OK


@click.command()
@_models
@_no_wait
@as_json
@runtime_dir_option
def restart(models: tuple[str, ...], no_wait: bool, as_json: bool, runtime_dir: Path) -> int:
    """Stop models and start them again."""
    with connect(runtime_dir, admin=True) as client:
        wanted = {name: client.call("restart", model=name)["generation"] for name in models}
        if no_wait:
            return exit_codes.OK

        def settled(model: ModelStatus) -> bool:
            return model["generation"] >= wanted[model["name"]] and settled_up(model)

        return _verdict(wait_for(client, list(models), settled), as_json)


@click.command()
@click.option("--now", is_flag=True, help="Do not wait for running requests; they end with an error.")
@runtime_dir_option
def shutdown(now: bool, runtime_dir: Path) -> int:
    """Stop every model, then the supervisor itself; returns when it is gone."""
    with connect(runtime_dir, admin=True) as client:
        pid = client.status()["supervisor"]["pid"]
        pidfd = os.pidfd_open(pid)
        client.call("shutdown", now=now)
    _wait_for_exit(pidfd)
    return exit_codes.OK


def _report_up(client: Client, names: list[str], no_wait: bool, json_wanted: bool) -> int:
    if no_wait:
        return exit_codes.OK
    return _verdict(wait_for(client, names, settled_up), json_wanted)


def _verdict(models: list[ModelStatus], json_wanted: bool) -> int:
    _print_json(models, json_wanted)
    failed = [m for m in models if m["state"] != "ready"]
    for model in failed:
        why = (model.get("last_exit") or {}).get("message") or f"is {model['state']}"
        click.echo(f"modelctl: {model['name']}: {why} (log: {model['log']})", err=True)
    return exit_codes.FAILED if failed else exit_codes.OK


def _print_json(models: list[ModelStatus], wanted: bool) -> None:
    if wanted:
        click.echo(json.dumps(models, indent=2))


def _wait_for_exit(pidfd: int) -> None:
    import select

    select.select([pidfd], [], [])
    os.close(pidfd)
