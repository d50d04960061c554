"""The command plan: find out whether the models fit on the GPUs, and on which GPU each would be."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelctl.cli import exit_codes
from modelctl.cli.options import as_json, config_file, connect, find_config, runtime_dir_option, show, watch
from modelctl.cli.root import CommandFailure, command
from modelctl.cli.tables import GAP, Column, clean, name_lines, table, wrapped
from supervisor.config.reading import AUTO, is_name, labels_of
from supervisor.config.spelling import size

if TYPE_CHECKING:
    from supervisor.config.file import Examined
    from supervisor.placement.estimates import Outcome, PlacementCandidate
    from supervisor.placement.gpus import Gpu


# The host memory that the models of a plan take while they sleep. Pure.


@dataclass(frozen=True)
class HostMemoryPlan:
    """The host memory of the workers that may sleep.

    workers  worker -> bytes of its copy; None if that is not known
    bound    the most bytes that all of them may take; None if that is not known
    source   where the bound comes from, for people
    """

    workers: dict[str, int | None]
    bound: int | None
    source: str

    @property
    def total(self) -> int:
        """The bytes of all copies whose size is known."""
        return sum(copy or 0 for copy in self.workers.values())

    def lines(self) -> list[str]:
        """Return what people need to know; no line if no worker may sleep."""
        if not self.workers:
            return []
        parts = [f"{name} {'not known' if copy is None else size(copy)}" for name, copy in self.workers.items()]
        allowed = self.source if self.bound is None else f"of {size(self.bound)} allowed ({self.source})"
        found = [f"host memory of models that sleep: {', '.join(parts)}; {size(self.total)} in all, {allowed}"]
        if self.bound is not None:
            found += [
                f"{name}: is unloaded instead of put to sleep, because it takes more host memory than is allowed"
                for name, copy in self.workers.items()
                if (copy or 0) > self.bound
            ]
            if self.total > self.bound:
                found.append("not all of them can sleep at once: those that have slept longest are unloaded")
        return found

    def as_data(self) -> dict[str, Any]:
        """Return the plan for programs."""
        fits = None if self.bound is None or None in self.workers.values() else self.total <= self.bound
        return {"limit_bytes": self.bound, "bytes": self.total, "fits": fits, "workers": self.workers}


def plan_host_memory(
    candidates: "Sequence[PlacementCandidate]", configured: int | None, free: int | None
) -> HostMemoryPlan:
    """Return the plan of the host memory.

    configured  ``supervisor.host_memory``; None if models.yaml does not have it
    free        the free host memory of the box; None if that is not known
    """
    from supervisor.placement.vram import SHARE

    workers = {
        candidate.worker: candidate.estimated.sleep_bytes
        for candidate in candidates
        if candidate.spec.may_sleep and not candidate.estimated.faults and candidate.estimated.sleep_bytes != 0
    }
    if configured is not None:
        return HostMemoryPlan(workers, configured, "supervisor.host_memory")
    if free is None:
        return HostMemoryPlan(workers, None, "and half of the free host memory of that box is allowed")
    return HostMemoryPlan(workers, int(free * SHARE), "half of what is free now; supervisor.host_memory sets it")


PARTS = ("weights", "cache", "draft", "workspace", "context", "declared")


def _gpus(_: click.Context, __: click.Parameter, value: str | None) -> list[int] | None:
    from supervisor.config.spelling import parse_size

    if value is None:
        return None
    try:
        return [parse_size(part.strip()) for part in value.split(",")]
    except ValueError as e:
        raise click.BadParameter(f"{value!r}: each {e}, one for each GPU") from None


@command(
    ("modelctl plan models.yaml --gpus 24G,24G", "Show which would fit on two GPUs of 24 GiB"),
)
@config_file
@click.option(
    "--gpus",
    metavar="SIZES",
    callback=_gpus,
    help="Plan for a box with these empty GPUs, such as 24G,24G,48G.",
)
@watch
@as_json
@runtime_dir_option
def plan(file: Path | None, gpus: list[int] | None, watch: bool, as_json: bool, runtime_dir: Path) -> int:
    """Show which models of a models.yaml (FILE) fit on the GPUs. Starts nothing.

    --watch reads the GPUs again, not the file. Exit code 3 if the models that start with the supervisor do not all find
    room, 1 if one of them cannot be loaded at all.
    """
    from supervisor.config.folder_scanner import examine_with_folders
    from supervisor.config.yaml_source import ConfigError
    from supervisor.placement.estimates import fit
    from supervisor.placement.eviction import describe
    from supervisor.placement.vram import free_bytes

    try:
        examined, _ = examine_with_folders(find_config(file, runtime_dir), installed=gpus is None)
    except ConfigError as e:
        raise CommandFailure(exit_codes.CONFIG, "config", *map(str, e.problems)) from None
    candidates = _candidates(examined, installed=gpus is None)
    outer = os.environ.get("CUDA_VISIBLE_DEVICES") if gpus is None else None
    names = {name: examined.config.names.describe(name) for name in examined.config.models}
    shared = examined.config.groups
    groups = {name: {"models": group.models, "loaded": group.loaded} for name, group in shared.items()}
    groups_of = [f"{describe([name], shared)}, of {', '.join(group.models)}" for name, group in shared.items()]
    free = (free_bytes() or None) if gpus is None else None
    asleep = plan_host_memory(candidates, examined.config.supervisor.host_memory, free)
    latest: list[Outcome] = []

    def read() -> "list[Gpu]":
        box = _this_box(candidates, runtime_dir) if gpus is None else _made_up(gpus)
        outcomes = fit(candidates, box, examined.config.supervisor.vram_limit, outer, shared)
        latest[:] = [replace(o, why_not=None, no_room=False) if _goes_elsewhere(o) else o for o in outcomes]
        return box

    show(
        read,
        lambda box, width: "\n".join([plan_text(latest, box, names, width, asleep.lines()), *groups_of]),
        as_data=lambda box: {
            **_as_data(latest, box), "host_memory": asleep.as_data(), "names": names, "groups": groups,
        },
        as_json=as_json, again=watch,
    )  # fmt: skip
    failed = [o for o in latest if o.candidate.autostart and o.why_not is not None]
    if any(o.no_room or o.candidate.estimated.error is None for o in failed):
        return exit_codes.NO_ROOM
    return exit_codes.FAILED if failed else exit_codes.OK


def _candidates(examined: "Examined", *, installed: bool) -> "list[PlacementCandidate]":
    """Return every worker with its needs, or with its faults and their lines.

    Raises CommandFailure for an invalid file.
    """
    from supervisor.placement.estimates import PlacementCandidate, gpu_request_of, problems_of, vet_models

    models = examined.config.models
    known = vet_models(models, installed=installed)
    if examined.problems:
        of_models = problems_of(
            examined, [(name, fault) for name, estimated in known.items() for fault in estimated.faults]
        )
        problems = sorted([*examined.problems, *of_models], key=lambda problem: problem.line)
        raise CommandFailure(exit_codes.CONFIG, "config", *map(str, problems))
    for name, estimated in known.items():
        lines = [str(examined.problem(name, fault.key, fault.message)) for fault in estimated.faults]
        faults = tuple(replace(fault, message=line) for fault, line in zip(estimated.faults, lines, strict=True))
        known[name] = replace(estimated, faults=faults)
    return [
        PlacementCandidate(worker, spec, gpu_request_of(spec), known[name])
        for name, spec in models.items()
        for worker in spec.workers
    ]


def _made_up(sizes: Sequence[int]) -> "list[Gpu]":
    from supervisor.placement.gpus import Gpu

    return [Gpu(index, f"(GPU {index} of --gpus)", size, 0, size) for index, size in enumerate(sizes)]


def _this_box(candidates: "Sequence[PlacementCandidate]", runtime_dir: Path) -> "list[Gpu]":
    """Return this machine's GPUs as if the models of a running supervisor held no memory. Raises CommandFailure."""
    from supervisor.placement.gpu_reader import read_once
    from supervisor.placement.gpus import GpusUnknown

    if all(candidate.gpu_request is None for candidate in candidates):
        return []
    try:
        box = read_once()
    except GpusUnknown as e:
        message = f"this box's GPUs are not known: NVML: {e}; say which are meant with --gpus 24G,24G"
        raise CommandFailure(exit_codes.CONFIG, "no_gpus", message) from None
    held = _held_by_us(runtime_dir)
    return [
        replace(gpu, used=gpu.used - held.get(gpu.index, 0), free=gpu.free + held.get(gpu.index, 0)) for gpu in box
    ]  # fmt: skip


