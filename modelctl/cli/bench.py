"""The command bench: measure the speed of the running supervisor's models."""

import asyncio
import itertools
import json
import math
import os
import platform
import random
import re
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import click

from modelctl.cli import exit_codes, options
from modelctl.cli.options import connect, is_remote, json_options, way_to
from modelctl.cli.root import CommandFailure, command
from modelctl.cli.tables import Column, table, terminal_width
from modelctl.cli.waiting import LiveLines, Progress, Shown, shown
from protocol import __version__
from protocol.client.async_client import AsyncClient
from protocol.errors import ErrorCode, WireError
from protocol.names import means, unknown_among

# Turn the answers that ``bench`` received into a row of its table and entries of a result file. Pure.
#
# All times are seconds since the beginning of a run. In a run as many requests are sent together as there are streams.


COLUMNS = (
    Column("MODEL"), Column("STREAMS"), Column("TOK/S"), Column("FIRST TOKEN MS P50", drop=2), Column("P99", drop=4),
    Column("BETWEEN DELTAS MS P50", drop=3), Column("P99", drop=5), Column("REFUSED", drop=6), Column("FAILED", drop=1),
)  # fmt: skip


@dataclass
class MeasuredAnswer:
    """The answer to one request.

    deltas    (seconds, number of tokens) of each delta that brought tokens
    accepted  whether the supervisor accepted the request
    error     why the answer failed, None if it did not
    """

    deltas: list[tuple[float, int]] = field(default_factory=list)
    accepted: bool = False
    error: str | None = None


@dataclass(frozen=True)
class BenchRow:
    """The result of one model with a number of streams. Times are in milliseconds. A value is None if it could not be
    measured.

    rate   tokens per second from the first request to the last token, the median of the runs
    first  time from a request to its first token, (median, 99th percentile) of all requests
    gap    time between two deltas of a stream, (median, 99th percentile) of all pairs
    """

    model: str
    streams: int
    rate: float | None
    first: tuple[float | None, float | None]
    gap: tuple[float | None, float | None]
    refused: int
    failed: int

    @property
    def cells(self) -> tuple[object, ...]:
        """Return the cells of the row, in the order of COLUMNS."""
        times = (None if value is None else round(value, 1) for value in (*self.first, *self.gap))
        rate = None if self.rate is None else round(self.rate, 1)
        return (self.model, self.streams, rate, *times, self.refused, self.failed)

    def results(self) -> list[dict[str, object]]:
        """Return the figures in the schema of ``benchmarks/results``: {name, value, unit, target, meets}."""
        label = f"{self.model}, {self.streams} streams"
        figures = (
            ("tokens/s", self.rate, "tok/s"),
            ("first token, median", self.first[0], "ms"),
            ("first token, p99", self.first[1], "ms"),
            ("between deltas, median", self.gap[0], "ms"),
            ("between deltas, p99", self.gap[1], "ms"),
            ("refused", self.refused, "requests"),
            ("failed", self.failed, "requests"),
        )
        return [
            {"name": f"{label}: {name}", "value": value, "unit": unit, "target": None, "meets": None}
            for name, value, unit in figures
            if value is not None
        ]


def row(model: str, streams: int, runs: Sequence[Sequence[MeasuredAnswer]]) -> BenchRow:
    """Return the row of runs with ``streams`` requests each. Failed answers count with the tokens that they brought."""
    answers = [answer for run in runs for answer in run]
    firsts = [answer.deltas[0][0] for answer in answers if answer.deltas]
    gaps = [later[0] - earlier[0] for answer in answers for earlier, later in itertools.pairwise(answer.deltas)]
    rates = [rate for run in runs if (rate := _rate(run)) is not None]
    bad = [answer for answer in answers if answer.error is not None]
    return BenchRow(
        model,
        streams,
        statistics.median(rates) if rates else None,
        _middle_and_tail(firsts),
        _middle_and_tail(gaps),
        refused=sum(not answer.accepted for answer in bad),
        failed=sum(answer.accepted for answer in bad),
    )


