"""The command bench: measure the speed of the running supervisor's models."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from protocol.client.async_client import AsyncClient
from supervisor.cli import bench_figures, completion, exit_codes
from supervisor.cli.bench_load import prompts, run_once, usable_ids
from supervisor.cli.bench_report import report
from supervisor.cli.command import Command
from supervisor.cli.errors import CommandFailure
from supervisor.cli.options import as_json, runtime_dir_option
from supervisor.cli.tables import LiveLines, Shown, table, terminal_width

USUAL_STREAMS = (1, 8, 32)
"""Numbers of requests at once. Numbers above what a model computes together are left out."""
MOST_STREAMS = 4096
WARM_TOKENS = 8
"""Tokens of each answer in a run that is not counted."""


@dataclass(frozen=True)
class _Load:
    streams: tuple[int, ...] | None
    prompt_tokens: int
    output_tokens: int
    runs: int
    warmups: int
    seed: int


def _counts(context: click.Context, option: click.Parameter, given: str | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    try:
        counts = tuple(int(each) for each in given.split(","))
    except ValueError:
        raise click.BadParameter(f"{given!r} is not a number, or several with commas, such as 1,8,32") from None
    for count in counts:
        if not 1 <= count <= MOST_STREAMS:
            raise click.BadParameter(f"{count} streams: must be from 1 to {MOST_STREAMS}")
    return tuple(dict.fromkeys(counts))


def _writable(context: click.Context, option: click.Parameter, given: Path | None) -> Path | None:
    """Check the path of the result file before the measurement, which may take minutes."""
    if given is not None and not given.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {given.absolute().parent}")
    return given


_TOKENS = click.IntRange(1, 1_000_000)


@click.command(
    cls=Command,
    examples={
        "modelctl bench llama-8b": "Measure one model with 1, 8 and 32 requests at once",
        "modelctl bench llama-8b stories -c 1,16 -p 512 -n 256 -o speed.json": "Measure two models, keep the figures",
    },
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", shell_complete=completion.models)
@click.option(
    "-c",
    "--concurrency",
    "--max-concurrency",
    "streams",
    metavar="N[,N...]",
    callback=_counts,
    help="Requests at once.  [default: 1,8,32, as far as the model computes so many together]",
)
@click.option(
    "-p", "--prompt-tokens", "--n-prompt", "--random-input-len", type=_TOKENS, default=128, show_default=True,
    help="Tokens of each prompt, drawn at random.",
)  # fmt: skip
@click.option(
    "-n", "--output-tokens", "--n-gen", "--random-output-len", type=_TOKENS, default=128, show_default=True,
    help="Tokens of each answer.",
)  # fmt: skip
@click.option(
    "-r", "--runs", "--repetitions", type=click.IntRange(1, 1000), default=5, show_default=True,
    help="How often each number of streams is measured.",
)  # fmt: skip
@click.option("--warmups", "--num-warmups", type=click.IntRange(0, 100), default=1, show_default=True,
              help="Runs before, with short answers, that are not counted.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random prompts.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    callback=_writable,
    help="Write what --json prints into this file, too.",
)
@as_json
@runtime_dir_option
def bench(models: tuple[str, ...], out: Path | None, as_json: bool, runtime_dir: Path, **load: Any) -> int:
    """Measure how fast models of the running supervisor answer.

    Several MODELs are measured one after the other.

    In each run as many requests are sent at once as there are streams, over one connection, greedy, all of the same
    length. Ctrl-C cancels them and shows the results so far.
    """
    report = _Report(out, as_json)
    try:
        with asyncio.Runner() as runner:
            runner.run(_measure(list(dict.fromkeys(models)), _Load(**load), runtime_dir, report))
    finally:
        report.show()  # also after Ctrl-C, or after the supervisor has gone
    if report.errors:
        raise CommandFailure(exit_codes.FAILED, "requests_failed", *report.errors)
    return exit_codes.OK


class _Report:
    """The results so far, and the devices that were measured."""

    def __init__(self, out: Path | None, as_json: bool) -> None:
        self._out, self._as_json = out, as_json
        self._live = LiveLines(for_people=not as_json)
        self.rows: list[bench_figures.Row] = []
        self.errors: list[str] = []
        self.devices: dict[str, None] = {}
        """The devices that compute the models, each once."""

    def progress(self, model: str, text: str, more: str = "") -> None:
        self._live.show({model: Shown(f"{model}: {text}{more}", f"{model}: {text}")})

    def show(self) -> None:
        if not self.rows:
            return
        written = json.dumps(report(self.devices, self.rows), indent=2)
        rows = [row.cells for row in self.rows]
        click.echo(written if self._as_json else table(bench_figures.HEADER, rows, terminal_width()))
        if self._out is not None:
            self._out.write_text(written + "\n")


async def _measure(models: Sequence[str], load: _Load, runtime_dir: Path, report: _Report) -> None:
    draw = random.Random(load.seed)
    async with AsyncClient(runtime_dir=runtime_dir, reconnect=False) as client:
        for model in models:  # stop before any measurement if a model is unknown or its context is too short
            _check_context(load, model, (await client.status(model))["models"])
        for model in models:
            ids = await usable_ids(client, model, lambda text, model=model: report.progress(model, text))  # type: ignore[misc]
            workers = (await client.status(model))["models"]
            _check_context(load, model, workers)  # once a model is loaded, its context is certain
            report.devices |= {worker["device"]: None for worker in workers if worker["device"]}
            for streams in load.streams or _usual_streams(workers):
                await _measure_streams(client, model, streams, ids, load, draw, report)


def _check_context(load: _Load, model: str, workers: list[dict[str, Any]]) -> None:
    """Raise CommandFailure for lengths that do not fit the model's context."""
    context = min((worker["context"] for worker in workers if worker["context"]), default=None)
    wanted = load.prompt_tokens + load.output_tokens
    if context is not None and wanted > context:
        why = f"--prompt-tokens {load.prompt_tokens} and --output-tokens {load.output_tokens} are {wanted} in all"
        raise CommandFailure(
            exit_codes.FAILED, "too_long", f"{model}: {why}, its context is {context}: lower one of them"
        )


def _usual_streams(workers: list[dict[str, Any]]) -> tuple[int, ...]:
    together = sum(worker["max_batch_size"] for worker in workers)
    return tuple(streams for streams in USUAL_STREAMS if streams <= together)


async def _measure_streams(
    client: AsyncClient, model: str, streams: int, ids: list[int], load: _Load, draw: random.Random, report: _Report
) -> None:
    runs: list[list[bench_figures.MeasuredAnswer]] = []
    what = f"{streams} at once"
    for number in range(-load.warmups, load.runs):
        report.progress(model, what, f", run {number + 1} of {load.runs}" if number >= 0 else ", warming up")
        asked = prompts(ids, load.prompt_tokens, streams, draw)
        tokens = load.output_tokens if number >= 0 else min(WARM_TOKENS, load.output_tokens)
        answers = await run_once(client, model, asked, tokens)
        if number >= 0:
            runs.append(answers)
    report.rows.append(bench_figures.row(model, streams, runs))
    report.errors += [f"{model}, {what}: {each}" for each in bench_figures.errors(runs)]