def _held_by_us(runtime_dir: Path) -> dict[int, int]:
    from protocol.errors import ConnectionLost

    held: dict[int, int] = {}
    try:
        with connect(runtime_dir, admin=True) as client:
            models = client.status()["models"]
    except ConnectionLost:
        return held
    for model in models:
        for index, held_bytes in (model.get("vram_by_gpu") or {}).items():
            held[int(index)] = held.get(int(index), 0) + (held_bytes or 0)
    return held


def plan_text(
    outcomes: "Sequence[Outcome]",
    box: "Sequence[Gpu]",
    names: Mapping[str, Mapping[str, Any]],
    width: int | None,
    further: Sequence[str] = (),
) -> str:
    """Return the plan: for each GPU a table of what each model takes of it, then a line for each thing to know.

    names  the other names of each model
    width  columns of the terminal; None: whole tables, and each text in one line
    further  further things to know
    """
    lines = [*_lines(outcomes, box, width), *further, *name_lines(names)]
    # The lines of tables are indented, and fit already.
    return "\n".join(line if line.startswith(GAP) else wrapped(clean(line), width, 2) for line in lines)


def _lines(outcomes: "Sequence[Outcome]", box: "Sequence[Gpu]", width: int | None) -> list[str]:
    lines = []
    for gpu in box:
        rows = [(o.candidate.worker, o.on(gpu)) for o in outcomes if o.candidate.autostart and o.on(gpu)]
        used = sum(sum(parts.values()) for _, parts in rows)
        others = f", {_gib(gpu.total - gpu.free)} in use by others" if gpu.total > gpu.free else ""
        mig = ", in MIG mode: not used" if gpu.mig else ""
        lines.append(f"GPU {gpu.index}: {_gib(gpu.total)} GiB{others}{mig}; {_gib(gpu.free - used)} left")
        if rows:
            shown = [part for part in PARTS if any(part in parts for _, parts in rows)]
            parts = (Column(part.upper(), drop=len(PARTS) - at) for at, part in enumerate(shown))
            header = (Column("MODEL"), *parts, Column("SUM"))
            cells: list[tuple[object, ...]] = [
                (name, *(_gib(parts.get(part)) for part in shown), _gib(sum(parts.values()))) for name, parts in rows
            ]
            sums = (_gib(sum(parts.get(part, 0) for _, parts in rows)) for part in shown)
            cells.append(("in all", *sums, _gib(used)))
            narrower = None if width is None else width - len(GAP)
            lines += [f"{GAP}{line}" for line in table(header, cells, narrower).splitlines()]
        lines.append("")
    started = [o for o in outcomes if o.candidate.autostart]
    lines += [f"{o.candidate.worker}: {_in_words(o)}" for o in outcomes if _in_words(o)]
    broken = sum(bool(o.candidate.estimated.faults) for o in started)
    why = f"; {broken} cannot be loaded, and the tables do not count them" if broken else ""
    lines.append(f"{_how_many_start(started)}{why}")
    later = [o for o in outcomes if not o.candidate.autostart]
    lines += _listed("started by the first request (lazy)", [o for o in later if o.candidate.spec.config.lazy])
    lines += _listed("started by `modelctl start` only", [o for o in later if not o.candidate.spec.config.lazy])
    return lines


