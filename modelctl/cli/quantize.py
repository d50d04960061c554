"""The command quantize: convert a model to EXL2 with ExLlamaV2's own converter, as a job that can be resumed."""

import fcntl
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click

from modelctl.cli import exit_codes
from modelctl.cli import options as completion
from modelctl.cli.doctor import ANSWER_S, PROMPT, TOKENS
from modelctl.cli.findings import answer_of
from modelctl.cli.options import as_json, end, ending_by, find_config
from modelctl.cli.root import CommandFailure, command
from modelctl.cli.serve import SERVE, child_environment, client_of
from modelctl.cli.waiting import REDRAW_S, LiveLines, ModelStatus, Progress, Shown, settled_up, shown, until
from protocol.errors import ConnectionLost, WireError
from protocol.limits import SUPERVISOR_NAME
from protocol.process.birth import die_with
from protocol.process.paths import default_runtime_dir
from supervisor.config.model_search import name_of
from supervisor.config.spelling import size
from supervisor.logs.files import log_path
from supervisor.workers.environment import CONVERSION

if TYPE_CHECKING:
    from supervisor.placement.gpus import Gpu


# The job of ``quantize``: its directory, and the package's converter as a child process with progress.
#
# The directory is beside the result, and is named like it with ``.job`` at the end. It holds the package's files
# (job_new.json, hidden states, tensors), the converter's output in quantize.log, and a lock. The result comes into
# being in ``compiled`` there, and is renamed when it is complete.


END_S: Final = 10.0
"""Seconds that the converter has to end. It first finishes writing its job's file."""
PHASES: Final = {"Optimizing": "optimizing", "Quantizing": "quantizing", "Tokenizing (2)": "quantizing",
                 "Compiling": "compiling"}  # fmt: skip
"""What people are told about the stages of the package. The others are part of the measurement."""
COUNTED: Final = {"Measuring": "modules", "Quantizing": "modules", "Compiling": "modules", "Optimizing": "tries"}
_STATUS: Final = re.compile(r"\[STATUS\](\{.*\})\[/STATUS\]")
_TROUBLE: Final = re.compile(r"^(?: ?(?:##|\*\*) (?:Error: )?(.+)|(\w+(?:\.\w+)*(?:Error|Exception)(?::.*)?))$")


def stage_of(line: str) -> tuple[str, Progress | None] | None:
    """Return the phase that a line of the converter tells of, and how far it is. None for any other line. Pure."""
    if (match := _STATUS.search(line)) is None:
        return None
    try:
        status = json.loads(match[1])
        stage, share = str(status["stage"]), float(status["completion"])
    except (ValueError, KeyError, TypeError):
        return None
    done, total, unit = status.get("done"), status.get("total"), COUNTED.get(stage)
    if unit is None:
        progress = None
    elif isinstance(done, int) and isinstance(total, int):
        progress = {"done": done, "total": total, "unit": unit}
    else:
        progress = {"done": round(share * 10_000), "total": 10_000}
    return PHASES.get(stage, "measuring"), progress


def trouble_of(line: str) -> str | None:
    """Return why the conversion failed, if a line of the converter says so. Pure."""
    match = _TROUBLE.match(line.rstrip())
    return match and (match[1] or match[2])


