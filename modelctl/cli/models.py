"""The commands start, stop, unload, restart, sleep, wake, reload and shutdown."""

import json
import os
import re
import select
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelctl.cli import exit_codes, options
from modelctl.cli.options import (
    connect,
    is_remote,
    json_options,
    listener_of,
    order_options,
)
from modelctl.cli.root import CommandFailure, command, say
from modelctl.cli.waiting import (
    LiveLines,
    ModelStatus,
    TurnoverReport,
    check_ready,
    coming_generation,
    goes_on,
    ordering,
    problem_of_gateway,
    settled_asleep,
    settled_down,
    settled_up,
    until,
    wait_for,
    wait_for_turnovers,
)
from protocol.client.sync_client import Client
from protocol.errors import ConnectionLost, ErrorCode, WireError
from supervisor.workers.life import AT_REST

if TYPE_CHECKING:
    from supervisor.config.yaml_source import Problem


@command(
    ("modelctl start llama-8b stories --no-wait", "Start two models, and do not wait for them"),
)
@options.or_all
@order_options
def start(models: tuple[str, ...], every: bool, no_wait: bool, as_json: bool, runtime_dir: Path) -> None:
    """Start each MODEL and show how it loads.

    MODEL may be a pattern in quotes, such as 'llama-*'.
    """
    what = "the start of {} goes on: `modelctl ps` shows it, `modelctl stop` ends it"
    with ordering(runtime_dir, models, what, every=every) as (client, names):
        replies = give_order(client, "start", names)
        wanted = {name: coming_generation(worker) for name, worker in replies.items()}
        see_up(client, wanted, no_wait, as_json)


@command(
    ("modelctl stop llama-8b", "Let the requests of a model finish, then end its process"),
    ("modelctl stop 'llama-*' --now", "End the models whose names begin like this now"),
)
@options.or_all
@click.option("--now", is_flag=True, help="Do not wait for running requests; they end with an error.")
@order_options
def stop(models: tuple[str, ...], every: bool, now: bool, no_wait: bool, as_json: bool, runtime_dir: Path) -> None:
    """Stop each MODEL once its requests are finished.

    MODEL may be a pattern in quotes, such as 'llama-*'.
    """
    faster = "" if now else ", `modelctl stop --now` ends its requests"
    what = "the stop of {} goes on: `modelctl ps` shows it" + faster
    with ordering(runtime_dir, models, what, every=every) as (client, names):
        _see_down(client, give_order(client, "stop", names, now=now), "stopped", no_wait, as_json)


@command(
    ("modelctl unload --all", "Give the memory of all models back until somebody asks for them"),
)
@options.or_all
@order_options
def unload(models: tuple[str, ...], every: bool, no_wait: bool, as_json: bool, runtime_dir: Path) -> None:
    """Stop each MODEL once its requests are finished; its next request starts it again.

    MODEL may be a pattern in quotes, such as 'llama-*'. Requests that wait for a model bring it back at once.
    """
    what = "the unloading of {} goes on: `modelctl ps` shows it"
    with ordering(runtime_dir, models, what, every=every) as (client, names):
        _see_down(client, give_order(client, "unload", names), "unloaded", no_wait, as_json)


@command(
    ("modelctl restart llama-8b", "Restart a model"),
)
@options.or_all
@order_options
def restart(models: tuple[str, ...], every: bool, no_wait: bool, as_json: bool, runtime_dir: Path) -> None:
    """Stop each MODEL and start it again; its requests wait meanwhile.

    Several workers of a model are restarted one after the other. MODEL may be a pattern in quotes, such as 'llama-*'.
    """
    what = "the restart of {} goes on: `modelctl ps` shows it"
    with ordering(runtime_dir, models, what, every=every) as (client, names):
        replies = [client.call("restart", model=name) for name in names]
        in_turns = [reply["turnover"] for reply in replies if reply["turnover"] is not None]
        if in_turns and not no_wait:
            wait_for_turnovers(client, in_turns, LiveLines(for_people=not as_json))
        wanted = {name: worker["generation"] for reply in replies for name, worker in reply["workers"].items()}
        see_up(client, wanted, no_wait, as_json)


@command(
    ("modelctl shutdown", "Let all requests finish, then end everything"),
)
@click.option("--now", is_flag=True, help="Do not wait for running requests; they end with an error.")
@json_options
def shutdown(now: bool, as_json: bool, runtime_dir: Path) -> None:
    """Stop every model, then the supervisor."""
    with connect(runtime_dir, admin=True) as client:
        pid = client.status()["supervisor"]["pid"]
        pidfd = _pidfd_of(listener_of(client), pid)
        faster = "" if now else ": `modelctl shutdown --now` ends its requests"
        with goes_on(f"the shutdown of the supervisor (pid {pid}) goes on{faster}"):
            client.call("shutdown", now=now)
            if pidfd is None:
                with suppress(ConnectionLost):
                    until(client, lambda _: None)
            else:
                select.select([pidfd], [], [])
                os.close(pidfd)
    click.echo(json.dumps({"pid": pid}) if as_json else f"the supervisor (pid {pid}) has ended")


