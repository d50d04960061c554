"""Turn the answers that ``bench`` received into a row of its table and entries of a result file. Pure.

All times are seconds since the beginning of a run. In a run as many requests are sent together as there are streams.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from supervisor.cli.tables import Column

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
class Row:
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


def row(model: str, streams: int, runs: Sequence[Sequence[MeasuredAnswer]]) -> Row:
    """Return the row of runs with ``streams`` requests each. Failed answers count with the tokens that they brought."""
    answers = [answer for run in runs for answer in run]
    firsts = [answer.deltas[0][0] for answer in answers if answer.deltas]
    gaps = [later[0] - earlier[0] for answer in answers for earlier, later in itertools.pairwise(answer.deltas)]
    rates = [rate for run in runs if (rate := _rate(run)) is not None]
    bad = [answer for answer in answers if answer.error is not None]
    return Row(
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
    counts: dict[str, int] = {}
    for run in runs:
        for answer in run:
            if answer.error is not None:
                counts[answer.error] = counts.get(answer.error, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return [f"{count} requests: {text}" if count > 1 else text for text, count in ordered]


def _rate(run: Sequence[MeasuredAnswer]) -> float | None:
    ends = [answer.deltas[-1][0] for answer in run if answer.deltas]
    return sum(n for answer in run for _, n in answer.deltas) / max(ends) if ends else None


def _middle_and_tail(seconds: Sequence[float]) -> tuple[float | None, float | None]:
    """Return (median, 99th percentile) in milliseconds. One value is both; without values both are None."""
    if len(seconds) < 2:
        return (1000 * seconds[0], 1000 * seconds[0]) if seconds else (None, None)
    return 1000 * statistics.median(seconds), 1000 * statistics.quantiles(seconds, n=100, method="inclusive")[98]
