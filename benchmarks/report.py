"""Result files: one schema for every benchmark, and the README's tables made from them.

    python -m benchmarks.report         rewrite the README's figures from benchmarks/results/*.json

A result file is JSON: ``machine``, ``commit``, ``command``, ``date`` (ISO 8601, UTC) and ``results``, a list of
``{name, value, unit, target, meets}``. ``target`` is a text such as ">= 0.97" or null, ``meets`` true, false or null:
a miss is kept and shown.
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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
KEYS = ("machine", "commit", "command", "date", "results")
SHORT = 6
"""Results that are shown without a choice."""
RESULT_KEYS = ("name", "value", "unit", "target", "meets")

_COMPARE = {">=": float.__ge__, "<=": float.__le__}


@dataclass(frozen=True)
class Result:
    """One figure. ``target`` is "<= NUMBER" or ">= NUMBER", or None where there is none."""

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
    """What the figures were measured on, in words."""
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    text = f"{os.cpu_count()} cores ({model[1] if model else platform.machine()}), Python {platform.python_version()}"
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout.strip()
    except FileNotFoundError:
        found = ""
    return f"{found.splitlines()[0]}, {text}" if found else text


def write(name: str, results: list[Result], directory: Path = RESULTS) -> Path:
    """Write ``NAME.json`` and print the figures. Returns its path."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    content = {
        "machine": machine(),
        # a machine that was given the tree without its history is told
        "commit": commit or os.environ.get("BENCH_COMMIT", "unknown"),
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


def headline(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results that the README shows: those with a target, met or missed, else ratios; all of a short file."""
    chosen = [r for r in results if r["target"]] or [r for r in results if r["unit"] == "ratio"]
    return results if len(results) <= SHORT else chosen or results[:SHORT]


def figures() -> str:
    """The README's tables, one per result file."""
    parts = []
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        check(content)
        rows = [
            f"| {r['name']} | {r['value']:.4g} {r['unit']} | {r['target'] or ''} | {_verdict(r['meets'])} |"
            for r in headline(content["results"])
        ]
        if more := len(content["results"]) - len(rows):
            rows.append(f"| ({more} more in the file) | | | |")
        parts.append(
            f"**{path.stem}**: `{content['command']}`, {content['machine']}, {content['date'][:10]}, "
            f"commit {content['commit']}\n\n| figure | value | target | |\n|---|---|---|---|\n" + "\n".join(rows)
        )
    return "\n\n".join(parts)


def readme_with_figures(text: str) -> str:
    """The README with the part between its two marks made anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{figures()}\n{END}{after}"


def _verdict(meets: bool | None) -> str:
    return {True: "met", False: "**missed**", None: ""}[meets]


if __name__ == "__main__":
    README.write_text(readme_with_figures(README.read_text()))
