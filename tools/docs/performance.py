"""Make the page of figures, and its pictures, from ``benchmarks/results/*.json``."""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, ROOT, check
from tools.docs.bars import Chart, draw, shown
from tools.docs.markdown import page, table, text

SHORT = 6
"""Most results of a file that are shown, unless more of them miss their targets."""
GROUPS = {
    "Speed": (
        "decoding", "decoding-8b", "decoding-exl2", "decoding-8b-exl2", "decoding-8b-exl2-h100", "contexts",
        "prompt-cache", "first-use", "prompts-beside", "draws",
        "gpu-idle", "exact-answers",
        "serving-exllamav2", "serving-transformers", "unpaged", "gpus-2", "gpus-4", "gpus-split",
        "gpus-tensor-parallel", "router", "router-many-cores", "worker-path", "client-path", "scale", "cluster-scale",
        "other-machine", "start", "spare", "spare-exllamav2", "desk", "constraints", "fairness-transformers",
        "attention", "mixture", "http-exllamav2", "http-path", "http-path-2-cores", "http-tools-exllamav2", "page-load",
        "embedding-cpu",
    ),
    "Memory": ("footprint", "install", "footprint-nvml", "cache-vram", "unload", "placing", "sleeping", "napping"),
    "Faults": (
        "chaos", "chaos-nodes", "cluster-cuts", "chaos-exllamav2",
        "survival", "survival-defaults", "deaths", "recovery", "recovery-exllamav2",
        "hangs", "visible-faults", "orphans", "stopping", "cancelling", "abandoned", "cycles", "reloads", "soak",
        "http-faults", "usage-ledger", "required-calls",
    ),
    "Hostile input": ("flooding", "fuzzing", "http-fuzzing", "keys", "slow-consumers"),
    "Every model from load to unload": ("models-run", "models-run-gptq"),
}  # fmt: skip
"""Result files by topic. Files without a topic come last."""
INTRODUCTION = """\
A script in `benchmarks/` measured each figure. A part of this page has the name of its file in `benchmarks/results/`,
and ends with command, machine, date, commit, and how many more figures the file has. Machines are noisy, so read the
ratios first: both sides of a ratio were measured in turns on one machine."""


