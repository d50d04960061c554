"""The results of ``bench`` as a result file, in the schema of ``benchmarks/results``, for users' own comparisons."""

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


def report(devices: Iterable[str], rows: Sequence[Row]) -> dict[str, Any]:
    """Return {machine, commit, command, date, results: [{name, value, unit, target, meets}]}.

    devices  names of the devices that compute the models
    """
    return {
        "machine": _machine(devices),
        "commit": f"modelctl {__version__}",
        "command": shlex.join(["modelctl", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "results": [result for row in rows for result in row.results()],
    }


def _machine(devices: Iterable[str]) -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    cores = f"{os.cpu_count()} cores ({found[1] if found else platform.machine()})"
    return ", ".join([*devices, cores, f"Python {platform.python_version()}"])