def errors(runs: Sequence[Sequence[MeasuredAnswer]]) -> list[str]:
    """Return each kind of error once with its number, the most frequent first."""
    counts = Counter(answer.error for run in runs for answer in run if answer.error is not None)
    return [f"{count} requests: {text}" if count > 1 else text for text, count in counts.most_common()]


def _rate(run: Sequence[MeasuredAnswer]) -> float | None:
    ends = [answer.deltas[-1][0] for answer in run if answer.deltas]
    return sum(n for answer in run for _, n in answer.deltas) / max(ends) if ends else None


def _middle_and_tail(seconds: Sequence[float]) -> tuple[float | None, float | None]:
    """Return (median, 99th percentile) in milliseconds. One value is both; without values both are None."""
    if len(seconds) < 2:
        return (1000 * seconds[0], 1000 * seconds[0]) if seconds else (None, None)
    return 1000 * statistics.median(seconds), 1000 * statistics.quantiles(seconds, n=100, method="inclusive")[98]


# The requests of ``bench``: many at once, with random prompts and answers of an exact length.


TEXT = (
    "A river begins as rain. The water gathers in small streams, runs downhill, and takes sand and stones along; "
    "where the valley is wide it slows down and lets them fall. In spring, when the snow melts, it may rise by "
    "several metres in a few days. People have built towns on its banks, mills, bridges and harbours: 3 of 4 large "
    "cities lie on one. Who wants to know how much water passes measures the width, the depth and the speed!"
)
"""A text for which any model has tokens. Prompts are drawn from these tokens."""
POLL_S = 0.1


def prompts(ids: Sequence[int], tokens: int, count: int, draw: random.Random) -> list[list[int]]:
    """Return ``count`` prompts of ``tokens`` tokens, drawn so that no cache can save work for a common beginning."""
    return [draw.choices(ids, k=tokens) for _ in range(count)]


async def run_once(
    client: AsyncClient, model: str, asked: Sequence[list[int]], tokens: int, answers: list[MeasuredAnswer]
) -> None:
    """Send all prompts at once over one connection, and read answers of exactly ``tokens`` tokens.

    answers  list that gets an answer for each prompt at once. They grow while they are read

    Cancelling the task cancels every request. Raises ConnectionLost. Other errors are noted in the answers.
    """
    begun = time.perf_counter()

    async def one(prompt: list[int], answer: MeasuredAnswer) -> None:
        stream = client.generate(model, token_ids=prompt, max_tokens=tokens, ignore_eos=True, temperature=0)
        try:
            async for delta in stream:
                if delta.token_ids:
                    answer.deltas.append((time.perf_counter() - begun, len(delta.token_ids)))
        except WireError as e:
            if e.code is ErrorCode.CONNECTION_LOST:
                raise
            answer.error = str(e)
        answer.accepted = stream.accepted is not None

    answers += [MeasuredAnswer() for _ in asked]
    try:
        async with asyncio.TaskGroup() as group:
            for prompt, answer in zip(asked, answers, strict=True):
                group.create_task(one(prompt, answer))
    except ExceptionGroup as e:  # all requests use one connection, so all have lost it
        raise e.exceptions[0] from None


# Draw lines over a doubling scale as an SVG file: tokens per second over streams, a panel for each model. Pure.
#
# Both axes are logarithmic. The file follows the reader's light or dark colours, and needs no script and no font.
# ``modelctl bench --plot`` and the documentation draw with this module.


