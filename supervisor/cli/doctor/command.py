"""The command doctor: look at everything that serving needs, and say what to do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from supervisor.cli import exit_codes
from supervisor.cli.colours import painted
from supervisor.cli.command import Command
from supervisor.cli.config_file import find_config
from supervisor.cli.doctor import cluster, gpus, machine, serving
from supervisor.cli.doctor.findings import Finding, Verdict, bad, looking_at, warn, within
from supervisor.cli.hints import completed
from supervisor.cli.options import as_json, config_file, runtime_dir_option
from supervisor.cli.tables import terminal_width
from supervisor.cli.text_width import clean, wrapped
from supervisor.logs import log_dir

if TYPE_CHECKING:
    from supervisor.config import Examined

INDENT: Final = 6
"""Columns of a verdict, with the space after it."""


@click.command(
    cls=Command,
    examples={
        "modelctl doctor": "Look at drivers, GPUs, packages, disks, models.yaml and the cluster",
        "modelctl doctor --json": "The same for a program",
    },
)
@config_file
@as_json
@runtime_dir_option
def doctor(file: Path | None, as_json: bool, runtime_dir: Path) -> int:
    """Look at everything that serving a models.yaml (FILE) needs. Each line says ok, or what to do.

    Nothing is changed, and nothing hangs: each look has a deadline. If a model is ready, it generates four tokens. With
    a section cluster, a short task of Ray has a look at each other machine. Exit code 1 if something is bad.
    """
    found: list[Finding] = []
    for finding in _look(file, runtime_dir):
        found.append(finding)
        if not as_json:
            _print(finding)
    good = all(finding.verdict is not Verdict.BAD for finding in found)
    if as_json:
        click.echo(json.dumps({"ok": good, "findings": [finding.to_json() for finding in found]}, indent=2))
    return exit_codes.OK if good else exit_codes.FAILED


def _look(file: Path | None, runtime_dir: Path) -> Iterator[Finding]:
    examined, wrong = _examine(file, runtime_dir)
    engines = frozenset[str]()
    if examined is not None:
        engines = frozenset(spec.config.engine for spec in examined.config.models.values())
    workers = 0 if examined is None else examined.config.worker_count
    on_gpu = examined is not None and any(
        spec.config.engine == "exllamav2" or spec.config.gpu not in (None, "cpu", "auto")
        for spec in examined.config.models.values()
    )
    yield from within("machine", lambda: machine.look(runtime_dir, log_dir(runtime_dir), workers))
    with looking_at("the driver and the GPUs"):
        nvml = gpus.read_nvml()
    yield from gpus.driver_of(nvml, wanted=on_gpu)
    known = gpus.names_of(nvml.get("gpus", ()))
    for gpu in nvml.get("gpus", ()):
        yield from gpus.gpu_of(gpu, known)
    with looking_at("torch and exllamav2"):
        engine = gpus.read_engine()
    yield from gpus.engine_of(engine, nvml, engines)
    yield from wrong
    if examined is not None:
        seen = examined
        yield from within("models.yaml", lambda: serving.file_of(seen), 120.0)
    yield from within("permissions", lambda: serving.directory_of(runtime_dir))
    status = serving.status_of(runtime_dir)
    if examined is not None:
        yield from within("gateway", lambda: serving.port_of(seen.config, status))
    if examined is not None and examined.config.cluster is not None:
        yield from within("cluster", lambda: cluster.look(seen.config, status), cluster.LOOK_S + 20)
    yield from within("supervisor", lambda: serving.running_of(status))
    came = {"done": 0, "total": serving.TOKENS, "unit": "tokens"}
    yield from within(
        "test generation",
        lambda: serving.generation_of(runtime_dir, status, came),
        serving.ANSWER_S + 10,
        progress=came,
    )


def _examine(file: Path | None, runtime_dir: Path) -> "tuple[Examined | None, list[Finding]]":
    """Return models.yaml as far as it can be read, and what is wrong if it cannot."""
    from supervisor.config import examine_config
    from supervisor.yaml_source import ConfigError

    try:
        return examine_config(find_config(file, runtime_dir)), []
    except ConfigError as e:
        if file is None and len(e.problems) == 1 and "not found" in str(e.problems[0]):
            return None, [warn("models.yaml", "there is none yet", "`modelctl init ~/models` writes one")]
        return None, [bad("models.yaml", str(problem), "correct it: see `modelctl check`") for problem in e.problems]


def _print(finding: Finding) -> None:
    click.echo(text_of(finding, terminal_width()))


def text_of(finding: Finding, width: int | None) -> str:
    """Return a finding as a line, and its remedy below.

    width  columns of the terminal, to which both are wrapped; None: they are not
    """
    says = wrapped(f"{'':{INDENT}}{clean(finding.what)}: {clean(finding.says)}", width, INDENT)
    lines = [painted(finding.verdict) + says[len(finding.verdict) :]]
    if finding.remedy:
        lines.append(wrapped(f"{'':{INDENT}}{clean(completed(finding.remedy))}", width, INDENT))
    return "\n".join(lines)