@dataclass(frozen=True)
class Conversion:
    """A conversion, new or begun before.

    bits, head_bits  bits per weight of the layers and of the head
    measurement      file with the measurement of an earlier conversion of the same model; None to measure
    """

    source: Path
    out: Path
    bits: float
    head_bits: int
    measurement: Path | None = None

    @property
    def directory(self) -> Path:
        return self.out.with_name(f"{self.out.name}.job")

    @property
    def log(self) -> Path:
        return self.directory / "quantize.log"

    @property
    def compiled(self) -> Path:
        return self.directory / "compiled"

    @property
    def used(self) -> int:
        """Return the bytes that the job's files take now."""
        return sum(file.stat().st_size for file in self.directory.rglob("*") if file.is_file())

    @contextmanager
    def locked(self) -> Iterator[BinaryIO]:
        """Make the directory and hold its lock. The converter inherits the lock, so it lasts until both are gone.

        Raises CommandFailure if another command works there.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "modelctl.lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"another `modelctl quantize` works in {self.directory}: wait for its end"
                raise CommandFailure(exit_codes.TEMPFAIL, "busy", message) from None
            yield lock

    def state(self) -> dict[str, Any] | None:
        """Return the package's job; None if none was begun, or if it was cut off while its file was written.

        Raises CommandFailure for a job with another model or other bits.
        """
        try:
            job = json.loads((self.directory / "job_new.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        if not isinstance(job, dict) or "invalid" in job:
            return None
        for key, asked in (("in_dir", str(self.source)), ("bits", self.bits), ("head_bits", self.head_bits)):
            if job.get(key) != asked:
                message = f"{self.directory} holds a job with {key} {job.get(key)}, and not {asked}"
                raise CommandFailure(
                    exit_codes.CONFIG, "other_job", f"{message}: name another --out, or remove that directory"
                )
        return job

    def begin(self) -> list[str]:
        """Return the options of the converter, for a job that goes on or begins. Remove what neither can use."""
        options = ["-i", self.source, "-o", self.directory, "-cf", self.compiled, "-b", self.bits]
        options += ["-hb", self.head_bits, "-so"]
        measurement = self.measurement
        if self.state() is None:
            made = self.directory / "measurement.json"  # the dearer half of a job that was cut off
            for path in self.directory.iterdir():
                if path.name not in ("modelctl.lock", self.log.name, made.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            if measurement is None and made.is_file():
                measurement = made
            if measurement is not None:
                options += ["-m", measurement]
        if self.compiled.is_dir():
            shutil.rmtree(self.compiled)  # what a killed converter has left there
        return [str(option) for option in options]

    def run(self, devices: str, lock: BinaryIO, lines: LiveLines) -> None:
        """Run the converter to its end, and show its progress. Raises CommandFailure if it fails.

        devices  CUDA_VISIBLE_DEVICES for it

        Ends the converter if this process is interrupted. Call this in the main thread, because the converter ends with
        the thread that starts it.
        """
        if (self.state() or {}).get("progress") == "finished":
            return
        told: list[str] = []
        environment = child_environment() | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": devices}
        with self.log.open("ab") as log, subprocess.Popen(
            [*CONVERSION, "run", str(os.getpid()), *self.begin()],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True, pass_fds=(lock.fileno(),),
        ) as converter:  # fmt: skip
            try:
                self._follow(converter, log, lines, told)
                code = converter.wait()
            finally:
                end(converter, END_S)
        lines.clear()
        if (self.state() or {}).get("progress") != "finished":  # the package ends with 0 after most of its errors
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            why = told[-1] if told else f"the converter ended with {how}"
            message = f"the conversion failed: {why}; its output is in {self.log}; the same command goes on from there"
            raise CommandFailure(exit_codes.FAILED, "failed", message)

    def _follow(self, converter: "subprocess.Popen[bytes]", log: BinaryIO, lines: LiveLines, told: list[str]) -> None:
        """Show the progress until the converter's output ends. Add to ``told`` what it says about its faults."""
        assert converter.stdout is not None
        shown, rest = Shown(f"{self.out.name}  starting", f"{self.out.name}: starting"), b""
        with selectors.DefaultSelector() as selector:
            selector.register(converter.stdout, selectors.EVENT_READ)
            drawn = 0.0
            while True:
                if selector.select(REDRAW_S):
                    if not (read := os.read(converter.stdout.fileno(), 1 << 16)):
                        return
                    log.write(read)
                    log.flush()
                    *whole, rest = (rest + read).split(b"\n")
                    for line in (each.decode(errors="replace") for each in whole):
                        if (stage := stage_of(line)) is not None:
                            phase, progress = stage
                            shown = Shown(f"{self.out.name}  {phase}", f"{self.out.name}: {phase}", progress)
                        elif (trouble := trouble_of(line)) is not None:
                            told.append(trouble)
                if time.monotonic() - drawn >= REDRAW_S:
                    lines.show({"": shown})
                    drawn = time.monotonic()

    def finish(self) -> None:
        """Move the result to its place, with the measurement, which serves for other numbers of bits."""
        if (self.directory / "measurement.json").is_file():
            shutil.copyfile(self.directory / "measurement.json", self.compiled / "measurement.json")
        self.compiled.replace(self.out)
        shutil.rmtree(self.directory)


# Try a model out: serve it for a moment with a supervisor of its own, and have it generate some tokens.