PANEL, HEIGHT = 460, 350
LEFT, RIGHT, TOP, BOTTOM = 78, 16, 92, 44
STYLE = """
    .back { fill: #ffffff; }
    text { fill: #1f2328; font-family: -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif;
      font-size: 12px; }
    .title { font-weight: 600; font-size: 14px; }
    .grid { stroke: #d0d7de; }
    .s0 { stroke: #57606a; fill: none; stroke-dasharray: 5 4; stroke-width: 1.5; }
    .s1 { stroke: #3f51b5; fill: none; stroke-width: 2.5; }
    .s2 { stroke: #ff9800; fill: none; stroke-width: 2; }
    .s3 { stroke: #78909c; fill: none; stroke-width: 2; }
    @media (prefers-color-scheme: dark) {
      .back { fill: #0d1117; }
      text { fill: #e6edf3; }
      .grid { stroke: #30363d; }
      .s0 { stroke: #9198a1; }
      .s1 { stroke: #8c9eff; }
    }
"""


@dataclass(frozen=True)
class Panel:
    """Lines over the same places: {name: values}. At most four; the first one is dashed, as a limit.

    places  in ascending order, greater than 0
    series  as many values as places, greater than 0. A line over one place is drawn as a dot
    """

    title: str
    places: Sequence[float]
    series: Mapping[str, Sequence[float]]


