"""What ``bench`` measured, as a result file: the schema of ``benchmarks/results``, for users' own comparisons."""

import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from protocol import __version__
from supervisor.cli.bench_figures import Row


def report(status: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """{machine, commit, command, date, results: [{name, value, unit, target, meets}]}.

    status  the supervisor's answer to ``status``; its models say what they are computed on
    """
    return {
        "machine": _machine(status),
        "commit": f"modelctl {__version__}",
        "command": shlex.join(["modelctl", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "results": [result for row in rows for result in row.results()],
    }


def _machine(status: dict[str, Any]) -> str:
    devices = dict.fromkeys(model["device"] for model in status["models"] if model["device"])
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    cores = f"{os.cpu_count()} cores ({found[1] if found else platform.machine()})"
    return ", ".join([*devices, cores, f"Python {platform.python_version()}"])
