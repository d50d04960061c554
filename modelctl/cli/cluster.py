"""The command cluster: show the machines of the Ray cluster, and what runs there."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from modelctl.cli.options import as_json, connect, show, supervisor_options, watch
from modelctl.cli.root import Command, completed
from modelctl.cli.tables import Column, clean, table, terminal_width, wrapped
from supervisor.config.spelling import duration

Values = Mapping[str, Any]
NO_CLUSTER: Final = (
    "there is no cluster: models.yaml has no section cluster, and all workers run on the supervisor's machine"
)
COLUMNS: Final = (
    Column("NODE"), Column("STATE", drop=1), Column("ADDRESS", drop=4), Column("GPUS", True, drop=2),
    Column("LEASED", True, drop=3), Column("VERSION", drop=6), Column("HEARD", drop=5, right=True),
    Column("WORKERS", drop=7, least=20),
)  # fmt: skip
LATE_S: Final = 10.0
"""Seconds without an answer of Ray after which the text says so."""


@click.command(
    cls=Command,
    examples={
        "modelctl cluster": "Show the machines of the Ray cluster, and the workers on each",
        "modelctl cluster --watch": "Look again each second",
        "modelctl cluster --json": "Print it for a program",
    },
)
@watch
@as_json
@supervisor_options
def cluster(watch: bool, as_json: bool, runtime_dir: Path) -> None:
    """Show the Ray cluster: its machines, their GPUs, and the workers on them.

    LEASED are GPUs that Ray has lent to anybody. HEARD is the time since a worker's agent was last heard. VERSION is
    known once a worker was started there. The supervisor's machine has the mark (here).

    --json prints null without a section `cluster` in models.yaml. Else it prints this section of `status --json`, with
    the workers of each machine, and those that wait for one.
    """
    with connect(runtime_dir, admin=True) as client:
        show(
            lambda: described(client.status()),
            lambda found: cluster_text(found, terminal_width()),
            as_json=as_json, again=watch,
        )  # fmt: skip


def described(status: Values) -> dict[str, Any] | None:
    """Return the cluster in a reply to the verb "status", each machine with its workers; None without a cluster.

    Workers that wait for a machine are under ``waiting``, with the reason.
    """
    found = status["supervisor"]["cluster"]
    if found is None:
        return None
    workers: dict[str | None, list[Values]] = {}
    for worker in status["models"]:
        workers.setdefault(worker["node"], []).append(worker)
    return {
        **found,
        "nodes": [
            {
                **node,
                "workers": _listed([*workers.get(node["name"], ()), *(workers.get(None, ()) if node["own"] else ())]),
            }
            for node in found["nodes"]
        ],
        "waiting": [
            {"name": worker["name"], "node": worker["node"], "reason": worker["reason"]}
            for worker in status["models"]
            if worker["state"] == "starting" and worker["reason"]
        ],
    }


def _listed(workers: Sequence[Values]) -> list[dict[str, Any]]:
    return [{key: worker[key] for key in ("name", "model", "state")} for worker in workers]


def cluster_text(found: Values | None, width: int | None) -> str:
    """Return the cluster as text: how the supervisor reaches it, a table of its machines, and what is wrong.

    found  the result of ``described``
    width  columns of the terminal; None: whole tables, and each text in one line
    """
    if found is None:
        return wrapped(NO_CLUSTER, width, 2)
    head = [f"Ray cluster {found['ray']}; workers on other machines connect to {found['advertise']}"]
    if found["model_store"]:
        head.append(f"the model store sends directories at {found['model_store']}")
    if found["trouble"]:
        head.append(f"cannot be used: {found['trouble']}")
    elif found["answered_s"] is None:
        head.append("it has not answered yet")
    elif found["answered_s"] > LATE_S:
        head.append(f"Ray has not answered for {duration(found['answered_s'])}: what follows is that old")
    rows = [_row(node) for node in found["nodes"]]
    rows += [_gone(node) for node in found["gone"]]
    tail = [f"{each['name']} waits: {each['reason']}" for each in found["waiting"]]
    parts = [_lines(head, width), table(COLUMNS, rows, width) if rows else "", _lines(tail, width)]
    return "\n\n".join(filter(None, parts))


def _lines(texts: Sequence[str], width: int | None) -> str:
    return "\n".join(wrapped(clean(completed(text)), width, 2) for text in texts)


def _row(node: Values) -> tuple[object, ...]:
    """Return the cells of a machine, in the order of COLUMNS."""
    name = f"{node['name']} (here)" if node["own"] else node["name"]
    heard = None if node["heard_s"] is None else duration(node["heard_s"])
    leased = _count(node["gpus"] - node["free"])
    return (
        name, "there", node["address"], _count(node["gpus"]), leased, node["version"], heard, _workers(node["workers"])
    )  # fmt: skip


def _gone(node: Values) -> tuple[object, ...]:
    """Return the cells of a machine that is gone, in the order of COLUMNS."""
    since = f"gone for {duration(node['gone_s'])}"
    return node["name"], since, node["address"], _count(node["gpus"]), None, None, None, None


def _workers(workers: Sequence[Values]) -> str | None:
    """Return the workers by model and state: ``llama-8b: 2 ready, 1 loading; qwen: 1 ready``; None without any."""
    states: dict[str, Counter[str]] = {}
    for worker in workers:
        states.setdefault(worker["model"], Counter())[worker["state"]] += 1
    counted = {model: ", ".join(f"{n} {state}" for state, n in counts.items()) for model, counts in states.items()}
    return "; ".join(f"{model}: {text}" for model, text in counted.items()) or None


def _count(gpus: float) -> str:
    return f"{gpus:g}"
