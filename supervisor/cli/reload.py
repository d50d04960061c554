"""The command reload: apply the present models.yaml, or replace the workers of one model, without losing a request."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.client.sync_client import Client
from protocol.errors import ErrorCode, WireError
from supervisor.cli import chosen_models, exit_codes
from supervisor.cli.command import Command
from supervisor.cli.compiling import compile_for
from supervisor.cli.errors import CommandFailure
from supervisor.cli.hints import say
from supervisor.cli.options import as_json, connect, is_remote, supervisor_options
from supervisor.cli.waiting import RolloutReport, goes_on, wait_for_gateway, wait_for_rollouts

if TYPE_CHECKING:
    from supervisor.yaml_source import Problem


@click.command(
    cls=Command,
    examples={
        "modelctl reload": "Apply what has changed in models.yaml",
        "modelctl reload llama-8b": "Give one model new workers, since its weights on disk have changed",
        "modelctl reload 'llama-*'": "Give each of these models new workers",
    },
)
@chosen_models.some
@click.option("--beside", "how", flag_value="beside", help="Start each new worker beside the old one.")
@click.option("--exchange", "how", flag_value="exchange", help="Stop each old worker before the new one is started.")
@click.option("--no-wait", is_flag=True, help="Give the order and return at once.")
@as_json
@supervisor_options
def reload(models: tuple[str, ...], how: str | None, no_wait: bool, as_json: bool, runtime_dir: Path) -> int:
    """Apply models.yaml as it is now; no request is lost.

    Models that have not changed keep their processes. With MODEL, only that model is reloaded: its workers are replaced
    even if nothing has changed, and the section supervisor is not applied. A new worker is started beside the old one
    if both fit. Otherwise requests wait while the worker is replaced. MODEL may be a pattern in quotes: 'llama-*'.
    A file with an error changes nothing.
    """
    with connect(runtime_dir, admin=True) as client:
        # A supervisor on another machine reports the errors of its file itself.
        problems: Sequence[Problem] = () if is_remote() else _prepare(client, quiet=as_json)
        # A name that no model has yet may be one that the file has now.
        names = chosen_models.expanded(models, client.status()["models"] if models else ())
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
            rollouts = wait_for_rollouts(client, numbers, for_people=not as_json)
            done = rollouts[0] if len(rollouts) == 1 else _joined(rollouts, dict(zip(numbers, names, strict=True)))
            of_gateway = [key for key in done["settings"] if key.startswith("gateway.")]
            unready = wait_for_gateway(client) if of_gateway else None
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
    failed = [] if unready is None else [f"the gateway does not answer: {unready}"]
    failed += [
        f"{model_report['model']}: {model_report['message']}"
        for model_report in done["models"]
        if model_report["state"] == "failed"
    ]
    if failed:
        raise CommandFailure(exit_codes.FAILED, "not_reloaded", *failed)
    return exit_codes.OK


def _joined(rollouts: list[RolloutReport], names: Mapping[int, str]) -> RolloutReport:
    """Return the reports of the orders for several models as one, with what each order says of its own model.

    names  number of an order → its model
    """
    own = [
        entry for rollout in rollouts for entry in rollout["models"] if entry["model"] == names[rollout["number"]]
    ]  # fmt: skip
    return {"settings": [key for rollout in rollouts for key in rollout["settings"]], "models": own}


def _prepare(client: Client, *, quiet: bool) -> "Sequence[Problem]":
    """Return the errors of the file. If there are none, compile ExLlamaV2 where that is needed.

    The supervisor gets the order in any case. It checks the file again, and notes an error for ``ps`` and ``events``.
    """
    from supervisor.config import load_config
    from supervisor.yaml_source import ConfigError

    try:
        config = load_config(Path(client.status()["supervisor"]["config"]))
    except ConfigError as e:
        return e.problems
    compile_for(config.engines, quiet=quiet)
    return ()


def _applied(key: str) -> str:
    """Return what has become of a changed key of the section ``supervisor``."""
    from supervisor.config_model import marked
    from supervisor.config_schema import SupervisorConfig

    later = key in marked(SupervisorConfig, "later")  # running workers keep the key's old value
    return "applied to workers that are started from now on" if later else "applied"


def _outcome(model: dict[str, Any]) -> str:
    if model["state"] == "failed":
        return "failed"
    by_how = {"beside": "exchanged, the new worker beside the old", "exchange": "exchanged", "retire": "removed"}
    by_change = {"added": "added", "removed": "removed", "settings": "settings applied, workers kept"}
    text: str = by_change.get(model["change"]) or by_how.get(model.get("how", ""), "applied at the next start")
    return text
