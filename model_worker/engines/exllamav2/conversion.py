"""Convert a model to EXL2 with the package's own converter, in a process of its own.

    python -P -m model_worker.engines.exllamav2.conversion look MODEL_DIR BITS HEAD_BITS
    python -P -m model_worker.engines.exllamav2.conversion run PARENT OPTION...

``look`` prints one JSON object about the source: {"error": why it cannot be converted}, or {"missing": what this
machine lacks, or null; "out", "work": bytes on the disk of the result, and of the job; "needs": {part: bytes of GPU
memory}; "context"}. It imports no torch.

``run`` runs exllamav2.conversion.convert_exl2 with these options. PARENT is the process that started it. The package
writes lines for people on stdout. With ``-so`` it also writes [STATUS]{"stage", "completion"}[/STATUS]. This program
adds "done" and "total" to them: the modules that are done, of all modules.

The package saves its state every three minutes in job_new.json, and for a moment marks that file as invalid. SIGTERM
ends this process at a moment when the file is sound, so that the same command goes on from there. The package's own
handling of SIGINT is not used: it waits for input, and saves a state that does not fit its files.
"""

import json
import os
import resource
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from model_worker.engine import LoadError
from model_worker.engines.exllamav2 import extension
from model_worker.engines.exllamav2.check import check_directory
from model_worker.engines.exllamav2.meaning import open_directory
from model_worker.engines.exllamav2.package_model import only_the_models_weights
from model_worker.engines.model_dir import ModelShape, check_layers, read_shape
from protocol.process.birth import die_with, set_title
from protocol.process.worker_spec import install_command, missing_for, not_installed

ROWS, LENGTH = 115, 2048
"""Rows of the calibration data that come with the package, and tokens of each."""
PACKAGES = ("pandas", "fastparquet")
"""What the converter imports, and serving does not."""
MEMORY_LIMIT = 2 << 30
"""Bytes of address space for ``look``, because a directory may be hostile."""
CONTEXT_BYTES = 512 << 20
"""What CUDA and its libraries hold on a GPU."""
_ON_CPU_FROM = 600_000_000
"""Elements of a Hessian that the package permutes in host memory."""
_SAFE_S = 0.02


def look(path: str, bits: float, head_bits: float) -> dict[str, Any]:
    """Return what ``look`` prints."""
    try:
        directory = open_directory(path)
        if directory.quantization is not None:
            return {"error": f"{path} is quantized already ({directory.quantization}): give the model in 16 bits"}
        check_directory(directory)
        check_layers(directory)
        shape, context = read_shape(directory), directory.context(None)
    except LoadError as e:
        return {"error": str(e)}
    except MemoryError:
        return {"error": f"{path}: reading it takes more than {MEMORY_LIMIT >> 30} GiB of memory"}
    table = shape.vocab * shape.hidden
    separate_head = any("lm_head" in name for name in directory.tensors)
    elements = sum(tensor.elements for tensor in directory.tensors.values()) - table * (1 + separate_head)
    layers = int(max(0, elements) * bits / 8 + table * head_bits / 8)
    states = 2 * ROWS * LENGTH * shape.hidden * 2  # the file, and the one that takes its place
    return {
        "missing": _missing(),
        "out": layers + 2 * table,  # the table of embeddings stays in 16 bits
        "work": layers + states,
        "needs": needs(shape),
        "context": context,
    }


def needs(shape: ModelShape) -> dict[str, int]:
    """Return the bytes of GPU memory that the conversion takes at least, by what they are for. Pure.

    The package has one module on the GPU at a time, and computes one row of calibration data at a time.
    """
    experts, inner, hidden = max(1, shape.experts), shape.intermediate, shape.hidden
    copies = 2 if inner**2 > _ON_CPU_FROM else 3  # permuted, decomposed, inverted
    layer = {
        "weights": 3 * hidden * inner * experts * 2,
        "hessians": 4 * (hidden**2 + experts * inner**2) + copies * 4 * inner**2,
        "quantizing": 3 * 4 * hidden * inner,
        "activations": LENGTH * (3 * inner + 6 * hidden) * 4 + shape.heads * LENGTH**2 * 2,
    }
    head = {"weights": 2 * hidden * shape.vocab, "quantizing": 8 * hidden * shape.vocab,
            "activations": 10 * LENGTH * shape.vocab}  # fmt: skip
    return max(layer, head, key=lambda parts: sum(parts.values())) | {"context": CONTEXT_BYTES}


def _missing() -> str | None:
    """Return what this machine lacks besides a GPU, in one line."""
    if (missing := missing_for("exllamav2")) is not None:
        return missing
    version, cuda = extension.torch_version()
    if not cuda:
        return f"torch {version} is built for the CPU: install a build for CUDA, see pytorch.org"
    if lacking := not_installed(PACKAGES):
        return f"ExLlamaV2's converter needs {' and '.join(lacking)}: run {install_command('exllamav2')}"
    return None


def run(parent: int, options: list[str]) -> None:
    """Run the package's converter until it ends the process."""
    signal.signal(signal.SIGTERM, _end_when_sound)
    signal.signal(signal.SIGALRM, _end_when_sound)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not die_with(parent, signal.SIGTERM):
        sys.exit(1)
    set_title("converter")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    extension.import_built()
    from exllamav2.conversion import bot_status

    from model_worker.engines.exllamav2.package_model import compute_as_transformers

    compute_as_transformers()
    bot_status.print_stage = _print_stage
    sys.argv[1:] = options
    try:
        with only_the_models_weights():
            runpy.run_module("exllamav2.conversion.convert_exl2", run_name="__main__", alter_sys=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # too late: it has ended by itself


def _print_stage(job: dict[str, Any], stage: str, progress: int, max_progress: int) -> None:
    """Do what the package's function of this name does, and print the counts, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # again, because the package has set its own handler
    status = {"stage": stage, "completion": round(progress / max_progress, 4), "done": progress, "total": max_progress}
    print(f"[STATUS]{json.dumps(status)}[/STATUS]", flush=True)


def _end_when_sound(_number: int, frame: FrameType | None) -> None:
    """End the process, or try again in a moment if the job's file is being written."""
    job = sys.modules["__main__"].__dict__.get("job")
    sound = not (isinstance(job, dict) and "invalid" in job)
    while frame is not None and sound:
        sound = frame.f_code.co_name != "save_job"
        frame = frame.f_back
    if sound:
        os._exit(128 + signal.SIGTERM)
    signal.setitimer(signal.ITIMER_REAL, _SAFE_S)


def main() -> None:
    match sys.argv[1:]:
        case ["look", path, bits, head_bits]:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
            print(json.dumps(look(str(Path(path).absolute()), float(bits), float(head_bits))))
        case ["run", parent, *options]:
            run(int(parent), options)
        case _:
            sys.exit(2)


if __name__ == "__main__":
    main()
