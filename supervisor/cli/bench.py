"""The command bench: measure the speed of the running supervisor's models."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from protocol.client.async_client import AsyncClient
from protocol.client.model_names import means, unknown_among
from protocol.errors import ErrorCode, WireError
from supervisor.cli import bench_figures, chosen_models, exit_codes
from supervisor.cli.bench_load import prompts, run_once, usable_ids
from supervisor.cli.bench_report import plot, report
from supervisor.cli.command import Command
from supervisor.cli.errors import CommandFailure
from supervisor.cli.live_lines import LiveLines, Progress, Shown
from supervisor.cli.options import as_json, connect, is_remote, supervisor_options, way_to
from supervisor.cli.tables import table, terminal_width
from supervisor.cli.waiting import shown

USUAL_STREAMS = (1, 8, 32)
"""Numbers of requests at once. Numbers above what a model computes together are left out."""
MOST_STREAMS = 4096
REDRAW_S = 0.5
"""Seconds between two looks at the tokens that have come."""
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
    """Check the path of a file before the measurement, which may take minutes."""
    if given is not None and not given.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {given.absolute().parent}")
    return given


_TOKENS = click.IntRange(1, 1_000_000)


@click.command(
    cls=Command,
    examples={
        "modelctl bench llama-8b": "Measure one model with 1, 8 and 32 requests at once",
        "modelctl bench llama-8b stories -c 1,16 -p 512 -n 256 -o speed.json": "Measure two models, keep the figures",
        "modelctl bench llama-8b -c 1,2,4,8,16 --plot speed.svg": "Draw tokens per second over streams",
    },
)
@chosen_models.named
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
@click.option(
    "--plot",
    "drawn",
    metavar="FILE.svg",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    callback=_writable,
    help="Draw tokens per second over streams into this file.",
)
@as_json
@supervisor_options
def bench(
    models: tuple[str, ...], out: Path | None, drawn: Path | None, as_json: bool, runtime_dir: Path, **load: Any
) -> int:
    """Measure how fast models of the running supervisor answer.

    Several MODELs are measured one after the other. MODEL may be a pattern in quotes, such as 'llama-*'.

    In each run as many requests are sent at once as there are streams, over one connection, greedy, all of the same
    length. Ctrl-C cancels them and shows the results so far.
    """
    report = _Report(out, drawn, as_json)
    try:
        with asyncio.Runner() as runner:
            runner.run(_measure(_names(models, runtime_dir), _Load(**load), runtime_dir, report))
    finally:
        report.show()  # also after Ctrl-C, or after the supervisor has gone
    if report.errors:
        raise CommandFailure(exit_codes.FAILED, "requests_failed", *report.errors)
    return exit_codes.OK


def _names(given: tuple[str, ...], runtime_dir: Path) -> list[str]:
    """Return the models that names and patterns mean, each once."""
    if not any(map(chosen_models.is_pattern, given)):
        return list(dict.fromkeys(given))
    with connect(runtime_dir) as client:
        return chosen_models.ordered(client, given)


class _Report:
    """The results so far, and the devices that were measured."""

    def __init__(self, out: Path | None, drawn: Path | None, as_json: bool) -> None:
        self._out, self._drawn, self._as_json = out, drawn, as_json
        self._live = LiveLines(for_people=not as_json)
        self.rows: list[bench_figures.Row] = []
        self.errors: list[str] = []
        self.devices: dict[str, None] = {}
        """The devices that compute the models, each once."""

    def waits(self, model: str, why: str, worker: dict[str, Any]) -> None:
        """Show how the load of a model gets on. ``why``: the reason for the wait, for a log."""
        known = shown(worker)
        self._live.show({model: Shown(known.line, f"{model}: {why}", known.progress)})

    @asynccontextmanager
    async def running(self, model: str, text: str, more: str, count: "_Count") -> AsyncIterator[None]:
        """Show on a terminal, twice a second, how many tokens have come; elsewhere, what is measured."""

        async def follow() -> None:
            while True:
                self._live.show({model: Shown(f"{model}: {text}{more}", f"{model}: {text}", count.progress())})
                await asyncio.sleep(REDRAW_S)

        task = asyncio.create_task(follow())
        try:
            yield
        finally:
            task.cancel()

    def show(self) -> None:
        self._live.clear()
        if not self.rows:
            return
        written = json.dumps(report(self.devices, self.rows, remote=is_remote()), indent=2)
        rows = [row.cells for row in self.rows]
        click.echo(written if self._as_json else table(bench_figures.COLUMNS, rows, terminal_width()))
        if self._out is not None:
            self._out.write_text(written + "\n")
        if self._drawn is not None and (image := plot(self.rows)) is not None:
            self._drawn.write_text(image, encoding="utf-8")


async def _measure(models: Sequence[str], load: _Load, runtime_dir: Path, report: _Report) -> None:
    draw = random.Random(load.seed)
    async with AsyncClient(**way_to(runtime_dir), reconnect=False) as client:
        for model in models:  # stop before any measurement if a model is unknown or its context is too short
            _check_context(load, model, await _workers(client, model))
        for model in models:
            ids = await _usable_ids(client, model, report)
            workers = await _workers(client, model)
            _check_context(load, model, workers)  # once a model is loaded, its context is certain
            report.devices |= {worker["device"]: None for worker in workers if worker["device"]}
            levels = load.streams or _usual_streams(workers)
            total, done = sum(levels) * load.runs * load.output_tokens, 0
            for streams in levels:
                count = _Count(done, total)
                await _measure_streams(client, model, streams, ids, load, draw, report, count)
                done += streams * load.runs * load.output_tokens


async def _usable_ids(client: AsyncClient, model: str, report: _Report) -> list[int]:
    async def show(why: str) -> None:
        report.waits(model, why, (await _workers(client, model))[0])

    return await usable_ids(client, model, show)


async def _workers(client: AsyncClient, model: str) -> list[dict[str, Any]]:
    """Return the status of a model's workers. A key with only the right infer sees one, with the context alone."""
    try:
        workers: list[dict[str, Any]] = (await client.status(model))["models"]
        return workers
    except WireError as e:
        if e.code is not ErrorCode.FORBIDDEN:
            raise
    listed = (await client.models())["models"]
    found = [each for each in listed if means(each, model)]
    if not found:
        raise unknown_among(listed, model)
    return [{**each, "device": None, "max_batch_size": max(USUAL_STREAMS)} for each in found]


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


