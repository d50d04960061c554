"""The results of ``bench`` as files: figures in the schema of ``benchmarks/results``, and a plot."""

import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from protocol import __version__
from supervisor.cli.bench_figures import Row
from supervisor.cli.line_plot import Panel, draw


def report(devices: Iterable[str], rows: Sequence[Row], *, remote: bool = False) -> dict[str, Any]:
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


def plot(rows: Sequence[Row]) -> str | None:
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
