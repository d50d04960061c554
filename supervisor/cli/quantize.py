"""The command quantize: convert a model to EXL2 with ExLlamaV2's own converter, as a job that can be resumed."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from protocol.process.runtime_paths import default_runtime_dir
from supervisor.cli import completion, exit_codes
from supervisor.cli.command import Command
from supervisor.cli.config_file import find_config
from supervisor.cli.detach import child_environment
from supervisor.cli.errors import CommandFailure
from supervisor.cli.live_lines import LiveLines
from supervisor.cli.options import as_json
from supervisor.cli.quantize_job import Job
from supervisor.cli.quantize_trial import try_out
from supervisor.cli.signalled import Signalled, raised
from supervisor.model_search import name_of
from supervisor.spelling import size
from supervisor.worker_modules import CONVERSION

if TYPE_CHECKING:
    from supervisor.placement.gpus import Gpu

TRIAL_CONTEXT: Final = 2048
"""Tokens of context for the test generation."""
LOOK_S: Final = 120.0
"""Seconds for the look at the source, from a disk that has to wake up."""


@click.command(
    cls=Command,
    examples={
        "modelctl quantize ~/models/llama-8b --bits 4.0": "Write ~/models/llama-8b-4.0bpw",
        "modelctl quantize llama-8b --bits 6.0 --gpu 1": "Quantize a model of models.yaml on GPU 1",
    },
)
@click.argument("model", shell_complete=completion.models_and_directories)
@click.option("-b", "--bits", type=click.FloatRange(2, 8), required=True, help="Mean bits of a weight of the layers.")
@click.option("--head-bits", type=click.Choice(["2", "3", "4", "5", "6", "8"]), default="6", show_default=True,
              help="Bits of a weight of the head.")  # fmt: skip
@click.option("-o", "--out", metavar="DIR", type=click.Path(path_type=Path), help="The new model's directory.  "
              "[default: beside MODEL's, such as llama-8b-4.0bpw]")  # fmt: skip
@click.option("--gpu", type=click.IntRange(0), help="The GPU to use.  [default: the one with the most free memory]")
@click.option("--measurement", metavar="FILE", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="measurement.json of an earlier result of the same model; saves the measuring.")  # fmt: skip
@click.option("--no-test", is_flag=True, help="Leave out the test generation.")
@click.option("-c", "--config", metavar="FILE", type=click.Path(path_type=Path),
              help="The models.yaml that has MODEL.")  # fmt: skip
@as_json
def quantize(
    model: str,
    bits: float,
    head_bits: str,
    out: Path | None,
    gpu: int | None,
    measurement: Path | None,
    no_test: bool,
    config: Path | None,
    as_json: bool,
) -> int:
    """Convert MODEL, in 16 bits, to EXL2. MODEL is a directory, or a name in models.yaml.

    ExLlamaV2's own converter measures, quantizes and compiles, on one GPU, for minutes to hours. It saves its state
    every three minutes in DIR.job. After Ctrl-C, or any other end, the same command goes on from there.

    At the end the new model is loaded and generates some tokens, and its entry for models.yaml is printed.
    """
    from supervisor.placement.vetting import CONTEXT

    source = _source(model, config)
    out = (out or source.with_name(f"{source.name}-{bits}bpw")).absolute()
    job = Job(source, out, bits, int(head_bits), measurement and measurement.absolute())
    facts = _look(job)
    if (out.exists() and (not out.is_dir() or any(out.iterdir()))) or out == source:
        raise CommandFailure(exit_codes.CONFIG, "exists", f"{out} exists already: name another directory with --out")
    if (missing := facts["missing"]) is not None:
        raise CommandFailure(exit_codes.CONFIG, "missing", f"quantize cannot run here: {missing}")
    chosen = choose_gpu(_gpus(), gpu, facts["needs"], os.environ.get("CUDA_VISIBLE_DEVICES"))
    keys: dict[str, Any] = {"model_dir": str(out), "engine": "exllamav2", "gpu": "auto"}
    if facts["context"] > CONTEXT:
        keys["max_seq_len"] = CONTEXT
    name, lines = name_of(out, ()), LiveLines(for_people=not as_json)
    try:
        with raised(signal.SIGTERM, signal.SIGHUP):
            _convert(job, chosen, facts["out"] + facts["work"], lines, quiet=as_json)
            trial = {**keys, "gpu": chosen.index, "max_seq_len": min(facts["context"], TRIAL_CONTEXT)}
            tested = None if no_test else _test(job, name, trial, lines)
    except Signalled as e:
        signal.raise_signal(e.number)  # the parent then sees which signal ended this process
    _tell(job, name, keys, tested, as_json)
    return exit_codes.OK


def _convert(job: Job, gpu: "Gpu", needed: int, lines: LiveLines, *, quiet: bool) -> None:
    """Run the job to its end. Raises CommandFailure, also after Ctrl-C. ``needed``: bytes on the disk."""
    from supervisor.cli.compiling import compile_for

    with job.locked() as lock:
        job.state()
        check_disk(job.out, needed, shutil.disk_usage(job.directory).free + job.used)
        try:
            compile_for(["exllamav2"], quiet=quiet)
            job.run(gpu.uuid, lock, lines)
        except KeyboardInterrupt:
            lines.clear()
            message = f"interrupted; the same command goes on from what is saved in {job.directory}"
            raise CommandFailure(exit_codes.INTERRUPTED, "interrupted", message) from None
        job.finish()


def _test(job: Job, name: str, keys: dict[str, Any], lines: LiveLines) -> dict[str, Any]:
    try:
        return try_out(name, keys, lines)
    except CommandFailure as e:
        raise CommandFailure(exit_codes.FAILED, "trial", f"{job.out} is written, but {e}") from None


def _tell(job: Job, name: str, keys: dict[str, Any], tested: dict[str, Any] | None, as_json: bool) -> None:
    """Print what was written, and its entry for models.yaml."""
    import yaml

    written = sum(file.stat().st_size for file in job.out.iterdir())
    if as_json:
        result = {"out": str(job.out), "bytes": written, "bits": job.bits, "name": name, "entry": keys, "test": tested}
        click.echo(json.dumps(result, indent=2))
        return
    answered = f"; test generation: {tested['tokens']} tokens in {tested['seconds']:.2f} s" if tested else ""
    click.echo(f"{job.out}: written, {size(written)}{answered}. Its entry for models.yaml:\n", err=True)
    click.echo(yaml.safe_dump({"models": {name: keys}}, sort_keys=False).rstrip())


def _source(model: str, config: Path | None) -> Path:
    """Return the directory of the model: that of a model of models.yaml, else the one that is named."""
    from supervisor.config import examine_config
    from supervisor.yaml_source import ConfigError

    if "/" not in model:
        try:
            models = examine_config(find_config(config, default_runtime_dir())).config.models
        except ConfigError as e:
            if config is not None:
                raise CommandFailure(exit_codes.CONFIG, "config", *map(str, e.problems)) from None
            models = {}
        if model in models:
            return models[model].model_dir.absolute()
    path = Path(model).expanduser().absolute()
    if not path.is_dir():
        message = f"{model}: neither a directory nor a model of models.yaml; name that file with --config"
        raise CommandFailure(exit_codes.CONFIG, "no_model", message)
    return path


def _look(job: Job) -> dict[str, Any]:
    """Return the facts about the source, read in a process of its own. Raises CommandFailure if it is no source."""
    command = [*CONVERSION, "look", str(job.source), str(job.bits), str(job.head_bits)]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=LOOK_S, stdin=subprocess.DEVNULL, env=child_environment(),
            check=False,
        )  # fmt: skip
        facts: dict[str, Any] = json.loads(ran.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        facts = {"error": f"{job.source} was not read within {LOOK_S:g} s: its disk hangs, see `dmesg`"}
    except ValueError:
        facts = {"error": ran.stderr.strip().rpartition("\n")[2] or f"exit code {ran.returncode}"}
    if "error" in facts:
        raise CommandFailure(exit_codes.CONFIG, "source", facts["error"])
    return facts


def _gpus() -> "list[Gpu]":
    from supervisor.placement.gpu_reader import read_once
    from supervisor.placement.gpus import GpusUnknown

    try:
        return read_once()
    except GpusUnknown as e:
        message = f"quantize needs a CUDA GPU, and none can be used here: NVML: {e}"
        raise CommandFailure(exit_codes.CONFIG, "no_gpus", message) from None


def choose_gpu(box: "Sequence[Gpu]", wanted: int | None, needs: Mapping[str, int], outer: str | None) -> "Gpu":
    """Return the GPU for the conversion. Raises CommandFailure, with the arithmetic, if none has room. Pure.

    wanted  index of the GPU; None for the one with the most free memory
    needs   bytes by what they are for
    outer   CUDA_VISIBLE_DEVICES of this process; None: all GPUs
    """
    pins = None if outer is None else [pin.strip() for pin in outer.split(",") if pin.strip()]
    usable = [
        gpu for gpu in box if not gpu.mig and (pins is None or any(map(gpu.is_meant, pins)))
        and wanted in (None, gpu.index)
    ]  # fmt: skip
    needed = sum(needs.values())
    if roomy := [gpu for gpu in usable if gpu.free >= needed]:
        return max(roomy, key=lambda gpu: gpu.free)
    parts = ", ".join(f"{part} {size(count)}" for part, count in needs.items())
    free = "; ".join(f"GPU {gpu.index} has {size(gpu.free)} of {size(gpu.total)} free" for gpu in usable)
    if not usable:
        which = "no GPU" if wanted is None else f"no GPU {wanted}"
        free = f"there is {which} that may be used (CUDA_VISIBLE_DEVICES, MIG)"
    message = (
        f"the conversion needs {size(needed)} ({parts}); {free}: free some with `modelctl stop`, or use another GPU"
    )
    raise CommandFailure(exit_codes.NO_ROOM, "no_room", message)


def check_disk(out: Path, needed: int, free: int) -> None:
    """Raise CommandFailure if the disk has no room for the job and its result. Pure.

    free  bytes, with those that the job holds already
    """
    if free < needed:
        message = f"the result and the job need {size(needed)} on the disk of {out}, and {size(free)} are free"
        raise CommandFailure(exit_codes.CONFIG, "no_disk", f"{message}: free some, or name another --out")