@dataclass(frozen=True)
class ResultFile:
    """One file of results."""

    name: str
    content: dict[str, Any]

    @property
    def results(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.content["results"]
        return found

    @cached_property
    def values(self) -> dict[str, float]:
        return {result["name"]: result["value"] for result in self.results}

    @property
    def purpose(self) -> str:
        """Return the first paragraph of the script's docstring."""
        module = re.search(r"-m ([\w.]+)", self.content["command"])
        assert module is not None, self.content["command"]
        source = (ROOT / Path(*module[1].split("."))).with_suffix(".py").read_text()
        return " ".join((ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].split())


def result_files() -> dict[str, ResultFile]:
    """Read all result files. Raises ValueError for one that does not follow the schema."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        check(content)
        found[path.stem] = ResultFile(path.stem, content)
    return found


def performance_page(files: dict[str, ResultFile]) -> str:
    """Return the page."""
    grouped = {name for names in GROUPS.values() for name in names}
    groups = GROUPS | {"More": tuple(name for name in files if name not in grouped)}
    shown_files = {title: [files[name] for name in names if name in files] for title, names in groups.items()}
    known = machines(files)
    parts = ["## Machines", table(("name", "machine"), [(name, machine) for machine, name in known.items()])]
    parts += ["## Missed targets", _misses(files), "## Pictures", *_pictures(files, known)]
    first: dict[str, str] = {}
    for title, there in shown_files.items():
        if there:
            parts.append(f"## {title}")
            parts += [part for file in there for part in _section(file, known, first)]
    return page("Performance", "benchmarks/results", INTRODUCTION, *parts)


def machines(files: dict[str, ResultFile]) -> dict[str, str]:
    """Return the machine of each file, as the file describes it, and its name on the page. The most used come first."""
    used = Counter(file.content["machine"] for file in files.values())
    return {machine: f"M{number}" for number, (machine, _) in enumerate(used.most_common(), 1)}


def pictures() -> dict[str, Callable[[], str]]:
    """Return the pictures of the page: file below docs/ → the function that draws it."""
    return {
        _picture(sources): lambda chart=chart: draw(chart) + "\n"  # type: ignore[misc]
        for chart, sources in charts(result_files())
    }


def _picture(sources: tuple[str, ...]) -> str:
    return f"images/performance/{sources[0]}.svg"


def headline(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results that the page shows.

    A file with at most SHORT results shows all. Other files show results with a target, else ratios, else any: all that
    miss, and SHORT in all if fewer miss.
    """
    if len(results) <= SHORT:
        return results
    chosen = [r for r in results if r["target"]] or [r for r in results if r["unit"] == "ratio"] or results
    missed = [r for r in chosen if r["meets"] is False]
    others = [r for r in chosen if r["meets"] is not False][: max(0, SHORT - len(missed))]
    return [r for r in chosen if r in missed or r in others]


def _section(file: ResultFile, known: dict[str, str], first: dict[str, str]) -> Iterator[str]:
    """Yield the part of a file. ``first`` has for each purpose the first file with it, whose part tells the purpose."""
    yield f"### {file.name}"
    told = first.setdefault(file.purpose, file.name)
    yield text(file.purpose) if told == file.name else f"Measured as [{told}](#{told})."
    chosen = headline(file.results)
    columns = 3 if any(result["target"] for result in chosen) else 2
    yield table(("figure", "value", "target")[:columns], [_row(result)[:columns] for result in chosen])
    more = len(file.results) - len(chosen)
    content = file.content
    origin = f"`{content['command']}`, {known[content['machine']]}, {content['date'][:10]}, {content['commit']}."
    yield origin + (f" {more} more figures." if more else "")


def _row(result: dict[str, Any]) -> tuple[str, str, str]:
    missed = " **missed**" if result["meets"] is False else ""
    return result["name"], f"{shown(result['value'])} {result['unit']}", target_text(result["target"]) + missed


def target_text(target: str | None) -> str:
    """Return a result's target for a table, for example "≥ 0.97"; nothing if there is none."""
    if target is None:
        return ""
    sign, bound = target.split()
    return f"{ {'<=': '≤', '>=': '≥'}[sign] } {shown(float(bound))}"


def _misses(files: dict[str, ResultFile]) -> str:
    rows = [
        (f"[{file.name}](#{file.name})", *_row(result))
        for file in files.values()
        for result in file.results
        if result["meets"] is False
    ]
    return table(("file", "figure", "value", "target"), rows) if rows else "None."


def _pictures(files: dict[str, ResultFile], known: dict[str, str]) -> Iterator[str]:
    for chart, sources in charts(files):
        links = ", ".join(f"[{name}](#{name})" for name in sources)
        yield f"![{chart.title}]({_picture(sources)})"
        content = files[sources[0]].content
        yield f"{chart.title}. From {links}: {known[content['machine']]}, {content['date'][:10]}."


def charts(files: dict[str, ResultFile]) -> Iterator[tuple[Chart, tuple[str, ...]]]:
    """Yield each chart with the names of its files. Raises KeyError if a file has lost a result that a chart shows."""
    for name, model in (("decoding", "1b"), ("decoding-8b", "8b")):
        values = files[name].values
        what = ": tokens/s with graphs"
        steps = [label.removesuffix(what) for label in values if label.startswith(model) and label.endswith(what)]
        series = {
            "graphs": what,
            "graphs: false": f"{what}: false",
            "the package's generator": ": tokens/s of the package's generator",
        }
        yield Chart(
            f"Tokens per second, {model.upper()}: a step as one launch (ExLlamaV2, served)", "tok/s", steps,
            {shown: [values[f"{step}{what}"] for step in steps] for shown, what in series.items()},
        ), (name,)  # fmt: skip
    served = files["serving-exllamav2"].values
    labels = [name.removesuffix(": tokens/s served") for name in served if name.endswith(": tokens/s served")]
    yield Chart(
        "Tokens per second, served and without serving (ExLlamaV2)", "tok/s", labels,
        {
            "modelctl": [served[f"{label}: tokens/s served"] for label in labels],
            "bare generator": [served[f"{label}: tokens/s, bare generator in one process"] for label in labels],
        },
    ), ("serving-exllamav2",)  # fmt: skip
    two, four = files["gpus-2"].values, files["gpus-4"].values
    yield Chart(
        "A worker on each of several GPUs", "tok/s", ["1 GPU", "2 GPUs", "4 GPUs"],
        {"1B model, all workers together": [
            two["one worker alone"], two["2 workers on 2 GPUs at once"], four["4 workers on 4 GPUs at once"],
        ]},
    ), ("gpus-2", "gpus-4")  # fmt: skip
    for name, cores in (("router", "few"), ("router-many-cores", "many")):
        router = files[name].values
        roads = {
            "raw DEALER to DEALER": "two sockets, no router",
            "zmq.proxy": "libzmq's own proxy",
            "one event a frame": "supervisor, one event a frame",
            "one client of 16 streams": "supervisor, 16 streams of a client",
        }
        chart = Chart(
            f"Events through the supervisor in a second, {cores} cores", "/s", list(roads.values()),
            {"events": [router[road] for road in roads]},
        )  # fmt: skip
        yield chart, (name,)
    scale = files["scale"].values
    what = ": supervisor's CPU of a token"
    sizes = [name.removesuffix(what) for name in scale if name.endswith(what)]
    yield (
        Chart(
            "Supervisor's processor time for a token",
            "µs",
            sizes,
            {"one token a frame": [scale[s + what] for s in sizes]},
        ),
        ("scale",),
    )
    start = files["start"].values
    models = [name.removesuffix(": first token, served") for name in start if name.endswith(": first token, served")]
    yield Chart(
        "From nothing to the first token", "s", models,
        {
            "modelctl serve": [start[f"{model}: first token, served"] for model in models],
            "bare script": [start[f"{model}: first token, bare engine script"] for model in models],
        },
    ), ("start",)  # fmt: skip