def give_order(client: Client, verb: str, names: Sequence[str], **params: Any) -> dict[str, dict[str, Any]]:
    """Give an order for each model. Return the replies by worker.

    Only the supervisor knows which workers an order concerns, for example during a turnover with an old and a new
    worker.
    """
    replies = [client.call(verb, model=name, **params) for name in names]
    return {name: worker for reply in replies for name, worker in reply["workers"].items()}


def _see_down(client: Client, workers: dict[str, dict[str, Any]], what: str, no_wait: bool, as_json: bool) -> None:
    """Wait until the processes are gone that these workers had when an order to end them was given.

    what  the state that the order leads to
    """
    had = {name: worker["generation"] for name, worker in workers.items()}
    models = watch(client, had, lambda m: settled_down(m, had[m["name"]]), no_wait, as_json)
    for model in () if no_wait or as_json else models:
        if model["state"] not in AT_REST:
            click.echo(f"modelctl: {model['name']} was {what}, and started again meanwhile", err=True)
        if model.get("vram_return") == "not back":
            click.echo(f"modelctl: {model['name']} is {what}, but its VRAM is not back yet", err=True)


def watch(
    client: Client,
    names: Collection[str],
    done: Callable[[ModelStatus], bool],
    no_wait: bool,
    as_json: bool,
    *,
    up: bool = False,
) -> list[ModelStatus]:
    """Show the models until they are done, or once with ``no_wait``. Return their last status.

    With ``as_json``, print that status as JSON, too.

    up  see ``wait_for``
    """
    lines = LiveLines(for_people=not as_json)
    models = wait_for(client, names, lambda m: no_wait or done(m), lines, up=up and not no_wait)
    if as_json:
        click.echo(json.dumps(models, indent=2))
    return models


def see_up(client: Client, wanted: dict[str, int], no_wait: bool, as_json: bool) -> None:
    """Wait until models of these generations are up. Raises CommandFailure if one does not come up."""
    models = watch(client, wanted, lambda m: settled_up(m, wanted[m["name"]]), no_wait, as_json, up=True)
    if not no_wait:
        check_ready(models, wanted)


def _pidfd_of(listener: int, pid: int) -> int | None:
    """Return a pidfd of the supervisor; None if it is not known which process here is the supervisor.

    listener  the pid of the process that listens, from the kernel; 0 if it is not known
    pid       the supervisor's pid, from its message. In another PID namespace it means another process, or none

    The listener may also be a program between, such as ssh. That one does not end with the supervisor. So the listener
    must have the supervisor's pid in its own namespace.
    """
    if not listener:
        return None
    try:
        pidfd = os.pidfd_open(listener)
    except OSError:  # it has ended
        return None
    try:
        facts = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    except OSError:  # /proc is not mounted, or is that of another namespace
        facts = ""
    if (names := re.search(r"^NSpid:.*\s(\d+)$", facts, re.MULTILINE)) and int(names[1]) == pid:
        return pidfd
    os.close(pidfd)
    return None


# The commands sleep and wake.


@command(("modelctl sleep llama-8b", "Give the GPU memory of a model back; the next request wakes it"))
@options.named
@order_options
def sleep(models: tuple[str, ...], no_wait: bool, as_json: bool, runtime_dir: Path) -> None:
    """Put each lazy MODEL to sleep in host memory; a pattern such as 'llama-*' needs quotes.

    A model that answers requests goes to sleep as soon as it has none.
    """
    with ordering(runtime_dir, models, "{} will still go to sleep: `modelctl ps` shows it") as (client, names):
        watch(client, give_order(client, "sleep", names), settled_asleep, no_wait, as_json)


@command(("modelctl wake llama-8b", "Wake a model before its next request comes"))
@options.named
@order_options
def wake(models: tuple[str, ...], no_wait: bool, as_json: bool, runtime_dir: Path) -> None:
    """Wake each MODEL that sleeps; a pattern such as 'llama-*' needs quotes."""
    with ordering(runtime_dir, models, "the waking of {} goes on: `modelctl ps` shows it") as (client, names):
        workers = give_order(client, "wake", names)
        see_up(client, {name: worker["generation"] for name, worker in workers.items()}, no_wait, as_json)


# The command reload: apply the present models.yaml, or replace the workers of one model, without losing a request.