def _how_many_start(started: "Sequence[Outcome]") -> str:
    """Return how many of the workers that start with the supervisor find room."""
    count, misfits = len(started), sum(o.why_not is not None for o in started)
    if not count:
        return "no worker starts with the supervisor"
    if count == 1:
        return "1 worker would not start" if misfits else "1 worker would start"
    return f"{misfits} of {count} workers would not start" if misfits else f"all {count} workers would start"


def _listed(how: str, outcomes: "Sequence[Outcome]") -> list[str]:
    """Return a line that names workers that do not start with the supervisor; no line if there are none."""
    if not outcomes:
        return []
    misfits = [o.candidate.worker for o in outcomes if o.why_not is not None]
    names = ", ".join(o.candidate.worker for o in outcomes)
    return [f"{how}: {names}" + (f"; would not start: {', '.join(misfits)}" if misfits else "")]


def _in_words(outcome: "Outcome") -> str | None:
    """Return the information about a worker that the tables do not show; None if there is none."""
    candidate = outcome.candidate
    when = "lazy" if candidate.spec.config.lazy else "does not start with the supervisor"
    later = "" if candidate.autostart else f"{when}; "
    if outcome.why_not is not None:
        return f"{later}would not start: {outcome.why_not}"
    instead = f", when {', '.join(outcome.leaving)} has left its group" if outcome.leaving else ""
    if outcome.placed is None and (node := candidate.spec.config.node) is not None:
        gpu = "with a GPU that Ray chooses when it starts" if candidate.spec.visible_devices else "on the CPU"
        return f"{later}on {_machine(node)}, {gpu}{instead}"
    if outcome.placed is None:
        return f"{later}on the CPU{instead}"
    where = "GPU " + ", ".join(str(gpu.index) for gpu in outcome.placed.gpus)
    if outcome.needs is None:
        return (
            f"{later}on {where}, its needs not known: {candidate.estimated.unknown}; `vram` in models.yaml can say it"
        )
    return (
        f"{later}{outcome.needs.text(len(outcome.placed.gpus))}, would fit beside the others on {where}{instead}"
        if later
        else None
    )