def draw(title: str, across: str, up: str, panels: Sequence[Panel]) -> str:
    """Return the panels, side by side, as an SVG file.

    across, up  what the axes mean
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * PANEL} {rows * HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        f"  <style>{STYLE}  </style>",
        f'  <rect class="back" width="{columns * PANEL}" height="{rows * HEIGHT}"/>',
    ]
    for number, panel in enumerate(panels):
        at = f"translate({number % columns * PANEL} {number // columns * HEIGHT})"
        parts += [f'  <g transform="{at}">', *(f"    {part}" for part in _panel(panel, across, up)), "  </g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, across: str, up: str) -> Iterator[str]:
    values = [value for series in panel.series.values() for value in series]
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    first, last = math.log2(panel.places[0]), math.log2(panel.places[-1])

    def x(place: float) -> float:
        share = (math.log2(place) - first) / (last - first) if last > first else 0.5
        return round(LEFT + share * (PANEL - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (math.log10(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    yield f'<text class="title" x="{LEFT}" y="20">{escape(panel.title)}</text>'
    for number, name in enumerate(panel.series):
        at, line = LEFT + number % 2 * (PANEL - LEFT) // 2, 40 + number // 2 * 18
        yield f'<path class="s{number}" d="M{at} {line}h18"/>'
        yield f'<text x="{at + 23}" y="{line + 4}">{escape(name)}</text>'
    for power in range(low, high + 1):
        yield f'<path class="grid" d="M{LEFT} {y(10.0**power)}H{PANEL - RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{y(10.0**power) + 4}" text-anchor="end">{10.0**power:,.10g}</text>'
    for place in panel.places:
        yield f'<path class="grid" d="M{x(place)} {TOP}V{HEIGHT - BOTTOM}"/>'
        yield f'<text x="{x(place)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{place:g}</text>'
    yield f'<text x="{(LEFT + PANEL - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(across)}</text>'
    yield f'<text x="{LEFT - 8}" y="{TOP - 10}" text-anchor="end">{escape(up)}</text>'
    for number, series in enumerate(panel.series.values()):
        points = "L".join(f"{x(place)} {y(value)}" for place, value in zip(panel.places, series, strict=True))
        if len(series) > 1:
            yield f'<path class="s{number}" d="M{points}"/>'
        else:
            yield f'<circle class="s{number}" cx="{x(panel.places[0])}" cy="{y(series[0])}" r="4"/>'


# The results of ``bench`` as files: figures in the schema of ``benchmarks/results``, and a plot.


def report(devices: Iterable[str], rows: Sequence[BenchRow], *, remote: bool = False) -> dict[str, Any]:
    """Return {machine, commit, command, date, results: [{name, value, unit, target, meets}]}.

    devices  names of the devices that compute the models
    remote   whether the supervisor is on another machine than this command
    """
    return {
        "machine": _machine(devices, remote),
        "commit": f"modelctl {__version__}",
        "command": shlex.join(["modelctl", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "results": [result for row in rows for result in row.results()],
    }


def plot(rows: Sequence[BenchRow]) -> str | None:
    """Return tokens per second over streams as an SVG file, with a panel for each model. None if nothing was measured.

    The dashed line is the speed of one stream, the other line that of all streams together.
    """
    panels = []
    for model in dict.fromkeys(row.model for row in rows):
        rates = {row.streams: row.rate for row in rows if row.model == model and row.rate}
        streams = sorted(rates)
        if streams:
            each = [rates[count] / count for count in streams]
            series = {"each stream": each, "all streams together": [rates[count] for count in streams]}
            panels.append(Panel(model, streams, series))
    return draw("Tokens per second over streams", "streams at once", "tokens/s", panels) if panels else None


def _machine(devices: Iterable[str], remote: bool) -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    cores = f"{os.cpu_count()} cores ({found[1] if found else platform.machine()})"
    if remote:
        cores = f"measured over TCP from another machine with {cores}"
    return ", ".join([*devices, cores, f"Python {platform.python_version()}"])


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


@command(
    ("modelctl bench llama-8b", "Measure one model with 1, 8 and 32 requests at once"),
    ("modelctl bench llama-8b stories -c 1,16 -p 512 -n 256 -o speed.json", "Measure two models, keep the figures"),
)
@options.named
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
              help="Runs before, which are not counted.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random prompts.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    callback=_writable,
    help="Write the JSON into this file, too.",
)
@click.option(
    "--plot",
    "drawn",
    metavar="FILE.svg",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    callback=_writable,
    help="Draw tokens per second into this file.",
)
@json_options
def bench(
    models: tuple[str, ...], out: Path | None, drawn: Path | None, as_json: bool, runtime_dir: Path, **load: Any
) -> None:
    """Measure how fast models of the running supervisor answer.

    MODEL may be a pattern in quotes, such as 'llama-*'. Requests are greedy, and all of the same length. Ctrl-C shows
    the results so far.
    """
    report = _Report(out, drawn, as_json)
    try:
        with asyncio.Runner() as runner:
            runner.run(_measure(_names(models, runtime_dir), _Load(**load), runtime_dir, report))
    finally:
        report.show()  # also after Ctrl-C, or after the supervisor has gone
    if report.errors:
        raise CommandFailure(exit_codes.FAILED, "requests_failed", *report.errors)


def _names(given: tuple[str, ...], runtime_dir: Path) -> list[str]:
    """Return the models that names and patterns mean, each once."""
    if not any(map(options.is_pattern, given)):
        return list(dict.fromkeys(given))
    with connect(runtime_dir) as client:
        return options.ordered(client, given)


class _Report:
    """The results so far, and the devices that were measured."""

    def __init__(self, out: Path | None, drawn: Path | None, as_json: bool) -> None:
        self._out, self._drawn, self._as_json = out, drawn, as_json
        self._live = LiveLines(for_people=not as_json)
        self.rows: list[BenchRow] = []
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
        click.echo(written if self._as_json else table(COLUMNS, rows, terminal_width()))
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
    """Wait until the model is loaded, and return token ids for prompts. An unloaded model is started.

    Raises WireError for a model that is not loaded and will not be.
    """
    while True:
        try:
            return sorted(set(await client.tokenize(model, TEXT)))
        except WireError as e:
            if e.code is not ErrorCode.MODEL_NOT_RUNNING or e.retry_after_ms is None:
                raise
            report.waits(model, e.message, (await _workers(client, model))[0])
        await asyncio.sleep(POLL_S)


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
    runs: list[list[MeasuredAnswer]] = field(default_factory=list)

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
        answers: list[MeasuredAnswer] = []
        if number >= 0:
            count.runs.append(answers)
        more = f", run {number + 1} of {load.runs}" if number >= 0 else ", warming up"
        async with report.running(model, what, more, count):
            await run_once(client, model, asked, tokens, answers)
    report.rows.append(row(model, streams, count.runs))
    report.errors += [f"{model}, {what}: {each}" for each in errors(count.runs)]