@command(
    ("modelctl reload llama-8b", "Give one model new workers, since its weights on disk have changed"),
)
@options.some
@click.option("--beside", "how", flag_value="beside", help="Start each new worker beside the old one.")
@click.option("--exchange", "how", flag_value="exchange", help="Stop each old worker before the new one is started.")
@order_options
def reload(models: tuple[str, ...], how: str | None, no_wait: bool, as_json: bool, runtime_dir: Path) -> int:
    """Apply models.yaml as it is now; no request is lost.

    Models that have not changed keep their processes. With MODEL, only that model is reloaded, even if nothing has
    changed. A new worker is started beside the old one if both fit. Otherwise requests wait while the worker is
    replaced. MODEL may be a pattern in quotes: 'llama-*'. A file with an error changes nothing.
    """
    with connect(runtime_dir, admin=True) as client:
        # A supervisor on another machine reports the errors of its file itself.
        problems: Sequence[Problem] = () if is_remote() else _prepare(client, quiet=as_json)
        # A name that no model has yet may be one that the file has now.
        names = options.expanded(models, client.status()["models"] if models else ())
        orders: list[dict[str, Any]] = [{"model": name} for name in names] or [{}]
        given: dict[str, Any] = {} if how is None else {"how": how}
        with goes_on("the reload goes on: `modelctl ps` shows its models, `modelctl events` its end"):
            try:
                numbers = [client.call("reload", **order, **given)["turnover"] for order in orders]
            except WireError as e:
                # This shell may have other variables of the environment than the supervisor.
                same = any(problem.message in e.message for problem in problems)
                if not same or e.code is not ErrorCode.INVALID_REQUEST:
                    raise
                for problem in problems:  # a line each; the supervisor's error has all of them in one
                    say(str(problem))
                click.echo("modelctl: nothing is changed", err=True)
                return exit_codes.CONFIG
            if no_wait:
                return exit_codes.OK
            turnovers = wait_for_turnovers(client, numbers, LiveLines(for_people=not as_json))
            done = turnovers[0] if len(turnovers) == 1 else _joined(turnovers, dict(zip(numbers, names, strict=True)))
            of_gateway = [key for key in done["settings"] if key.startswith("gateway.")]
            unready = until(client, problem_of_gateway) if of_gateway else ""
    if as_json:
        click.echo(json.dumps({"supervisor": done["settings"], "models": done["models"]}, indent=2))
    else:
        for model_report in done["models"]:
            if model_report["change"] != "unchanged" or model_report["model"] in names:
                click.echo(f"{model_report['model']}: {_outcome(model_report)}")
        for key in done["settings"]:
            name = key if key in of_gateway else f"supervisor.{key}"
            click.echo(f"{name}: {_applied(key)}")
        if not done["settings"] and all(model_report["change"] == "unchanged" for model_report in done["models"]):
            click.echo("nothing has changed")
    failed = [f"the gateway does not answer: {unready}"] if unready else []
    failed += [
        f"{model_report['model']}: {model_report['message']}"
        for model_report in done["models"]
        if model_report["state"] == "failed"
    ]
    if failed:
        raise CommandFailure(exit_codes.FAILED, "not_reloaded", *failed)
    return exit_codes.OK


def _joined(turnovers: list[TurnoverReport], names: Mapping[int, str]) -> TurnoverReport:
    """Return the reports of the orders for several models as one, with what each order says of its own model.

    names  number of an order → its model
    """
    own = [
        entry for turnover in turnovers for entry in turnover["models"] if entry["model"] == names[turnover["number"]]
    ]  # fmt: skip
    return {"settings": [key for turnover in turnovers for key in turnover["settings"]], "models": own}


def _prepare(client: Client, *, quiet: bool) -> "Sequence[Problem]":
    """Return the errors of the file. If there are none, compile ExLlamaV2 where that is needed.

    The supervisor gets the order in any case. It checks the file again, and notes an error for ``ps`` and ``events``.
    """
    from modelctl.cli.serve import compile_for
    from supervisor.config.file import load_config
    from supervisor.config.yaml_source import ConfigError

    try:
        config = load_config(Path(client.status()["supervisor"]["config"]))
    except ConfigError as e:
        return e.problems
    compile_for(config.engines, quiet=quiet)
    return ()


def _applied(key: str) -> str:
    """Return what has become of a changed key of the section ``supervisor``."""
    from supervisor.config.models import marked
    from supervisor.config.server import SupervisorConfig

    later = key in marked(SupervisorConfig, "later")  # running workers keep the key's old value
    return "applied to workers that are started from now on" if later else "applied"


def _outcome(model: dict[str, Any]) -> str:
    if model["state"] == "failed":
        return "failed"
    by_how = {"beside": "exchanged, the new worker beside the old", "exchange": "exchanged", "retire": "removed"}
    by_change = {"added": "added", "removed": "removed", "settings": "settings applied, workers kept"}
    text: str = by_change.get(model["change"]) or by_how.get(model.get("how", ""), "applied at the next start")
    return text
