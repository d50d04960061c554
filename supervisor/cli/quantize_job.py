"""The job of ``quantize``: its directory, and the package's converter as a child process with progress.

The directory is beside the result, and is named like it with ``.job`` at the end. It holds the package's files
(job_new.json, hidden states, tensors), the converter's output in quantize.log, and a lock. The result comes into being
in ``compiled`` there, and is renamed when it is complete.
"""

import fcntl
import json
import os
import re
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from supervisor.cli import exit_codes
from supervisor.cli.detach import child_environment
from supervisor.cli.errors import CommandFailure
from supervisor.cli.live_lines import REDRAW_S, LiveLines, Progress, Shown
from supervisor.worker_modules import CONVERSION

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
class Job:
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
                _end(converter)
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


def _end(converter: "subprocess.Popen[bytes]") -> None:
    """End the converter, and whatever it has started."""
    try:
        if converter.poll() is None:
            converter.terminate()
            converter.wait(END_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also when a second signal cuts the wait short
        if converter.poll() is None:
            os.killpg(converter.pid, 9)
