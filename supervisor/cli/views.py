"""The commands ps and status."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from supervisor.cli import chosen_models, colours, figures, overview
from supervisor.cli.command import Command
from supervisor.cli.hints import completed
from supervisor.cli.options import as_json, connect, supervisor_options
from supervisor.cli.tables import Column, table, terminal_width
from supervisor.cli.text_width import clean, wrapped
from supervisor.cli.watch import show, watch
from supervisor.phase_lines import percentage_of
from supervisor.spelling import size

NODE = Column("NODE", drop=4)
ALSO_CALLED = Column("ALSO CALLED", drop=14, least=16)
FOLDER = Column("FOLDER", drop=15)
PS = (
    Column("NAME"), Column("STATE", state=True), NODE, Column("GPU", drop=4), Column("VRAM(EST)", drop=6),
    Column("CTX", drop=11), Column("ACTIVE", drop=1), Column("QUEUED", drop=2), Column("TOK/S", drop=3),
    Column("IDLE", drop=8), Column("UNTIL", drop=9), Column("PID", drop=10), Column("SINCE", drop=5),
    Column("RESTARTS", drop=12), Column("CACHE", drop=13, right=True), ALSO_CALLED, FOLDER,
    Column("REASON", drop=7, least=30),
)  # fmt: skip
UNWELL = ("failed", "backoff")


@click.command(
    cls=Command,
    examples={
        "modelctl ps": "List the models of the supervisor on this machine",
        "modelctl ps 'llama-*' --watch": "List some of them, and look again each second",
        "modelctl ps --connect tcp://192.168.1.5:5570 --key-file ops.key": "List those of another machine",
    },
)
@chosen_models.some
@watch
@as_json
@supervisor_options
def ps(models: tuple[str, ...], watch: bool, as_json: bool, runtime_dir: Path) -> None:
    """List the models, or each MODEL: names, or quoted patterns such as 'llama-*'.

    A narrow terminal shows fewer columns, and the whole reason of a failure below them. A pipe gets all columns. With
    --watch and --json, each look is a line.
    """
    with connect(runtime_dir, admin=True) as client:

        def read() -> list[dict[str, Any]]:
            answer = chosen_models.status_of(client, models)
            warn_of_troubles(answer)
            listed: list[dict[str, Any]] = answer["models"]
            return listed

        show(read, lambda listed: ps_text(listed, terminal_width()), as_json=as_json, again=watch)


def ps_text(models: list[dict[str, Any]], width: int | None) -> str:
    """Return the table of the models, and below it the failures' reasons that it does not show in full.

    width  columns of the terminal; None: all columns
    """
    # Few files have other names or other machines, and the table is wide.
    used = {ALSO_CALLED: any(map(figures.other_names, models)), NODE: any(m.get("node") for m in models),
            FOLDER: any(m.get("folder") for m in models)}  # fmt: skip
    columns = [column for column in PS if used.get(column, True)]

    def shown(reasons: Sequence[str]) -> str:
        rows = []
        for model, reason in zip(models, reasons, strict=True):
            cells = zip(PS, _ps_row(model, reason, in_words=width is not None), strict=True)
            rows.append([cell for column, cell in cells if used.get(column, True)])
        return table(columns, rows, width)

    reasons = [clean(completed(m.get("reason") or "-")) for m in models]
    whole = shown(reasons)
    unseen = [m["state"] in UNWELL and reason not in whole for m, reason in zip(models, reasons, strict=True)]
    if not any(unseen):
        return whole
    texts = [
        wrapped(f"{m['name']}: {reason}", width, 2)
        for m, reason, below in zip(models, reasons, unseen, strict=True)
        if below
    ]
    kept = ["see below" if below else reason for reason, below in zip(reasons, unseen, strict=True)]
    return "\n".join([shown(kept), "", *texts])


@click.command(
    cls=Command,
    examples={
        "modelctl status": "Show the supervisor and each model in some ten lines",
        "modelctl status llama-8b --verbose": "Show everything that is known of one model",
        "modelctl status 'llama-*' --watch": "Look at some models again each second",
    },
)
@chosen_models.some
@click.option("-v", "--verbose", is_flag=True, help="Show everything that is known.")
@watch
@as_json
@supervisor_options
def status(models: tuple[str, ...], verbose: bool, watch: bool, as_json: bool, runtime_dir: Path) -> None:
    """Show the supervisor and its models, or each MODEL: names, or quoted patterns such as 'llama-*'.

    Without --verbose, only known values and problems are shown.
    """
    with connect(runtime_dir, admin=True) as client:

        def read() -> dict[str, Any]:
            answer = chosen_models.status_of(client, models)
            warn_of_troubles(answer)
            return answer

        def text(answer: dict[str, Any]) -> str:
            return status_text(answer, terminal_width(), verbose=verbose, of_supervisor=not models)

        show(read, text, as_json=as_json, again=watch)


def status_text(answer: dict[str, Any], width: int | None, *, verbose: bool, of_supervisor: bool) -> str:
    """Return the reply to the verb "status" as text.

    width  columns of the terminal, to which values are wrapped; None: they are not
    """
    parts = []
    if of_supervisor:
        supervisor = answer["supervisor"]
        entries = figures.lines(supervisor) if verbose else overview.of_supervisor(supervisor)
        parts.append(_part("supervisor", entries, width))
        parts += [f"{colours.title('gpu ' + str(gpu['index']))}\n  {_gpu(gpu)}" for gpu in answer.get("gpus", [])]
        if why := answer.get("gpus_unknown"):
            parts.append(f"{colours.title('gpus')}\n{wrapped(f'  cannot be read: {why}', width, 2)}")
    for each in answer["models"]:
        entry = {key: value for key, value in each.items() if key != "name"}
        parts.append(_part(each["name"], figures.lines(entry) if verbose else overview.of_model(entry), width))
    return "\n".join(parts)


def warn_of_troubles(answer: dict[str, Any]) -> None:
    """Warn on stderr of what is wrong with the supervisor as a whole, by this answer to ``status``."""
    supervisor = answer["supervisor"]
    for name, words in supervisor["troubles"].items():
        click.echo(f"modelctl: {_BEGINS.get(name, '')}{words}", err=True)


_BEGINS = {"log": "the log ", "gpus": "the GPUs cannot be read: ", "gateway": "the gateway does not answer: ",
           "cluster": "cluster: ", "folders": "folders: "}  # fmt: skip
"""The beginning of the line about a trouble."""


def _ps_row(m: dict[str, Any], reason: str, *, in_words: bool) -> tuple[object, ...]:
    """Return the cells of a model, in the order of PS.

    reason    the cell REASON
    in_words  say how far a load is; programs read the bare state
    """
    percentage = percentage_of(m.get("progress")) if in_words else None
    state = m["state"] if percentage is None else f"{m['state']} {percentage} %"
    return (
        m["name"], state, m.get("node"), _where(m), _vram(m), m["context"], m["active"], m["queued"], m["tokens_per_s"],
        _age(m["idle_s"]), _until(m), m["pid"], _age(m["state_s"]), m["restarts"],
        figures.cache_in_use(m.get("engine_stats") or {}), figures.other_names(m), m.get("folder"), reason,
    )  # fmt: skip


def _where(m: dict[str, Any]) -> str:
    """Return the configured GPU, and for ``auto`` also where the model was placed."""
    placed = m.get("placed")
    return f"auto:{','.join(map(str, placed))}" if m["gpu"] == "auto" and placed else str(m["gpu"])


def _vram(m: dict[str, Any]) -> str | None:
    """Return the memory that the model holds, and in brackets the estimate."""
    held, estimated = m.get("vram_bytes"), m.get("vram_estimate_bytes")
    text = "-" if held is None else size(held)
    return f"{text} ({size(estimated)})" if estimated else None if held is None else text


def _until(m: dict[str, Any]) -> str | None:
    """Return the cell UNTIL: the event that ends the model's present state, or the time until the model is unloaded."""
    if m["state"] in ("unloaded", "asleep"):
        return "request"
    if m["state"] in ("stopped", "failed"):
        return "start"
    return None if m.get("until_s") is None else _age(m["until_s"])


def _gpu(gpu: dict[str, Any]) -> str:
    used, total, free = (size(gpu[key]) for key in ("used_bytes", "total_bytes", "free_bytes"))
    memory = f"{used} of {total} in use, {free} free  {gpu['uuid']}"
    return f"{memory}\n  {sensors}" if (sensors := figures.sensors(gpu)) else memory


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 7200 else f"{seconds / 3600:.0f}h"


def _part(title: str, entries: list[tuple[str, list[str]]], width: int | None) -> str:
    """Return a heading, and under it labels with their values. What follows the first line of a value is under it."""
    longest = max((len(label) for label, _ in entries), default=0)
    lines = [colours.title(title)]
    for label, texts in entries:
        for number, text in enumerate(texts):
            value = clean(completed(text))
            line = wrapped(f"  {label if number == 0 else '':<{longest}}  {value}", width, longest + 4)
            if label == "state" and number == 0:
                word = value.partition(" ")[0]
                line = line.replace(word, colours.painted(word), 1) if line.count(word) == 1 else line
            lines.append(line)
    return "\n".join(lines)