@dataclass
class _Count:
    """The tokens of one model's measurement.

    done   of earlier numbers of streams
    total  of all numbers of streams
    runs   the answers of the present number of streams
    """

    done: int
    total: int
    runs: list[list[bench_figures.MeasuredAnswer]] = field(default_factory=list)

    def progress(self) -> Progress:
        came = sum(tokens for run in self.runs for answer in run for _, tokens in answer.deltas)
        return {"done": self.done + came, "total": self.total, "unit": "tokens"}


async def _measure_streams(
    client: AsyncClient,
    model: str,
    streams: int,
    ids: list[int],
    load: _Load,
    draw: random.Random,
    report: _Report,
    count: _Count,
) -> None:
    what = f"{streams} at once"
    for number in range(-load.warmups, load.runs):
        asked = prompts(ids, load.prompt_tokens, streams, draw)
        tokens = load.output_tokens if number >= 0 else min(WARM_TOKENS, load.output_tokens)
        answers: list[bench_figures.MeasuredAnswer] = []
        if number >= 0:
            count.runs.append(answers)
        more = f", run {number + 1} of {load.runs}" if number >= 0 else ", warming up"
        async with report.running(model, what, more, count):
            await run_once(client, model, asked, tokens, answers)
    report.rows.append(bench_figures.row(model, streams, count.runs))
    report.errors += [f"{model}, {what}: {each}" for each in bench_figures.errors(count.runs)]
