"""Result files: one schema for every benchmark. The documentation's page of figures is made from them.

A result file is JSON: ``machine``, ``commit``, ``command``, ``date`` (ISO 8601, UTC) and ``results``, a list of
``{name, value, unit, target, meets}``. ``target`` is a text such as ">= 0.97" or null. ``meets`` is true, false or
null. Figures that miss their target are kept and shown, too.
"""

import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KEYS = ("machine", "commit", "command", "date", "results")
RESULT_KEYS = ("name", "value", "unit", "target", "meets")

_COMPARE = {">=": float.__ge__, "<=": float.__le__}


@dataclass(frozen=True)
class Result:
    """One figure. ``target`` is "<= NUMBER" or ">= NUMBER", or None without a target."""

    name: str
    value: float
    unit: str
    target: str | None = None

    @property
    def meets(self) -> bool | None:
        if self.target is None:
            return None
        sign, bound = self.target.split()
        return bool(_COMPARE[sign](float(self.value), float(bound)))


def machine() -> str:
    """Return a description of the machine, for people."""
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    text = f"{os.cpu_count()} cores ({model[1] if model else platform.machine()}), Python {platform.python_version()}"
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip()
    except FileNotFoundError:
        found = ""
    return f"{found.splitlines()[0]}, {text}" if found else text


def commit() -> str:
    """Return the commit of the working tree. "-dirty" behind it says that files have changed."""
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    # BENCH_COMMIT names the commit on a machine that has the files without git's history
    return found or os.environ.get("BENCH_COMMIT", "unknown")


def write(name: str, results: list[Result], directory: Path = RESULTS) -> Path:
    """Write ``NAME.json`` and print the figures. Returns its path."""
    content = {
        "machine": machine(),
        "commit": commit(),
        "command": re.sub(r" --out \S+", "", " ".join(["python", *sys.orig_argv[1:]])),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "results": [{**asdict(result), "meets": result.meets} for result in results],
    }
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    for result in results:
        print(
            f"{result.name:<60} {result.value:>12.4g} {result.unit:<10} {result.target or ''} {_verdict(result.meets)}"
        )
    return path


def check(content: object) -> None:
    """Raise ValueError unless ``content`` follows the schema."""
    if not isinstance(content, dict) or tuple(content) != KEYS:
        raise ValueError(f"a result file has the keys {', '.join(KEYS)}")
    for key in KEYS[:-1]:
        if not isinstance(content[key], str) or not content[key]:
            raise ValueError(f"{key} is a text")
    datetime.fromisoformat(content["date"])
    if not content["results"]:
        raise ValueError("there are no results")
    for entry in content["results"]:
        if tuple(entry) != RESULT_KEYS:
            raise ValueError(f"a result has the keys {', '.join(RESULT_KEYS)}")
        if type(entry["value"]) not in (int, float) or not isinstance(entry["name"], str):
            raise ValueError(f"{entry['name']}: value is a number, name a text")
        if Result(entry["name"], entry["value"], entry["unit"], entry["target"]).meets is not entry["meets"]:
            raise ValueError(f"{entry['name']}: meets does not follow from value and target")


def _verdict(meets: bool | None) -> str:
    return {True: "met", False: "MISSED", None: ""}[meets]