def _goes_elsewhere(outcome: "Outcome") -> bool:
    """Return whether a worker that finds no room here is started on another machine, if one has GPUs to lease."""
    return outcome.no_room and outcome.candidate.spec.config.node == AUTO


def _machine(node: str) -> str:
    """Return the machines that ``node`` means other than this one, for people."""
    if is_name(node):
        return f"machine {node}"
    return f"another machine with {node}" if labels_of(node) else "another machine"


def _as_data(outcomes: "Sequence[Outcome]", box: "Sequence[Gpu]") -> dict[str, Any]:
    started = [o for o in outcomes if o.candidate.autostart]
    gpus = []
    for gpu in box:
        models = {o.candidate.worker: o.on(gpu) for o in started if o.on(gpu)}
        left = gpu.free - sum(sum(parts.values()) for parts in models.values())
        gpus.append(
            {
                "index": gpu.index,
                "total_bytes": gpu.total,
                "free_bytes": gpu.free,
                "left_bytes": left,
                "workers": models,
            }
        )
    workers = [
        {
            "name": o.candidate.worker,
            "autostart": o.candidate.autostart,
            "node": o.candidate.spec.config.node,
            "gpus": [gpu.index for gpu in o.placed.gpus] if o.placed else [],
            "bytes": sum(o.placed.bytes.values()) if o.placed and o.placed.bytes else None,
            "starts": o.why_not is None,
            "why_not": o.why_not,
            "leaving": list(o.leaving),
            "unknown": o.candidate.estimated.unknown,
        }
        for o in outcomes
    ]
    return {"fits": all(o.why_not is None for o in started), "gpus": gpus, "workers": workers}


def _gib(size: int | None) -> float | None:
    return None if size is None else round(size / 2**30, 1)