def try_out(name: str, keys: dict[str, Any], lines: LiveLines) -> dict[str, Any]:
    """Serve one model and ask it. Return {tokens, seconds} of its answer.

    keys  the keys of the model in models.yaml

    Raises CommandFailure if the model does not load or does not answer. The supervisor ends with this call, and also
    when this process is killed.
    """
    import yaml

    with tempfile.TemporaryDirectory(prefix="modelctl-") as place:
        file = Path(place, "models.yaml")
        file.write_text(yaml.safe_dump({"models": {name: keys}}), encoding="utf-8")
        with subprocess.Popen(
            [*SERVE, "-c", file, "--runtime-dir", f"{place}/r"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=_environment(),
            start_new_session=True, preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
        ) as serving:  # fmt: skip
            try:
                return _ask(name, Path(place, "r"), serving, lines)
            except (WireError, ConnectionLost, TimeoutError) as e:
                raise CommandFailure(exit_codes.FAILED, "trial", f"{name} does not answer: {e}") from None
            finally:
                lines.clear()
                end(serving, ANSWER_S)


def _environment() -> dict[str, str]:
    """Return an environment whose variables set no keys: a gateway or other models are not part of a trial."""
    from supervisor.config.file import DEFAULT_MODEL, PREFIX

    environment = child_environment()
    keys = [name for name in environment if name == DEFAULT_MODEL or (name.startswith(PREFIX) and "__" in name)]
    return {name: value for name, value in environment.items() if name not in keys}


def _ask(name: str, runtime_dir: Path, serving: "subprocess.Popen[bytes]", lines: LiveLines) -> dict[str, Any]:
    def settled(status: dict[str, Any]) -> ModelStatus | None:
        model: ModelStatus = status["models"][0]
        if settled_up(model):
            return model
        lines.show({name: shown(model)})
        return None

    if (client := client_of(serving, runtime_dir, log_path(runtime_dir, SUPERVISOR_NAME))) is not None:
        with suppress(ConnectionLost), client:
            if (model := until(client, settled))["state"] != "ready":
                raise CommandFailure(exit_codes.FAILED, "trial", f"{name} does not load: {model['reason']}")
            began = time.monotonic()
            answer = client.complete(name, PROMPT, max_tokens=TOKENS, deadline_ms=int(1000 * ANSWER_S))
            return {"tokens": answer.usage["completion_tokens"], "seconds": round(time.monotonic() - began, 3)}
        serving.wait()
    assert serving.stderr is not None
    why = serving.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
    raise CommandFailure(exit_codes.FAILED, "trial", f"{name} cannot be served: {why}")


TRIAL_CONTEXT: Final = 2048
"""Tokens of context for the test generation."""
LOOK_S: Final = 120.0
"""Seconds for the look at the source, from a disk that has to wake up."""


@command(
    ("modelctl quantize ~/models/llama-8b --bits 4.0", "Write ~/models/llama-8b-4.0bpw"),
    ("modelctl quantize llama-8b --bits 6.0 --gpu 1", "Quantize a model of models.yaml on GPU 1"),
)
@click.argument("model", shell_complete=completion.models_and_directories)
@click.option("-b", "--bits", type=click.FloatRange(2, 8), required=True, help="Mean bits of a weight of the layers.")
@click.option("--head-bits", type=click.Choice(["2", "3", "4", "5", "6", "8"]), default="6", show_default=True,
              help="Bits of a weight of the head.")  # fmt: skip
@click.option("-o", "--out", metavar="DIR", type=click.Path(path_type=Path), help="The new model's directory.  "
              "[default: beside MODEL's, such as llama-8b-4.0bpw]")  # fmt: skip
@click.option("--gpu", type=click.IntRange(0), help="The GPU to use.  [default: the one with the most free memory]")
@click.option("--measurement", metavar="FILE", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="measurement.json of an earlier result of the same model.")  # fmt: skip
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
) -> None:
    """Convert MODEL, in 16 bits, to EXL2. MODEL is a directory, or a name in models.yaml.

    It takes minutes to hours on one GPU. The state is saved every three minutes in DIR.job. After Ctrl-C, or any other
    end, the same command goes on from there.
    """
    from supervisor.placement.estimates import CONTEXT

    source = _source(model, config)
    out = (out or source.with_name(f"{source.name}-{bits}bpw")).absolute()
    job = Conversion(source, out, bits, int(head_bits), measurement and measurement.absolute())
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
    tested = None
    with ending_by(signal.SIGTERM, signal.SIGHUP):
        _convert(job, chosen, facts["out"] + facts["work"], lines, quiet=as_json)
        if not no_test:
            trial = {**keys, "gpu": chosen.index, "max_seq_len": min(facts["context"], TRIAL_CONTEXT)}
            tested = _test(job, name, trial, lines)
    _tell(job, name, keys, tested, as_json)


def _convert(job: Conversion, gpu: "Gpu", needed: int, lines: LiveLines, *, quiet: bool) -> None:
    """Run the job to its end. Raises CommandFailure, also after Ctrl-C. ``needed``: bytes on the disk."""
    from modelctl.cli.serve import compile_for

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


def _test(job: Conversion, name: str, keys: dict[str, Any], lines: LiveLines) -> dict[str, Any]:
    try:
        return try_out(name, keys, lines)
    except CommandFailure as e:
        raise CommandFailure(exit_codes.FAILED, "trial", f"{job.out} is written, but {e}") from None


def _tell(job: Conversion, name: str, keys: dict[str, Any], tested: dict[str, Any] | None, as_json: bool) -> None:
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
    from supervisor.config.file import examine_config
    from supervisor.config.yaml_source import ConfigError

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


def _look(job: Conversion) -> Mapping[str, Any]:
    """Return the facts about the source, read in a process of its own. Raises CommandFailure if it is no source."""
    command = [*CONVERSION, "look", str(job.source), str(job.bits), str(job.head_bits)]
    late = f"{job.source} was not read within {LOOK_S:g} s: its disk hangs, see `dmesg`"
    facts = answer_of(command, LOOK_S, late, stdin=subprocess.DEVNULL, env=child_environment())
    if why := facts.get("error") or facts.get("absent"):
        raise CommandFailure(exit_codes.CONFIG, "source", why)
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
