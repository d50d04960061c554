"""The commands ps and status."""

import json
from pathlib import Path
from typing import Any

import click

from supervisor.cli import completion, figures, overview
from supervisor.cli.command import Command
from supervisor.cli.hints import completed
from supervisor.cli.options import as_json, connect, supervisor_options
from supervisor.cli.tables import GAP, table, terminal_width
from supervisor.cli.watch import look, watch

PS_HEADER: tuple[str, ...] = (
    "NAME",
    "STATE",
    "GPU",
    "VRAM(EST)",
    "CTX",
    "ACTIVE",
    "QUEUED",
    "TOK/S",
    "IDLE",
    "UNTIL",
    "PID",
    "REASON",
)
SHORTEST_REASON = 30
"""Least columns for a reason, however narrow the terminal is."""


@click.command(
    cls=Command,
    examples={
        "modelctl ps": "List the models of the supervisor on this machine",
        "modelctl ps --watch": "Look again each second",
        "modelctl ps --connect tcp://192.168.1.5:5570 --key-file ops.key": "List those of another machine",
    },
)
@watch
@as_json
@supervisor_options
def ps(watch: bool, as_json: bool, runtime_dir: Path) -> None:
    """List the models. With --watch and --json, each look is a line."""
    with connect(runtime_dir, admin=True) as client:

        def read() -> str:
            answer = client.status()
            warn_of_lost_lines(answer)
            warn_of_gateway(answer)
            models = answer["models"]
            return json.dumps(models, indent=None if watch else 2) if as_json else _ps_table(models)

        look(read, again=watch)


def _ps_table(models: list[dict[str, Any]]) -> str:
    width = terminal_width()
    longest = None if width is None else width - len(GAP) - max((len(m["name"]) for m in models), default=0)
    header, rows = PS_HEADER, [_ps_row(m, longest) for m in models]
    if any(figures.other_names(m) for m in models):  # few files have any, and the table is wide
        header = (*header, "ALSO CALLED")
        rows = [(*row, figures.other_names(m)) for row, m in zip(rows, models, strict=True)]
    return table(header, rows, width)


@click.command(
    cls=Command,
    examples={
        "modelctl status": "Show the supervisor and each model in some ten lines",
        "modelctl status llama-8b --verbose": "Show everything that is known of one model",
    },
)
@click.argument("model", required=False, shell_complete=completion.models)
@click.option("-v", "--verbose", is_flag=True, help="Show everything that is known.")
@as_json
@supervisor_options
def status(model: str | None, verbose: bool, as_json: bool, runtime_dir: Path) -> None:
    """Show the supervisor and its models, or one MODEL.

    Without --verbose, only known values and problems are shown.
    """
    with connect(runtime_dir, admin=True) as client:
        answer = client.status(model)
    warn_of_lost_lines(answer)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    if model is None:
        supervisor = answer["supervisor"]
        _print_part("supervisor", figures.lines(supervisor) if verbose else overview.of_supervisor(supervisor))
        for gpu in answer.get("gpus", []):
            click.echo(f"gpu {gpu['index']}\n  {_gpu(gpu)}")
        if why := answer.get("gpus_unknown"):
            click.echo(f"gpus\n  cannot be read: {why}")
    for entry in answer["models"]:
        name = entry.pop("name")
        _print_part(name, figures.lines(entry) if verbose else overview.of_model(entry))


def warn_of_lost_lines(answer: dict[str, Any]) -> None:
    """Warn on stderr if this answer to ``status`` says that the supervisor's log loses lines."""
    if trouble := answer["supervisor"].get("log_trouble"):
        click.echo(f"modelctl: the log {trouble}", err=True)


def warn_of_gateway(answer: dict[str, Any]) -> None:
    """Warn on stderr if this answer to ``status`` says that the gateway does not answer."""
    gateway = answer["supervisor"].get("gateway")
    if gateway and (problem := gateway["problem"]):
        click.echo(f"modelctl: the gateway at {figures.gateway_url(gateway)} does not answer: {problem}", err=True)


def _ps_row(m: dict[str, Any], longest: int | None = None) -> tuple[object, ...]:
    """Return the cells of a model.

    longest  characters of the reason that fit on the terminal; None: all of them
    """
    reason = completed(m.get("reason") or "-")
    if longest is not None and len(reason) > (room := max(longest, SHORTEST_REASON)):
        reason = f"{reason[: room - 3]}..."  # `status` shows all of it
    return (
        m["name"], m["state"], _where(m), _vram(m), m["context"], m["active"], m["queued"],
        m["tokens_per_s"], _age(m["idle_s"]), _until(m), m["pid"], reason,
    )  # fmt: skip


def _where(m: dict[str, Any]) -> str:
    """Return the configured GPU, and for ``auto`` also where the model was placed."""
    placed = m.get("placed")
    return f"auto:{','.join(map(str, placed))}" if m["gpu"] == "auto" and placed else str(m["gpu"])


def _vram(m: dict[str, Any]) -> str | None:
    """Return the memory that the model holds, and in brackets the estimate."""
    held, estimated = m.get("vram_bytes"), m.get("vram_estimate_bytes")
    text = "-" if held is None else figures.size(held)
    return f"{text} ({figures.size(estimated)})" if estimated else None if held is None else text


def _until(m: dict[str, Any]) -> str | None:
    """Return the cell UNTIL: the event that ends the model's present state, or the time until the model is unloaded."""
    if m["state"] == "unloaded":
        return "request"
    if m["state"] in ("stopped", "failed"):
        return "start"
    return None if m.get("until_s") is None else _age(m["until_s"])


def _gpu(gpu: dict[str, Any]) -> str:
    used, total, free = (figures.size(gpu[key]) for key in ("used_bytes", "total_bytes", "free_bytes"))
    return f"{used} of {total} in use, {free} free  {gpu['uuid']}"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 7200 else f"{seconds / 3600:.0f}h"


def _print_part(title: str, entries: list[tuple[str, list[str]]]) -> None:
    """Print a heading, and under it labels with their values. A value of several lines continues under its first
    line."""
    click.echo(title)
    width = max((len(label) for label, _ in entries), default=0)
    for label, texts in entries:
        for number, text in enumerate(texts):
            click.echo(f"  {label if number == 0 else '':<{width}}  {completed(text)}")
